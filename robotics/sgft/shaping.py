"""The shaped reward and the short window: the two changes that turn fine-tuning into SGFT."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from core.errors import UserError, nearest

__all__ = ["hstep_return", "improvability", "shaped_reward"]

_TERMINAL_POTENTIALS = ("zero", "keep")


def shaped_reward(reward, value, next_value, terminated, *, gamma, terminal_potential="zero"):
    """Potential-shaped reward r + gamma * V(s') - V(s), Eq. 1 of Yin et al. (2025).

    V is frozen: no gradient reaches `value` and `next_value`, nor the parameters behind them.

    Args:
      reward, value, next_value: `[...]` float; V is the frozen simulation value.
      terminated: `[...]` bool; true ends only, not time limits.
      gamma: discount V was trained with, in [0, 1].
      terminal_potential: "zero" drops V(s') at true ends; "keep" never does.

    Returns:
      `[...]` shaped reward in float32, or in float64 if an input is float64.
    """
    if terminal_potential not in _TERMINAL_POTENTIALS:
        hint = nearest(terminal_potential, _TERMINAL_POTENTIALS)
        raise UserError(f'terminal_potential is "zero" or "keep", not {terminal_potential!r}{hint}')
    reward = _full_precision(reward)
    value, next_value = jax.lax.stop_gradient((_full_precision(value), _full_precision(next_value)))
    if terminal_potential == "zero":
        next_value = jnp.where(terminated, 0.0, next_value)
    return reward + gamma * next_value - value


def hstep_return(rbar, terminated, truncated, *, gamma, horizon):
    """Discounted sum of shaped rewards over each step's window: a sample of W_H, Eq. 2 of Yin et al. (2025).

    The window of step t is t, t+1, ..., t+horizon-1 and ends early, after the boundary's own reward, at a
    terminated or truncated step.

    Args:
      rbar: `[T, ...]` float, shaped rewards in time order.
      terminated, truncated: `[T, ...]` bool.
      gamma: discount in [0, 1].
      horizon: window length, int >= 1; may exceed T.

    Returns:
      (returns `[T, ...]`, valid `[T, ...]` bool). Not valid is a window that leaves the array before it ends;
      its return is the part inside.
    """
    if horizon < 1:
        raise UserError(f"the window length (horizon) must be at least 1, not {horizon}")
    rbar = _full_precision(rbar)
    gamma = jnp.asarray(gamma, rbar.dtype)
    steps = rbar.shape[0]
    # Beyond steps + 1 every window without a boundary leaves the array, whatever its length.
    horizon = min(horizon, steps + 1)
    after = [(0, horizon)] + [(0, 0)] * (rbar.ndim - 1)
    padded_rbar = jnp.pad(rbar, after)
    padded_ended = jnp.pad(jnp.logical_or(terminated, truncated), after)

    def add_step(carry, k):
        returns, running, discount = carry
        rbar_k = jax.lax.dynamic_slice_in_dim(padded_rbar, k, steps)
        ended_k = jax.lax.dynamic_slice_in_dim(padded_ended, k, steps)
        returns = returns + jnp.where(running, discount * rbar_k, 0.0)
        return (returns, running & ~ended_k, discount * gamma), None

    start = (jnp.zeros_like(rbar), jnp.ones(rbar.shape, bool), jnp.ones((), rbar.dtype))
    (returns, running, _), _ = jax.lax.scan(add_step, start, jnp.arange(horizon))
    fits = jnp.arange(steps) + horizon <= steps
    return returns, ~running | fits.reshape((steps,) + (1,) * (rbar.ndim - 1))


def improvability(q1, *, tolerance=0.0):
    """Share of states where some action raises V: max_a Q_1(s, a) >= 0, the condition of Yin et al. (2025).

    At 1 the potential is improvable: longer windows never lower W_H, and the receding-horizon policy is worth
    at least V everywhere.

    Args:
      q1: `[..., N]` float, one-step shaped values E[rbar] of N actions (all of them, or a sample).
      tolerance: a maximum down to -tolerance still counts, for the rounding error where it is exactly 0.

    Returns:
      `[]` float in [0, 1].
    """
    return jnp.mean(_full_precision(q1).max(axis=-1) >= -tolerance, dtype=jnp.float32)


def _full_precision(x):
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
