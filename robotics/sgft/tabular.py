"""SGFT solved exactly on finite worlds: what the window does, without function approximation or sampling.

Transition arrays are `P [S, A, S']`. A row may sum to less than one: the missing mass ends the episode, with
value and potential zero afterwards. An absorbing state is a row that leads to itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from core.errors import UserError

__all__ = [
    "World",
    "counter_example",
    "exact_gaps",
    "expected_reward",
    "expected_shaped_reward",
    "greedy",
    "mpc_bound",
    "policy_evaluation",
    "policy_values",
    "q_values",
    "sgft_vi",
    "value_iteration",
    "window_values",
]


class World(NamedTuple):
    """A simulator and the reality it stands for: dynamics `P_sim, P_real [S, A, S']`, one reward.

    `reward [S, A, S']` (or broadcastable to it) and the discount gamma in [0, 1) hold in both.
    """

    P_sim: jax.Array
    P_real: jax.Array
    reward: jax.Array
    gamma: float


def expected_reward(P, reward):
    """Mean reward of each action: `P [S, A, S']`, `reward` that or broadcastable to it -> `[S, A]`."""
    return jnp.sum(P * reward, axis=-1)


def q_values(P, r, value, *, gamma):
    """One Bellman backup r + gamma * P V: `P [S, A, S']`, `r [S, A]`, `value [S']` -> `[S, A]`."""
    return r + gamma * jnp.dot(P, value, precision="highest")


def value_iteration(P, r, gamma, *, start=None, tolerance=1e-13, max_iterations=100_000):
    """Optimal values V* by repeated Bellman backups.

    Args:
      P: `[S, A, S']` transition probabilities.
      r: `[S, A]` expected rewards.
      gamma: discount in [0, 1).
      start: `[S]` first guess, zeros if None; a good one saves backups.
      tolerance: stops once no value moves by more than this, or by more than rounding error can resolve.
      max_iterations: stops here in any case.

    Returns:
      `[S]` values, in the precision of the inputs.
    """

    def unfinished(carry):
        value, change, iteration = carry
        resolution = 4 * jnp.finfo(value.dtype).eps * jnp.max(jnp.abs(value))
        return (change > jnp.maximum(tolerance, resolution)) & (iteration < max_iterations)

    def backup(carry):
        value, _, iteration = carry
        new = q_values(P, r, value, gamma=gamma).max(axis=-1)
        return new, jnp.max(jnp.abs(new - value)), iteration + 1

    value = jnp.zeros_like(r[:, 0]) if start is None else start
    return jax.lax.while_loop(unfinished, backup, (value, jnp.full((), jnp.inf, r.dtype), 0))[0]


def policy_evaluation(P, r, policy, gamma):
    """Values of a stationary policy, exact to rounding: the solution of (I - gamma P_pi) V = r_pi.

    Args:
      P: `[S, A, S']` transition probabilities.
      r: `[S, A]` expected rewards.
      policy: `[S]` int actions, or `[S, A]` action probabilities.
      gamma: discount in [0, 1).

    Returns:
      `[S]` values.
    """
    if policy.ndim == 1:
        policy = jax.nn.one_hot(policy, r.shape[1], dtype=r.dtype)
    P_pi = jnp.einsum("sa,sat->st", policy, P, precision="highest")
    r_pi = jnp.sum(policy * r, axis=-1)

    # V = ... (I + (gamma P)^4) (I + (gamma P)^2) (I + gamma P) r: each factor doubles the steps summed. Not
    # LU: on CPU two batched LAPACK calls in one program can wait for each other's threads forever (jax 0.10).
    def double(carry):
        value, steps, weight = carry
        value = value + jnp.dot(steps, value, precision="highest")
        return value, jnp.dot(steps, steps, precision="highest"), weight * weight

    def unfinished(carry):
        return carry[2] > jnp.finfo(r_pi.dtype).eps * (1 - gamma)

    start = (r_pi, gamma * P_pi, jnp.asarray(gamma, r_pi.dtype))
    return jax.lax.while_loop(unfinished, double, start)[0]


def expected_shaped_reward(P, r, v_sim, *, gamma):
    """Mean of r + gamma * V_sim(s') - V_sim(s), Eq. 1 of Yin et al. (2025).

    `P [S, A, S']`, `r [S, A]`, `v_sim [S]` -> `[S, A]`. Where a row of P sums to less than one, the potential
    after the end is zero; to keep it there, lead the row to an absorbing state with that value.
    """
    return q_values(P, r, v_sim, gamma=gamma) - v_sim[:, None]


def window_values(P, r, v_sim, *, gamma, horizon):
    """W_h^* and Q_h^* of every window length h = 1 .. horizon, Eqs. 2 and 3 of Yin et al. (2025).

    Args:
      P: `[S, A, S']` true (or estimated real) transition probabilities.
      r: `[S, A]` expected rewards.
      v_sim: `[S]` the frozen simulation value.
      gamma: discount V_sim was computed with.
      horizon: largest window length H, int >= 1.

    Returns:
      (W `[H, S]`, Q `[H, S, A]`); row h - 1 belongs to window length h.
    """
    if horizon < 1:
        raise UserError(f"the window length (horizon) must be at least 1, not {horizon}")
    rbar = expected_shaped_reward(P, r, v_sim, gamma=gamma)

    def lengthen(w, _):
        q = q_values(P, rbar, w, gamma=gamma)
        w = q.max(axis=-1)
        return w, (w, q)

    return jax.lax.scan(lengthen, jnp.zeros_like(rbar[:, 0]), length=horizon)[1]


def sgft_vi(P, r, v_sim, *, gamma, horizon):
    """W_H^* and Q_H^* of one window length, Eqs. 2 and 3 of Yin et al. (2025); `greedy` of Q is Eq. 4.

    Args: as `window_values`; horizon may also be math.inf: classic potential-based shaping, where
      Q + V_sim is the optimal value of the real task.

    Returns:
      (W `[S]`, Q `[S, A]`).
    """
    if horizon != math.inf:
        w, q = window_values(P, r, v_sim, gamma=gamma, horizon=horizon)
        return w[-1], q[-1]
    rbar = expected_shaped_reward(P, r, v_sim, gamma=gamma)
    w = value_iteration(P, rbar, gamma)
    return w, q_values(P, rbar, w, gamma=gamma)


def greedy(q, *, tolerance=0.0):
    """First action whose value is within tolerance of the best: `q [..., A]` -> `[...]` int.

    A tolerance above rounding error makes the choice between tied actions reproducible.
    """
    return jnp.argmax(q >= q.max(axis=-1, keepdims=True) - tolerance, axis=-1)


def mpc_bound(v_sim, v_star, *, gamma, horizon):
    """Largest loss V* - V^{pi_H} an exact model allows: 2 gamma^H e / (1 - gamma^H), e = max |V_sim - V*|.

    `v_sim [S]`, `v_star [S]`, horizon >= 1 and gamma in [0, 1) scalars or arrays -> `[]` (their shape).
    """
    error = jnp.max(jnp.abs(v_sim - v_star))
    return 2 * gamma**horizon * error / (1 - gamma**horizon)


def policy_values(world, *, horizon, tie_tolerance=1e-9):
    """True values of the policies that know the real model exactly: what the window alone gains and loses.

    Args:
      world: a `World`, arrays `[S, A, S']`.
      horizon: largest window length H, int >= 1.
      tie_tolerance: see `greedy`.

    Returns:
      (V*_real `[S]`, V_real of the simulator's optimal policy `[S]`, V_real of pi_h for h = 1 .. H `[H, S]`).
    """
    P_sim, P_real, reward, gamma = world
    r_sim, r_real = expected_reward(P_sim, reward), expected_reward(P_real, reward)
    v_sim = value_iteration(P_sim, r_sim, gamma)

    def true_value(q):
        return policy_evaluation(P_real, r_real, greedy(q, tolerance=tie_tolerance), gamma)

    _, q_windows = window_values(P_real, r_real, v_sim, gamma=gamma, horizon=horizon)
    zero_shot = true_value(q_values(P_sim, r_sim, v_sim, gamma=gamma))
    return value_iteration(P_real, r_real, gamma), zero_shot, jax.vmap(true_value)(q_windows)


def exact_gaps(world, *, horizons=(1, 2, 4, 8, 16)):
    """Mean of V*_real - V_real^pi over states, with the exact real model.

    Args:
      world: a `World`, arrays `[S, A, S']`.
      horizons: window lengths, ints >= 1.

    Returns:
      (gap of the simulator's optimal policy `[]`, gap of SGFT for each window length `[len(horizons)]`).
    """
    v_star, zero_shot, windows = policy_values(world, horizon=max(horizons))
    return jnp.mean(v_star - zero_shot), jnp.mean(v_star - windows, axis=1)[jnp.array(horizons) - 1]


def counter_example():
    """A `World` (arrays `[5, 2, 5]`) whose simulation value is not improvable, so that short windows lose.

    States S, Y, L, X, G (0 .. 4), actions a, b (0, 1), gamma 0.99. Entering G pays 1 from Y, 0.5 from L, 0.9
    from X. From S, b leads to X and a to Y; but in reality a leads to Y or L with equal chance, and X has no
    exit. Windows up to 19 believe in X and earn nothing; the simulator's policy earns 0.7425.
    """
    S, Y, L, X, G = range(5)
    P_sim = jnp.zeros((5, 2, 5)).at[jnp.array([Y, L, X, G]), :, G].set(1.0)
    P_sim = P_sim.at[S, 0, Y].set(1.0).at[S, 1, X].set(1.0)
    P_real = P_sim.at[S, 0].set(0.0).at[S, 0, jnp.array([Y, L])].set(0.5)
    P_real = P_real.at[X].set(0.0).at[X, :, X].set(1.0)
    reward = jnp.zeros((5, 2, 5)).at[jnp.array([Y, L, X]), :, G].set(jnp.array([1.0, 0.5, 0.9])[:, None])
    return World(P_sim, P_real, reward, 0.99)
