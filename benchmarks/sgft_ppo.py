"""Our PPO against brax.training's on the same puck_push environment on MJX: seconds and steps to success."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.harness import Growth, Point, Row
from core import sim
from core.rl import distributions, normalize, ppo
from core.rl.networks import Actor, Value
from robotics.sgft.pretrain import evaluate_policy, ppo_iteration
from robotics.sgft.tasks.puck_push import TASK

# MJX prints, once for each of its importers, that its optional warp implementation is missing.
with contextlib.redirect_stdout(io.StringIO()):
    from brax import envs
    from brax.training.agents.ppo import networks as brax_networks
    from brax.training.agents.ppo import train as brax_ppo

__all__ = ["BraxTask", "against_brax", "without_compiling"]

SUCCESS = 0.8  # rate that ends a run
FEATURES = (64, 64)
EPOCHS, MINIBATCHES = 4, 8
WARM_UP = 2  # stretches of brax that are not timed, see without_compiling
LOG_STD = math.log(math.log(2) + 1e-3)  # brax's policy starts there
HYPER = ppo.Hyper.arrays(gamma=TASK.gamma, lam=0.95, lr=1e-3, clip=0.2, value_coef=0.5, std_bonus=0.002)


class Size(NamedTuple):
    """Environments, iterations between two evaluations, evaluations at most, and episodes of each."""

    environments: int = 128
    iterations: int = 2
    evaluations: int = 40
    episodes: int = 128

    @property
    def steps(self) -> int:
        """Control steps between two evaluations."""
        return self.iterations * self.environments * TASK.episode_length


class Learned(NamedTuple):
    """One run: success rate after each stretch of `Size.steps`, seconds of each, and of compiling."""

    success: list[float]
    seconds: list[float]
    compile_s: float

    @property
    def total(self) -> float:
        """Seconds of collecting and learning until the run ended."""
        return sum(self.seconds)


class BraxTask(envs.Env):
    """A simulator of core.sim as a batched brax environment that restarts its own episodes.

    Brax wants legacy keys; the simulator's typed keys travel as their data, which brax may cast and stack.
    """

    def __init__(self, simulator: Any):
        self._simulator = simulator

    def reset(self, rng: jax.Array) -> envs.State:
        """New episodes from legacy keys `[N, 2]`."""
        state = self._simulator.reset(jax.random.wrap_key_data(rng[0]))
        zeros = jnp.zeros(self._simulator.num_envs)
        info = {"truncation": zeros, "time_out": zeros, "episode_done": zeros, "episode_metrics": {}}
        return envs.State(_pack(state), state.observation, zeros, zeros, {}, info)

    def step(self, state: envs.State, action: jax.Array) -> envs.State:
        """One control step; action `[N, A]`. A time limit is announced as brax's bootstrapping wants it."""
        new = self._simulator.auto_reset_step(_unpack(state.pipeline_state), action)
        done = (new.terminated | new.truncated).astype(jnp.float32)
        info = {**state.info, "time_out": new.truncated.astype(jnp.float32), "episode_done": done}
        return state.replace(
            pipeline_state=_pack(new), obs=new.observation, reward=new.reward, done=done, info=info
        )

    @property
    def observation_size(self) -> int:
        """Width of an observation."""
        return self._simulator.task.observation_size

    @property
    def action_size(self) -> int:
        """Width of an action."""
        return self._simulator.task.action_size

    @property
    def backend(self) -> str:
        """The physics behind it."""
        return "mjx"


def _pack(state):
    return state.replace(key=jax.random.key_data(state.key))


def _unpack(state):
    return state.replace(key=jax.random.wrap_key_data(state.key))


def _simulator(size):
    return sim.make(TASK, size.environments, backend="mjx", gaps=dict(TASK.randomisation))


def _evaluator(size):
    simulator = sim.NativeSimulator(TASK, size.episodes, gaps=dict(TASK.randomisation))

    def success(policy, carry) -> float:
        """Rate at which the mean action succeeds, on the same episodes every time."""
        return float(evaluate_policy(simulator, policy, carry, jax.random.key(7), lanes=1)[0][0])

    return success


class Ours:
    """Our PPO, compiled once; a call learns from one seed until it succeeds."""

    def __init__(self, size: Size):
        self._size, self._success, self._simulator = size, _evaluator(size), _simulator(size)
        self._config = ppo.Config(
            Actor(TASK.action_size, FEATURES, log_std_init=LOG_STD),
            Value(FEATURES),
            epochs=EPOCHS,
            minibatches=MINIBATCHES,
        )
        self._reset = jax.jit(self._simulator.reset)
        state, env = self._begin(0)
        iteration = functools.partial(
            ppo_iteration,
            simulator=self._simulator,
            hyper=HYPER,
            config=self._config,
            length=TASK.episode_length,
        )
        self._iteration, self.compile_s, self.peak_bytes = harness.compile_and_time(
            iteration, state, env, jax.random.key(0), donate_argnums=(0, 1)
        )

    def _begin(self, seed):
        network_key, env_key = jax.random.split(jax.random.key(seed))
        state = ppo.init(network_key, config=self._config, observation_size=TASK.observation_size)
        return state, self._reset(env_key)

    def _policy(self, carry, observation, key):
        del key
        actor, stats = carry
        mean, _ = self._config.actor.apply(actor, normalize.apply(stats, observation))
        return carry, distributions.mode(mean)

    def __call__(self, seed: int) -> Learned:
        state, env = self._begin(seed)
        keys = iter(
            jax.random.split(jax.random.key(seed + 1000), self._size.evaluations * self._size.iterations)
        )
        learned = Learned([], [], self.compile_s)
        while len(learned.success) < self._size.evaluations:
            start = time.perf_counter()
            for _ in range(self._size.iterations):
                state, env, _ = self._iteration(state, env, next(keys))
            jax.block_until_ready(state)
            learned.seconds.append(time.perf_counter() - start)
            learned.success.append(self._success(self._policy, (state.actor, state.stats)))
            if learned.success[-1] >= SUCCESS:
                break
        return learned


class _Enough(Exception):
    """Ends brax's training loop."""


class Theirs:
    """brax.training's PPO with our network sizes and hyper-parameters; a call learns from one seed."""

    def __init__(self, size: Size):
        self._size, self._success, self._task = size, _evaluator(size), BraxTask(_simulator(size))
        self._make_policy = None

    def _policy(self, carry, observation, key):
        return carry, self._make_policy(carry, deterministic=True)(observation, key)[0]

    def __call__(self, seed: int) -> Learned:
        size, learned = self._size, Learned([], [], 0.0)

        def evaluate(step, make_policy, params):
            self._make_policy = make_policy
            if step:
                learned.success.append(self._success(self._policy, params))

        def progress(step, metrics):
            learned.seconds.append(size.steps / metrics["training/sps"])
            if learned.success[-1] >= SUCCESS and len(learned.success) > WARM_UP:
                raise _Enough

        with _device_put_replicated(), contextlib.suppress(_Enough):
            brax_ppo.train(
                self._task,
                size.steps * size.evaluations,
                wrap_env=False,
                run_evals=False,
                num_evals=size.evaluations + 1,
                num_eval_envs=size.environments,
                policy_params_fn=evaluate,
                progress_fn=progress,
                seed=seed,
                **_brax_settings(size),
            )
        run_s, compile_s = without_compiling(learned.seconds)
        first = next((i for i, rate in enumerate(learned.success) if rate >= SUCCESS), size.evaluations - 1)
        return Learned(learned.success[: first + 1], run_s[: first + 1], compile_s)


def without_compiling(stretches: list[float]) -> tuple[list[float], float]:
    """Seconds of equal stretches of work, the first `WARM_UP` of which held compiling too.

    Brax compiles inside its first stretch, and traces once more in the second, whose state is laid out anew.

    Returns:
      (the stretches with the median of the later ones in place of the first, what that took off them).
    """
    usual = float(np.median(stretches[WARM_UP:]))
    return [usual] * WARM_UP + stretches[WARM_UP:], sum(stretches[:WARM_UP]) - WARM_UP * usual


def _brax_settings(size) -> dict[str, Any]:
    networks = functools.partial(
        brax_networks.make_ppo_networks,
        policy_hidden_layer_sizes=FEATURES,
        value_hidden_layer_sizes=FEATURES,
        activation=nn.tanh,
    )
    return {
        "num_envs": size.environments,
        "episode_length": TASK.episode_length,
        "unroll_length": TASK.episode_length,
        "batch_size": size.environments // MINIBATCHES,
        "num_minibatches": MINIBATCHES,
        "num_updates_per_batch": EPOCHS,
        "learning_rate": float(HYPER.lr),
        "discounting": float(HYPER.gamma),
        "gae_lambda": float(HYPER.lam),
        "clipping_epsilon": float(HYPER.clip),
        "max_grad_norm": float(HYPER.max_grad_norm),
        "vf_loss_coefficient": 2 * float(HYPER.value_coef),  # brax halves it
        "entropy_cost": float(HYPER.std_bonus),
        "normalize_observations": True,
        "bootstrap_on_timeout": True,
        "network_factory": networks,
    }


@contextlib.contextmanager
def _device_put_replicated():
    """Lends jax a function that brax 0.14 still calls and jax 0.10 no longer has."""
    if hasattr(jax, "device_put_replicated"):
        yield
        return
    jax.device_put_replicated = lambda tree, devices: jax.tree.map(
        lambda leaf: jnp.stack([leaf] * len(devices)), tree
    )
    try:
        yield
    finally:
        del jax.device_put_replicated


def against_brax(quick: bool) -> tuple[list[Row], list[Growth]]:
    """Seconds of collecting and learning until 80 % of episodes succeed; one pair is one seed."""
    size = Size(environments=16, iterations=1, evaluations=4, episodes=16) if quick else Size()
    sides = (Ours(size), Theirs(size))
    runs: tuple[list[Learned], list[Learned]] = ([], [])

    def learn(side: int, seed: int) -> float:
        runs[side].append(sides[side](seed))
        return runs[side][-1].total

    times = harness.alternate(functools.partial(learn, 0), functools.partial(learn, 1))
    steps = [[len(run.success) * size.steps for run in side] for side in runs]
    final = [np.median([run.success[-1] for run in side]) for side in runs]
    # A run that has succeeded keeps its rate.
    curves = [
        np.median([run.success + run.success[-1:] * (size.evaluations - len(run.success)) for run in side], 0)
        for side in runs
    ]
    points = tuple(
        Point((i + 1) * size.steps, float(ours), float(theirs), "success rate")
        for i, (ours, theirs) in enumerate(zip(*curves, strict=True))
    )
    row = harness.paired_row(
        "ppo_brax",
        work=f"PPO, seconds of collecting and learning until {SUCCESS:.0%} of episodes succeed; "
        f"control steps to there, median: ours {np.median(steps[0]):,.0f}, brax {np.median(steps[1]):,.0f}, "
        f"at most {size.steps * size.evaluations:,} (a run that fails counts as that); "
        f"brax compiles in {runs[1][0].compile_s:.0f} s",
        size=f"puck_push on MJX, {size.environments} environments, "
        f"rollouts of {TASK.episode_length}, {EPOCHS} x {MINIBATCHES} minibatches, networks {FEATURES}",
        ours=times[0],
        theirs=times[1],
        peer="brax",
        peer_version=harness.version("brax"),
        outputs_equal=bool(abs(final[0] - final[1]) <= 1 - SUCCESS),
        tolerance=round(1 - SUCCESS, 6),
        compile_s=sides[0].compile_s,
        peak_bytes=sides[0].peak_bytes,
    )
    return [row], [Growth("ppo_brax", "control steps", points, None)]
