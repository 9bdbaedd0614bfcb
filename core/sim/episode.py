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


class EnvState(flax.struct.PyTreeNode):
    """N environments between two control steps; all leaves lead with `[N]`, and a saved one resumes exactly.

    `physics` `[N, nstate]` (time, qpos, qvel, act; float64 numpy on the host backend), `model` `[N]` row of the
    backend's model pool, `gap` leaves `[N]`, `action_buffer` `[N, 3, A]` newest first, `step_count` `[N]` int32,
    `key` `[N]`. Outputs: `observation` `[N, obs]`, `reward` `[N]`, `terminated` (true ends), `truncated` (time
    limit) and `success` `[N]` bool. `final_observation` `[N, obs]` is the observation at the end of this step even
    where auto_reset_step has begun a new episode: bootstrap from it at time limits.
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
    """What one control step tells; leaves `[N]` or `[N, obs]`. `key` and `step_count` are the next ones."""

    observation: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    success: jax.Array
    key: jax.Array
    step_count: jax.Array


def report(task: Task, qpos, qvel, ctrl, sensordata, *, obs_noise, obs_bias, key, step_count) -> Report:
    """Observes and judges N worlds `[N, ..]` after a control step; noise and bias touch the observation only."""

    def one(qpos, qvel, ctrl, sensordata, obs_noise, obs_bias, key, step_count):
        key, noise_key = jax.random.split(key)
        world = (qpos, qvel, ctrl, sensordata)
        observation = task.observe(*world)
        noise = obs_noise * jax.random.normal(noise_key, observation.shape)
        terminated = task.terminated(*world)
        step_count = step_count + 1
        return Report(
            observation=observation + noise + obs_bias,
            reward=task.reward(*world),
            terminated=terminated,
            truncated=(step_count >= task.episode_length) & ~terminated,
            success=task.success(*world),
            key=key,
            step_count=step_count,
        )

    return jax.vmap(one)(qpos, qvel, ctrl, sensordata, obs_noise, obs_bias, key, step_count)


def begin_episode(task: Task, key, gap, model, draw):
    """New episodes of N worlds; `draw(key, gap, model) -> (gap, model)` chooses each world's next dynamics.

    Returns:
      (key `[N]`, gap leaves `[N]`, model `[N]`, qpos `[N, nq]`, qvel `[N, nv]`).
    """

    def one(key, gap, model):
        key, gap_key, reset_key = jax.random.split(key, 3)
        gap, model = draw(gap_key, gap, model)
        return (key, gap, model, *task.reset(reset_key, gap))

    return jax.vmap(one)(key, gap, model)


def keep(key, gap, model):
    """The `draw` of worlds that never change their dynamics."""
    del key
    return gap, model


def empty_buffer(task: Task, num_envs: int, xp=jnp):
    """The action buffer `[N, 3, A]` of a new episode: no action was given yet."""
    return xp.zeros((num_envs, MAX_ACTION_DELAY, task.action_size), xp.float32)


def where(mask, new, old, xp=jnp):
    """Per environment `new` where `mask` `[N]`, else `old`, for trees of arrays `[N, ..]`."""

    def pick(a, b):
        return xp.where(mask.reshape(mask.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)
