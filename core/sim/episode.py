"""The state of a batch of environments and what a control step reports, the same on every backend."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from core.sim.gap import MAX_ACTION_DELAY, RealGap
from core.sim.task import Task

__all__ = ["EnvState"]

Array = Any  # jax.Array, or numpy.ndarray in the host backend
# An episode's key is split into this many keys at the next reset, so folding in the number gives one more.
NOISE_STREAM = 3


class EnvState(flax.struct.PyTreeNode):
    """N environments between two control steps; every leaf leads with `[N]`, a saved state resumes exactly.

    `physics` `[N, nstate]` is time, qpos, qvel, act (float64 on the host backend); `model` `[N]` int32 the
    row of the backend's model pool; `gap` leaves `[N]`; `action_buffer` `[N, 3, A]` newest first;
    `step_count` `[N]` int32; `key` `[N]` typed, one per episode. Outputs of the last step: `observation` `[N,
    obs]`, `reward` `[N]` float32, and bool `[N]` `terminated` (true ends), `truncated` (time limit) and
    `success`. `final_observation` `[N, obs]` is the observation at the end of that step even where
    auto_reset_step has begun a new episode: bootstrap from it at time limits. The host backend keeps
    everything but `key` in numpy.
    """

    physics: Array
    model: Array
    gap: RealGap
    action_buffer: Array
    step_count: Array
    key: jax.Array
    observation: Array
    final_observation: Array
    reward: Array
    terminated: Array
    truncated: Array
    success: Array


class Report(flax.struct.PyTreeNode):
    """What one control step tells; leaves `[N]`, the observation `[N, obs]`; fields as in EnvState."""

    observation: Array
    reward: Array
    terminated: Array
    truncated: Array
    success: Array


def report(task: Task, qpos, qvel, ctrl, sensordata, *, obs_noise, obs_bias, key, step_count) -> Report:
    """Observes and judges N worlds after a control step; noise and bias touch only the observation.

    Args:
      qpos, qvel, ctrl, sensordata: `[N, ..]`.
      obs_noise, obs_bias: `[N]`; a noise of None saves drawing it.
      key, step_count: `[N]`; the noise is a function of the episode's key and the step count.
    """

    def one(qpos, qvel, ctrl, sensordata, obs_noise, obs_bias, key, step_count):
        world = (qpos, qvel, ctrl, sensordata)
        observation = task.observe(*world) + obs_bias
        if obs_noise is not None:
            noise_key = jax.random.fold_in(jax.random.fold_in(key, NOISE_STREAM), step_count)
            observation += obs_noise * jax.random.normal(noise_key, observation.shape)
        terminated = task.terminated(*world)
        return Report(
            observation=observation,
            reward=task.reward(*world),
            terminated=terminated,
            truncated=(step_count >= task.episode_length) & ~terminated,
            success=task.success(*world),
        )

    return jax.vmap(one)(qpos, qvel, ctrl, sensordata, obs_noise, obs_bias, key, step_count)


def begin_episode(task: Task, key, gap, model, draw):
    """New episodes of N worlds; `draw(key, gap, model) -> (gap, model)` chooses each world's next dynamics.

    Returns:
      (key `[N]`, gap leaves `[N]`, model `[N]`, qpos `[N, nq]`, qvel `[N, nv]`).
    """

    def one(key, gap, model):
        key, gap_key, reset_key = jax.random.split(key, NOISE_STREAM)
        gap, model = draw(gap_key, gap, model)
        return (key, gap, model, *task.reset(reset_key, gap))

    return jax.vmap(one)(key, gap, model)


def blank(task: Task, *, physics, model, gap, key, xp=jnp) -> EnvState:
    """A state `[N]` in which no episode was begun: reset fills it by restarting every environment."""
    n = len(physics)
    observation = xp.zeros((n, task.observation_size), xp.float32)
    no = xp.zeros(n, bool)
    return EnvState(
        physics=physics,
        model=model,
        gap=gap,
        action_buffer=xp.zeros((n, MAX_ACTION_DELAY, task.action_size), xp.float32),
        step_count=xp.zeros(n, xp.int32),
        key=key,
        observation=observation,
        final_observation=observation,
        reward=xp.zeros(n, xp.float32),
        terminated=no,
        truncated=no,
        success=no,
    )


def where(mask, new, old, xp=jnp):
    """Per environment `new` where `mask` `[N]`, else `old`, for trees of arrays `[N, ..]`."""

    def pick(a, b):
        return xp.where(mask.reshape(mask.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)
