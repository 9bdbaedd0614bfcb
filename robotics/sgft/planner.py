"""Short planning in a learned model, closed by V_sim: the model-based SGFT of Yin et al. (2025)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from core.errors import UserError

__all__ = ["plan", "score_actions"]

Array = jax.Array


def score_actions(
    actions: Array,
    observation: Array,
    *,
    step: Callable,
    reward: Callable,
    value: Callable | None,
    members: int,
    gamma: Array | float,
    horizon: int,
) -> Array:
    """H-step objective of holding each action for the whole window: W_H of Eq. 2, plus V_sim(s_0).

    Args:
      actions: `[N, A]` candidates in [-1, 1].
      observation: `[O]` current observation.
      step: `(observation [E, N, O], action [N, A]) -> [E, N, O]`, one step of each of E model members.
      reward: `(observation [..., O]) -> [...]`, the known reward of the state entered.
      value: `(observation [..., O]) -> [...]`, the frozen V_sim; None scores rewards alone (the ablation).
      members: E.
      gamma: discount V_sim was trained with.
      horizon: H >= 1 model steps.

    Returns:
      `[E, N]` float32, sum_{k<H} gamma^k r(s_{k+1}) + gamma^H V_sim(s_H) under each member.
    """
    if horizon < 1:
        raise UserError(f"the planning horizon H must be at least 1, not {horizon}")

    def advance(carry, _):
        state, total, discount = carry
        state = step(state, actions)
        return (state, total + discount * reward(state), discount * gamma), None

    state = jnp.broadcast_to(observation, (members, actions.shape[0], *observation.shape))
    start = (state, jnp.zeros(state.shape[:2], jnp.float32), jnp.float32(1.0))
    (state, total, discount), _ = jax.lax.scan(advance, start, length=horizon)
    return total if value is None else total + discount * value(state)


def plan(
    key: Array,
    observation: Array,
    default_action: Array,
    *,
    candidates: int = 256,
    **model,
) -> Array:
    """Best of `default_action` and `candidates - 1` uniform actions, each held for H model steps (Eq. 4).

    Args:
      key: typed key; the same key gives the same action.
      observation: `[O]`.
      default_action: `[A]`, candidate 0, such as pi_sim's action.
      candidates: N >= 1.
      **model: step, reward, value, members, gamma, horizon of `score_actions`.

    Returns:
      `[A]` action in [-1, 1]; scores are averaged over the model's members.
    """
    shape = (candidates, *default_action.shape)
    actions = jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
    actions = actions.at[0].set(jnp.clip(default_action, -1.0, 1.0))
    scores = score_actions(actions, observation, **model)
    return actions[jnp.argmax(jnp.mean(scores, axis=0))]
