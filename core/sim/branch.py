"""What each of several actions would lead to from one state: a simulator can try them all, a robot cannot."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from core.sim.pure import PureSimulator

__all__ = ["Branches", "branch"]


class Branches(NamedTuple):
    """Where C held actions lead from each of N states.

    `reached` `[N, C, O]` is the observation at the end, `earned` `[N, C]` the discounted reward on the way,
    `discount` `[N, C]` what a value of the end counts for: gamma^H, or 0 past a true end.
    """

    reached: Any
    earned: Any
    discount: Any


def branch(simulator: Any, env_state: Any, actions: Any, *, horizon: int, gamma: float) -> Branches:
    """Holds each of `actions` `[C, N, A]` for `horizon` control steps from the same `env_state`.

    Args:
      simulator: has `step(env_state, action [N, A]) -> env_state`, a function of its arguments.
      env_state: left as it is.
      gamma: discount per control step.

    Returns:
      Branches, in numpy for a host simulator.
    """
    if isinstance(simulator, PureSimulator):
        return _mapped(simulator, env_state, actions, horizon=horizon, gamma=gamma)
    step = _advance(simulator, gamma)
    found = []
    for action in actions:
        carry = _start(env_state, action, np)
        for _ in range(horizon):
            carry = step(carry)
        found.append(_end(carry))
    return Branches(*(np.stack(leaves, axis=1) for leaves in zip(*found)))


@functools.partial(jax.jit, static_argnums=0, static_argnames="horizon")
def _mapped(simulator, env_state, actions, *, horizon, gamma):
    step = _advance(simulator, gamma)

    def one(action):
        start = _start(env_state, action, jnp)
        return _end(jax.lax.scan(lambda carry, _: (step(carry), None), start, length=horizon)[0])

    return Branches(*(jnp.moveaxis(leaf, 0, 1) for leaf in jax.lax.map(one, actions)))


def _start(env_state, action, xp):
    n = len(action)
    return env_state, action, xp.zeros(n, xp.float32), xp.ones(n, xp.float32)


def _advance(simulator, gamma):
    def step(carry):
        state, action, earned, discount = carry
        state = simulator.step(state, action)
        earned = earned + discount * state.reward
        return state, action, earned, discount * (1 - state.terminated) * gamma

    return step


def _end(carry):
    state, _, earned, discount = carry
    return state.final_observation, earned, discount
