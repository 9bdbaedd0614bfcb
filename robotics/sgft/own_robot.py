"""What `finetune.fit` makes of a policy and a value of one's own: a Source, an agent, a result to deploy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from core import export as exporting
from core import ranges
from core.errors import NonFiniteError, UserError, nearest
from core.rl import normalize, sac
from core.rl.networks import Actor, Critic
from core.rl.replay import Transition
from robotics.sgft import gymnasium_robot, model_based, sac_agent
from robotics.sgft.agents import Agent
from robotics.sgft.dynamics import Dynamics
from robotics.sgft.ranges import SETTINGS as RANGES
from robotics.sgft.source import Experience, Networks, Source, policy_action

__all__ = ["Finetuned", "InMemory", "Policy", "make_agent", "make_source"]

Array = jax.Array
SETTINGS: dict[str, dict[str, Any]] = {
    "sac": {
        "critics": 2,
        "features": (128, 128),
        "batch": 128,
        "utd": 4,
        "policy_delay": 2,
        "tau": 0.01,
        "lr": 1e-3,
        "actor_lr": 3e-4,
        "alpha": 0.002,
        "log_std": -1.2,
        "warmup_steps": 200,
        "prefit_updates": 10_000,
    },
    "model_based": {
        "members": 3,
        "hidden": (128, 128),
        "adapter": (32,),
        "candidates": 128,
        "pretrain_updates": 10_000,
        "pretrain_batch": 256,
        "updates": 150,
        "real_batch": 128,
        "sim_batch": 128,
        "lr": 1e-3,
        "exploration": 0.3,
    },
}
COLUMNS = ("observation", "action", "reward", "next_observation", "terminated")


class Policy(NamedTuple):
    """A tanh-Gaussian policy to start from: an `Actor` (log_std "parameter", horizon 1) and its variables.

    `stats` are the observation statistics that it was trained with; without any, observations are clipped to
    +-10.
    """

    actor: Actor
    variables: Any
    stats: normalize.RunningStats | None = None

    @property
    def observation_size(self) -> int:
        """Length of the observations it reads."""
        return self.variables["params"]["body"]["Dense_0"]["kernel"].shape[0]


def make_source(policy: Policy, value: Callable, simulated: Mapping[str, Any] | None, gamma: float) -> Source:
    """A Source of one lane `[1, ...]` from parts of one's own; `finetune.fit` says what they are.

    Raises UserError where V_sim does not map `[..., O]` to `[...]`, or `simulated` lacks a column, or one has
    another shape or numbers that are not finite.
    """
    size, actions = policy.observation_size, policy.actor.action_size
    if policy.actor.log_std != "parameter" or policy.actor.horizon != 1:
        raise UserError('the policy must be an Actor with log_std="parameter" and horizon=1')
    probe = np.zeros((1, 2, size), np.float32)
    try:
        shape = np.shape(value(probe))
    except Exception as error:  # whatever someone's own function raises
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"V_sim does not take observations of size {size}, which the policy reads: it must be trained on "
            f"what the robot can observe ({reason})"
        ) from error
    if shape != probe.shape[:-1]:
        raise UserError(f"V_sim maps observations {probe.shape} to {shape}: it must give {probe.shape[:-1]}")
    widths = {"observation": (size,), "next_observation": (size,), "action": (actions,)}
    if simulated is None:
        simulated = {name: np.zeros((1, *widths.get(name, ())), np.float32) for name in COLUMNS}
    columns = _columns(simulated, widths)
    columns["terminated"] = columns["terminated"].astype(bool)
    n = len(columns["reward"])
    counts = np.zeros(n, np.int32)
    ends = (np.asarray(value(columns[name]), np.float32) for name in ("observation", "next_observation"))
    rows = Transition(**columns, truncated=np.zeros(n, bool), episode_id=counts, t=counts)
    stats = normalize.init(size) if policy.stats is None else policy.stats
    zero, one = jnp.float32(0), jnp.float32(1)
    source = Source(policy.variables, None, zero, one, stats, jnp.float32(gamma), Experience(rows, *ends))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], source)


def _columns(simulated, widths):
    """The columns of `simulated` as float32 arrays; UserError for one that is missing or does not fit."""
    if missing := [name for name in COLUMNS if name not in simulated]:
        raise UserError(f"simulated transitions lack {', '.join(missing)}; they need {', '.join(COLUMNS)}")
    columns = {name: np.asarray(simulated[name], np.float32) for name in COLUMNS}
    n = len(np.atleast_1d(columns["reward"]))
    for name, column in columns.items():
        wanted = (max(n, 1), *widths.get(name, ()))
        if column.shape != wanted:
            raise UserError(f"simulated[{name!r}] has shape {column.shape}, but {wanted} is needed")
        if not np.isfinite(column).all():
            raise UserError(f"simulated[{name!r}] has numbers that are not finite: leave those rows out")
    return columns


def make_agent(
    method: str,
    policy: Policy,
    value: Callable,
    *,
    source: Source,
    gamma: float,
    horizon: int,
    capacity: int,
    block: int,
    reward: Callable | None,
    prefit: bool,
    settings: Mapping[str, Any],
) -> Agent:
    """SGFT-SAC ("sac") or SGFT-MB ("model_based") around a policy and a value of one's own.

    Raises UserError for H < 1, an unknown method or setting, or parts that the method can not work with.
    """
    if method not in SETTINGS:
        raise UserError(f"method is {method!r}{nearest(method, SETTINGS)}; one of {', '.join(SETTINGS)}")
    for name in settings:
        if name not in SETTINGS[method]:
            known = ", ".join(SETTINGS[method])
            raise UserError(f"no setting {name!r}{nearest(name, SETTINGS[method])}; {method} has: {known}")
    chosen = {**SETTINGS[method], **settings}
    ranges.check(chosen, RANGES, prefix="setting ")
    if horizon < 1:
        raise UserError(f"the window H (horizon) must be at least 1, not {horizon}")
    if method == "sac":
        updates, delay = block * chosen["utd"], chosen["policy_delay"]
        if updates % delay:
            raise UserError(f"block * utd = {updates} is not a multiple of policy_delay = {delay}")
        return _model_free(policy, gamma, horizon, capacity, prefit, chosen)
    if reward is None or not prefit:
        raise UserError(
            "SGFT-MB needs reward=, a function of the observation entered, and simulated= transitions"
        )
    return _model_based(policy, value, source, gamma, horizon, capacity, reward, chosen)


def _model_free(policy, gamma, horizon, capacity, prefit, chosen):
    actor = policy.actor.clone(horizon=horizon, train_log_std=False, log_std_init=chosen["log_std"])
    critic = Critic(chosen["critics"], tuple(chosen["features"]), nn.relu, layer_norm=True, horizon=horizon)
    hyper = sac.Hyper.arrays(
        gamma=gamma,
        tau=chosen["tau"],
        actor_lr=chosen["actor_lr"],
        critic_lr=chosen["lr"],
        alpha_lr=0.0,
        bootstrap=horizon > 1,
        backup_entropy=0.0,
    )
    rules = sac_agent.Rules(hyper, **{name: chosen[name] for name in ("warmup_steps", "log_std", "alpha")})
    statics = {name: chosen[name] for name in ("batch", "utd", "policy_delay")}
    statics["prefit_updates"] = chosen["prefit_updates"] if prefit else 0
    settings = sac_agent.ModelFree(
        actor, critic, capacity=capacity, subset=min(2, chosen["critics"]), **statics
    )
    return sac_agent.make(settings, jax.tree.map(jnp.float32, rules))


def _model_based(policy, value, source, gamma, horizon, capacity, reward, chosen):
    probe = jax.ShapeDtypeStruct((2, policy.observation_size), jnp.float32)
    for name, function in (("V_sim", value), ("the reward", reward)):
        try:
            jax.eval_shape(function, probe)
        except Exception as error:  # whatever someone's own function raises
            raise UserError(
                f"SGFT-MB plans through {name}, so JAX must be able to trace it: write it with jax.numpy "
                f"({type(error).__name__})"
            ) from error
    seen = jax.tree.map(lambda leaf: np.asarray(leaf[0]), source.simulated.transition)
    scale = np.maximum(np.std(seen.next_observation - seen.observation, axis=0), 1e-3)
    widths = {name: tuple(chosen.pop(name)) for name in ("hidden", "adapter")}
    network = Dynamics(tuple(scale.tolist()), **widths)
    return model_based.make(
        model_based.ModelBased(network, horizon=horizon, capacity=capacity, **chosen),
        value=lambda source, observation: value(observation),
        default_action=functools.partial(policy_action, networks=Networks(policy.actor, None)),
        reward=reward,
        gamma=gamma,
        action_size=policy.actor.action_size,
    )


class InMemory:
    """Stands in for core.run.Run where nothing is to be written: runs the loop, refuses a non-finite loss."""

    def loop(self, name: str, *, init: Callable, step: Callable, total: int, **others: Any) -> Any:
        """`state = step(state, i)` for i in range(total), from `init()`."""
        del name, others
        state = init()
        for i in range(total):
            state = step(state, i)
        return state

    def log(self, step: int, values: Mapping[str, Any], *, group: str = "") -> None:
        """Raises NonFiniteError if a value `[]` whose key ends in "loss" is not finite."""
        for key, value in values.items():
            if key.endswith("loss") and not math.isfinite(float(value)):
                raise NonFiniteError(f"{group}/{key} is {value} at step {step}")


class Finetuned:
    """What `finetune.fit` returns.

    Attributes:
      steps: real control steps taken. episode_returns: raw return of every episode that ended, in order.
      params, apply: `apply(params, observation [B, O]) -> action [B, A]` in the system's units, pure.
    """

    def __init__(self, agent: Agent, state: Any, source: Source, robot: Any, steps: int):
        limits = robot.limits
        self.steps, self.episode_returns = steps, list(robot.episode_returns)
        self.params = jax.tree.map(lambda leaf: leaf[0], (state.deployed(), source.replace(simulated=None)))

        def apply(params: Any, observation: Array) -> Array:
            action = agent.exploit(*params, observation, jax.random.key(0))
            return gymnasium_robot.command(jnp.clip(action, -1.0, 1.0), limits, xp=jnp)

        self.apply = apply
        self._jitted = jax.jit(apply)

    def policy(self, observation: Any) -> np.ndarray:
        """The action `[A]` (or `[B, A]`) for an observation `[O]` (or `[B, O]`), in the system's units."""
        observation = np.asarray(observation, np.float32)
        action = np.asarray(self._jitted(self.params, np.atleast_2d(observation)))
        return action.reshape(*observation.shape[:-1], -1)

    def export(self, directory: str | Path) -> Path:
        """Writes the policy for use without this code: `core.export.load(directory)(observation [B, O])`."""
        size = self.params[1].stats.mean.shape[0]
        example = (jax.ShapeDtypeStruct((1, size), jnp.float32),)
        exporting.save(directory, self.apply, self.params, example)
        return Path(directory)
