"""Proximal policy optimisation (Schulman et al., 2017), for jit-able and host simulators alike.

The policy is a tanh-Gaussian, a = tanh(u); ratios use the density of u, where the tanh term cancels.
Everything but `collect_host` is for one lane (seed) and may be `vmap`ped over more, `Hyper` included.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from core.errors import UserError
from core.rl import distributions, normalize
from core.rl.networks import Actor, Value, forward

__all__ = [
    "Config",
    "Hyper",
    "PPOState",
    "Rollout",
    "act",
    "collect",
    "collect_host",
    "gae",
    "init",
    "loss",
    "update",
]

Array = jax.Array
Params = Any
_adam = optax.scale_by_adam(eps=1e-5)


@dataclasses.dataclass(frozen=True)
class Config:
    """What shapes the program, hashable, static under jit.

    Attributes:
      actor, value: the modules.
      epochs, minibatches: passes over a rollout, and into how many parts each pass splits it.
      normalize_observations: networks see observations through the running statistics in the state.
    """

    actor: Actor
    value: Value
    epochs: int = 4
    minibatches: int = 8
    normalize_observations: bool = True


class Hyper(flax.struct.PyTreeNode):
    """Scalars `[]` that may change or be swept without a new compile.

    Attributes:
      gamma, lam: discount and the lambda of GAE. lr: Adam's step size. clip: half width of the ratio's range.
      value_coef: weight of the value loss. std_bonus: reward for each unit of log std, summed over actions.
      max_grad_norm: global gradient norm above which gradients are scaled down.
    """

    gamma: Any = 0.97
    lam: Any = 0.95
    lr: Any = 1e-3
    clip: Any = 0.2
    value_coef: Any = 0.5
    std_bonus: Any = 0.002
    max_grad_norm: Any = 1.0

    @classmethod
    def arrays(cls, **values: float | Array) -> Hyper:
        """Hyper with float32 arrays in it, ready to stack and `vmap`; unnamed fields take the defaults."""
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), cls(**values))


class PPOState(flax.struct.PyTreeNode):
    """Everything that training changes; `step` `[]` counts updates, `stats` are of the observations."""

    step: Array
    actor: Params
    value: Params
    opt: optax.OptState
    stats: normalize.RunningStats


class Rollout(flax.struct.PyTreeNode):
    """T steps of N environments, leaves `[T, N, ...]` (numpy if collected on the host).

    `final_observation` is the observation the action led to, before any reset; `pre_tanh` is u.
    """

    observation: Array
    pre_tanh: Array
    log_prob: Array
    reward: Array
    terminated: Array
    truncated: Array
    final_observation: Array


def init(key: Array, *, config: Config, observation_size: int) -> PPOState:
    """Fresh state for observations of width `observation_size`."""
    actor_key, value_key = jax.random.split(key)
    observation = jnp.zeros((1, observation_size))
    actor = config.actor.init(actor_key, observation)
    value = config.value.init(value_key, observation)
    return PPOState(jnp.int32(0), actor, value, _adam.init((actor, value)), normalize.init(observation_size))


def _seen(stats: normalize.RunningStats, observation: Array, config: Config) -> Array:
    return normalize.apply(stats, observation) if config.normalize_observations else observation


def act(state: PPOState, observation: Array, key: Array, *, config: Config) -> tuple[Array, Array, Array]:
    """Samples (action in [-1, 1] `[..., A]`, pre-tanh u `[..., A]`, log density of u `[...]`)."""
    mean, log_std = forward(config.actor, state.actor, _seen(state.stats, observation, config))
    action, pre_tanh = distributions.sample(key, mean, log_std)
    return action, pre_tanh, distributions.gaussian_log_prob(pre_tanh, mean, log_std)


def gae(
    reward: Array,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    *,
    gamma: Array | float,
    lam: Array | float,
) -> Array:
    """Generalised advantage estimates `[T, ...]` (Schulman et al., 2016), time on the leading axis.

    delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t); the sum of (gamma * lam)^k delta_{t+k}
    ends with the episode. `next_value` is V of the state before any reset: time limits bootstrap, true ends
    do not. Inputs `[T, ...]`; the returns to regress V on are the result + value.
    """
    delta = reward + gamma * jnp.where(terminated, 0, next_value) - value
    carries = gamma * lam * ~(terminated | truncated)

    def back(advantage, x):
        delta, carry = x
        advantage = delta + carry * advantage
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, carries), reverse=True)[1]


def loss(
    params: tuple[Params, Params], batch: tuple[Array, ...], hyper: Hyper, *, config: Config
) -> tuple[Array, dict[str, Array]]:
    """Clipped surrogate + value_coef * value error - std_bonus * sum(log std), with its metrics, all `[]`.

    Args:
      params: (actor, value) variables.
      batch: observation `[B, D]` as the networks see it, pre_tanh `[B, A]`, log_prob, advantage and returns
        `[B]`; advantages are normalised here, over the minibatch.
    """
    observation, pre_tanh, old_log_prob, advantage, returns = batch
    actor, value = params
    advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
    mean, log_std = forward(config.actor, actor, observation)
    log_ratio = distributions.gaussian_log_prob(pre_tanh, mean, log_std) - old_log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - hyper.clip, 1 + hyper.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
    value_loss = jnp.mean((forward(config.value, value, observation) - returns) ** 2)
    bonus = jnp.mean(jnp.sum(log_std, axis=-1))
    total = policy_loss + hyper.value_coef * value_loss - hyper.std_bonus * bonus
    return total, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "log_std": jnp.mean(log_std),
        "clip_fraction": jnp.mean(ratio != clipped),
        "kl": jnp.mean(ratio - 1 - log_ratio),
    }


def update(
    state: PPOState, rollout: Rollout, key: Array, hyper: Hyper, *, config: Config
) -> tuple[PPOState, dict[str, Array]]:
    """All epochs and minibatches of PPO on one rollout `[T, N, ...]`, freshly shuffled each epoch.

    Observation statistics take the rollout in afterwards, so that the ratios start at 1.

    Returns:
      state and metrics `[]`, averaged over the minibatches.
    """
    samples = rollout.reward.size
    if samples % config.minibatches:
        raise UserError(f"{samples} samples of a rollout do not split into {config.minibatches} minibatches")
    observation = _seen(state.stats, rollout.observation, config)
    value = forward(config.value, state.value, observation)
    next_value = forward(config.value, state.value, _seen(state.stats, rollout.final_observation, config))
    advantage = gae(
        rollout.reward,
        value,
        next_value,
        rollout.terminated,
        rollout.truncated,
        gamma=hyper.gamma,
        lam=hyper.lam,
    )
    data = (observation, rollout.pre_tanh, rollout.log_prob, advantage, advantage + value)
    data = jax.tree.map(lambda x: x.reshape(samples, *x.shape[2:]), data)

    def minibatch(carry, index):
        params, opt = carry
        batch = jax.tree.map(lambda x: x[index], data)
        gradient, metrics = jax.grad(loss, has_aux=True)(params, batch, hyper, config=config)
        norm = optax.tree.norm(gradient)
        shrink = jnp.minimum(1.0, hyper.max_grad_norm / jnp.maximum(norm, 1e-12))
        direction, opt = _adam.update(jax.tree.map(lambda g: g * shrink, gradient), opt)
        params = jax.tree.map(lambda p, d: p - hyper.lr * d, params, direction)
        return (params, opt), metrics | {"grad_norm": norm}

    def epoch(carry, key):
        # Ranks of uniform draws: a shuffle ten times cheaper on CPU than the sorts of jax.random.permutation.
        order = jax.lax.top_k(jax.random.uniform(key, (samples,)), samples)[1]
        return jax.lax.scan(minibatch, carry, order.reshape(config.minibatches, -1))

    carry = ((state.actor, state.value), state.opt)
    ((actor, value), opt), metrics = jax.lax.scan(epoch, carry, jax.random.split(key, config.epochs))
    stats = normalize.update(state.stats, rollout.observation)
    metrics = jax.tree.map(jnp.mean, metrics) | {"reward": jnp.mean(rollout.reward)}
    return PPOState(state.step + 1, actor, value, opt, stats), metrics


def collect(
    state: PPOState,
    env_state: Any,
    key: Array,
    step: Callable[[Any, Array], Any],
    *,
    config: Config,
    length: int,
) -> tuple[Any, Rollout]:
    """`length` steps of a jit-able environment under the current policy, as one scan.

    Args:
      env_state: has observation `[N, D]`, reward, terminated, truncated `[N]` and final_observation `[N, D]`.
      step: (env_state, action `[N, A]`) -> env_state, resetting ended episodes itself.

    Returns:
      (env_state, rollout `[length, N, ...]`).
    """

    def one(env_state, key):
        observation = env_state.observation
        action, pre_tanh, log_prob = act(state, observation, key, config=config)
        env_state = step(env_state, action)
        outcome = (env_state.reward, env_state.terminated, env_state.truncated, env_state.final_observation)
        return env_state, Rollout(observation, pre_tanh, log_prob, *outcome)

    return jax.lax.scan(one, env_state, jax.random.split(key, length))


@functools.partial(jax.jit, static_argnames="config")
def _act_lanes(state, observation, keys, *, config):
    return jax.vmap(functools.partial(act, config=config))(state, observation, keys)


def collect_host(
    state: PPOState,
    env_state: Any,
    key: Array,
    step: Callable[[Any, np.ndarray], Any],
    *,
    config: Config,
    length: int,
) -> tuple[Any, Rollout]:
    """`collect` for a simulator on the host that steps the environments of all lanes at once.

    One jitted call per control step serves all lanes.

    Args:
      state: leaves with a leading lane axis `[L, ...]`. key: `[L]`.
      env_state: as in `collect` but for L * N environments, lane after lane.
      step: (env_state, numpy action `[L * N, A]`) -> env_state, such as `NativeSimulator.auto_reset_step`.

    Returns:
      (env_state, rollout `[L, length, N, ...]`): `vmap` `update` over it.
    """
    lanes = state.step.shape[0]
    keys = jax.vmap(lambda k: jax.random.split(k, length), out_axes=1)(key)
    rows = []

    def by_lane(x):
        return np.asarray(x).reshape(lanes, -1, *x.shape[1:])

    for t in range(length):
        observation = by_lane(env_state.observation)
        action, *drawn = jax.device_get(_act_lanes(state, observation, keys[t], config=config))
        env_state = step(env_state, action.reshape(-1, action.shape[-1]))
        outcome = (env_state.reward, env_state.terminated, env_state.truncated, env_state.final_observation)
        rows.append(Rollout(observation, *drawn, *map(by_lane, outcome)))
    return env_state, jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *rows)
