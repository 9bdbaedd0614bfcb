"""Drives a simulator with a policy: one scan where the simulator is pure, a host loop where it is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import numpy as np

from core.sim.pure import PureSimulator

__all__ = ["Steps", "drive"]


class Steps(flax.struct.PyTreeNode):
    """T control steps of N environments, leaves `[T, N, ...]`.

    `final_observation` is what the action led to, before any reset; the flags are those of that step.
    """

    observation: Any
    action: Any
    reward: Any
    final_observation: Any
    terminated: Any
    truncated: Any
    success: Any


def drive(
    simulator: Any,
    env_state: Any,
    policy: Callable,
    carry: Any,
    key: jax.Array,
    *,
    length: int,
) -> tuple[Any, Any, Steps]:
    """`length` control steps of `simulator` from `env_state`, ended episodes restarting by themselves.

    Args:
      simulator: has `auto_reset_step(env_state, action [N, A]) -> env_state`.
      policy: pure `(carry, observation [N, O], key) -> (carry, action [N, A])`; one function object for
        repeated calls, so that it is compiled once.
      carry: the policy's own state, a pytree; parameters may be part of it.
      key: a typed key, split into one for each step.

    Returns:
      (env_state, carry, Steps `[length, N, ...]`), the steps in numpy for a host simulator.
    """
    keys = jax.random.split(key, length)
    if isinstance(simulator, PureSimulator):
        return _scan(simulator, policy, env_state, carry, keys)
    act = _jitted(policy)
    rows = []
    for one in keys:
        observation = np.asarray(env_state.observation)
        carry, action = act(carry, observation, one)
        action = np.asarray(action)
        env_state = simulator.auto_reset_step(env_state, action)
        rows.append(_row(observation, action, env_state))
    return env_state, carry, jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


@functools.lru_cache(maxsize=64)
def _jitted(policy: Callable) -> Callable:
    return jax.jit(policy)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scan(simulator, policy, env_state, carry, keys):
    def step(state, key):
        env_state, carry = state
        observation = env_state.observation
        carry, action = policy(carry, observation, key)
        env_state = simulator.auto_reset_step(env_state, action)
        return (env_state, carry), _row(observation, action, env_state)

    (env_state, carry), steps = jax.lax.scan(step, (env_state, carry), keys)
    return env_state, carry, steps


def _row(observation, action, env_state) -> Steps:
    return Steps(
        observation,
        action,
        env_state.reward,
        env_state.final_observation,
        env_state.terminated,
        env_state.truncated,
        env_state.success,
    )
