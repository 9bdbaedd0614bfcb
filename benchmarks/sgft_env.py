"""Control steps per second of puck_push: native MuJoCo against bare mujoco.rollout, and MJX."""

from __future__ import annotations

import copy
import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import rollout

from benchmarks import harness
from benchmarks.harness import Growth, Point, Row
from core import sim
from core.sim.gap import RealGap, gap_rows
from robotics.sgft.tasks.puck_push import TASK

__all__ = ["BareRollout", "mjx_rate", "native", "native_pair", "through_mjx"]

ENVIRONMENTS = 256
TO_STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS


class BareRollout:
    """What a user of mujoco.rollout would write: models made once, buffers reused, one call a control step.

    Args:
      gaps: leaves `[N]`, one model each. threads: of the pool.
    """

    def __init__(self, gaps: RealGap, threads: int):
        self._models = []
        scratch = mujoco.MjData(TASK.nominal)
        for row in gap_rows(gaps):
            model = copy.copy(TASK.nominal)
            TASK.write_dynamics(model, TASK.nominal, RealGap(*row.tolist()))
            mujoco.mj_setConst(model, scratch)
            self._models.append(model)
        n = len(self._models)
        self._data = [mujoco.MjData(TASK.nominal) for _ in range(threads)]
        self._pool = rollout.Rollout(nthread=threads if threads > 1 else 0)
        self._states = np.empty((n, TASK.substeps, mujoco.mj_stateSize(TASK.nominal, TO_STATE)))
        self._sensordata = np.empty((n, TASK.substeps, TASK.nominal.nsensordata))

    def run(self, physics: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Physics `[N, nstate]` after the control steps `actions` `[T, N, A]` from `physics`."""
        for action in actions:
            self._pool.rollout(
                self._models,
                self._data,
                physics,
                np.repeat(action[:, None], TASK.substeps, axis=1),
                skip_checks=True,
                nstep=TASK.substeps,
                state=self._states,
                sensordata=self._sensordata,
            )
            physics = self._states[:, -1].copy()
        return physics


def _run(simulator, state, actions):
    for action in actions:
        state = simulator.step(state, action)
    return state.physics


def native_pair(n: int, length: int):
    """Both sides of the native comparison on the same models, start and actions.

    Returns:
      (ours, theirs, equal): calls that play `length` control steps of `n` environments and return the physics
      `[n, nstate]` they end in, and whether the two end bitwise equal. The peer has its best thread count.
    """
    gaps = sim.sample_gap(jax.random.key(0), TASK.randomisation, n)
    simulator = sim.NativeSimulator(TASK, n, gaps=gaps)
    state = simulator.reset(jax.random.key(1))
    actions = np.random.default_rng(0).uniform(-1, 1, (length, n, TASK.action_size)).astype(np.float32)
    wide = actions.astype(np.float64)
    variants = {
        threads: functools.partial(BareRollout(gaps, threads).run, state.physics, wide)
        for threads in sorted({1, min(n, harness.threads())})
    }
    ours, theirs = functools.partial(_run, simulator, state, actions), variants[harness.fastest(variants)]
    return ours, theirs, bool(np.array_equal(ours(), theirs()))


def native(quick: bool) -> tuple[list[Row], list[Growth]]:
    """256 different models, five substeps a call; then how the time grows with the number of environments."""
    length = 4 if quick else 50
    sizes = (32, ENVIRONMENTS) if quick else (64, ENVIRONMENTS, 1024)
    rows, points = [], []
    for n in sizes:
        ours, theirs, equal = native_pair(n, length)
        times = harness.alternate(
            lambda i, ours=ours: harness.seconds(ours),
            lambda i, theirs=theirs: harness.seconds(theirs),
            pairs=harness.PAIRS if quick or n != ENVIRONMENTS else 15,
        )
        points.append(Point(n, *(float(np.median(side)) / length for side in times), "s"))
        if n == ENVIRONMENTS:
            rows.append(
                harness.paired_row(
                    "env_native",
                    work="control steps of NativeSimulator.step (commands, observation, reward and ends "
                    "included) against mujoco.rollout alone, called as often",
                    size=f"puck_push, {n} environments, each its model, {TASK.substeps} substeps a call",
                    ours=times[0],
                    theirs=times[1],
                    amount=n * length,
                    peer="mujoco",
                    peer_version=harness.version("mujoco"),
                    outputs_equal=equal,
                    tolerance=0.0,
                    target=0.83,
                    peak_bytes=harness.host_peak_bytes(ours),
                )
            )
    return rows, [Growth("env_native", "environments", tuple(points), harness.exponent(points))]


def mjx_rate(n: int, *, repeats: int) -> tuple[list[float], float, int | None]:
    """One episode of `n` randomised MJX environments under random actions, as one scan.

    Returns:
      (seconds `[repeats]`, seconds of tracing and compiling, peak bytes).
    """
    simulator = sim.make(TASK, n, backend="mjx", gaps=dict(TASK.randomisation))
    state = jax.jit(simulator.reset)(jax.random.key(0))
    shape = (TASK.episode_length, n, TASK.action_size)
    actions = jax.random.uniform(jax.random.key(1), shape, jnp.float32, -1.0, 1.0)

    def episode(state, actions):
        def step(state, action):
            state = simulator.auto_reset_step(state, action)
            return state, state.reward

        return jax.lax.scan(step, state, actions)

    play, compile_s, peak_bytes = harness.compile_and_time(episode, state, actions)
    jax.block_until_ready(play(state, actions))
    times = [harness.seconds(lambda: play(state, actions)) for _ in range(repeats)]
    return times, compile_s, peak_bytes


def through_mjx(quick: bool) -> tuple[list[Row], list[Growth]]:
    """MJX alone: its rate and compile time at 256 environments, and the growth with their number."""
    rows, points = [], []
    for n in (4, 16) if quick else (32, ENVIRONMENTS, 1024):
        times, compile_s, peak_bytes = mjx_rate(n, repeats=harness.PAIRS)
        points.append(Point(n, float(np.median(times)) / TASK.episode_length, None, "s"))
        if n == ENVIRONMENTS or quick:
            rows.append(
                harness.paired_row(
                    "env_mjx",
                    work="control steps on MJX, restarts and new dynamics at the end of episodes included",
                    size=f"puck_push, {n} environments, a pool of {n} models, {TASK.substeps} substeps",
                    ours=times,
                    amount=n * TASK.episode_length,
                    compile_s=compile_s,
                    peak_bytes=peak_bytes,
                )
            )
    return rows[-1:], [Growth("env_mjx", "environments", tuple(points), harness.exponent(points))]
