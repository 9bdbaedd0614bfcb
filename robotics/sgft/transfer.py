"""Does V_sim transfer? How well it foretells real rewards, and how often some real action raises it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core.sim.branch import branch
from robotics.sgft.shaping import improvability

__all__ = ["value_transfer"]

Array = jax.Array


def value_transfer(
    simulator: Any,
    policy: Callable,
    value: Callable,
    source: Any,
    key: Array,
    *,
    lanes: int,
    candidates: int = 32,
) -> tuple[np.ndarray, np.ndarray]:
    """Plays the first halves of episodes with `policy`, and tries other actions on the way.

    For what stands in for a robot: a robot can not be put back to try another action.

    Args:
      simulator: L * N environments, on the host, lane after lane.
      policy: `(source, observation [L * N, O]) -> action [L * N, A]`.
      value: V_sim, `(source, observation [L, M, O]) -> [L, M]`.

    Returns:
      (correlation `[L]` in [-1, 1] of V_sim(s_t) with the discounted reward of the half episode after t, NaN
      where either is constant; share `[L]` in [0, 1] of states where one of `candidates` random actions has
      Q_1 >= 0, Eq. 3 of Yin et al. (2025)).
    """
    task, n = simulator.task, simulator.num_envs
    half = task.episode_length // 2
    reset_key, action_key = jax.random.split(key)
    env = simulator.reset(reset_key)
    rewards, values, raised = [], [], []

    def value_of(observation):  # [L * N, M, O] -> [L * N, M]
        by_lane = jnp.asarray(observation).reshape(lanes, -1, observation.shape[-1])
        return np.asarray(value(source, by_lane)).reshape(observation.shape[:-1])

    for t in range(2 * half):
        observation = np.asarray(env.observation)
        if t < half:
            shape = (candidates, n, task.action_size)
            actions = jax.random.uniform(jax.random.fold_in(action_key, t), shape, minval=-1.0)
            tried = branch(simulator, env, np.asarray(actions), horizon=1, gamma=task.gamma)
            values.append(value_of(observation[:, None])[:, 0])
            after = np.asarray(tried.discount) * value_of(np.asarray(tried.reached))
            raised.append(np.asarray(tried.earned) + after - values[-1][:, None])
        env = simulator.auto_reset_step(env, np.asarray(policy(source, observation)))
        rewards.append(np.asarray(env.reward))
    weights = task.gamma ** np.arange(half)
    earned = np.stack([weights @ np.stack(rewards[t : t + half]) for t in range(half)])  # [half, L * N]
    by_lane = (half, lanes, -1)
    pairs = zip(*(np.moveaxis(np.reshape(x, by_lane), 1, 0) for x in (np.stack(values), earned)))
    with np.errstate(invalid="ignore"):  # where one is constant
        correlation = np.array([np.corrcoef(v.ravel(), e.ravel())[0, 1] for v, e in pairs])
    q1 = np.moveaxis(np.stack(raised).reshape(half, lanes, -1, candidates), 1, 0)
    return correlation, np.array([improvability(lane) for lane in q1])
