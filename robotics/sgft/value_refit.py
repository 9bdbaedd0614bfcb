"""Refits V_sim on wide, noisy rollouts of pi_sim, so that it holds where real dynamics push the robot.

The critic of a converged PPO policy is arbitrary off its own path, which is just where a potential is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from core.rl.networks import ValueEnsemble

__all__ = ["Disturbance", "Targets", "disturbed_action", "fit", "init_disturbance", "monte_carlo_targets"]

Array = jax.Array
_adam = optax.scale_by_adam()


class Disturbance(NamedTuple):
    """Piecewise-constant action offsets of N rollouts: `offset` `[N, A]`, `scale` `[N]`, steps left `[N]`."""

    offset: Array
    scale: Array
    remaining: Array


class Targets(NamedTuple):
    """States `[M, O]` and what pi_sim earned from there, discounted, `[M]`."""

    observation: Array
    value: Array


def init_disturbance(
    key: Array, n: int, action_size: int, *, longest: int, largest: float = 1.2, calm: float = 0.4
) -> Disturbance:
    """Draws for how long (at most `longest` steps) and how strongly to disturb each rollout.

    The strength is U(0, `largest`), 0 in a share `calm`.
    """
    scale_key, calm_key, length_key, offset_key = jax.random.split(key, 4)
    scale = jax.random.uniform(scale_key, (n,), maxval=largest)
    scale = jnp.where(jax.random.uniform(calm_key, (n,)) < calm, 0.0, scale)
    remaining = jax.random.randint(length_key, (n,), 0, longest + 1)
    offset = scale[:, None] * jax.random.normal(offset_key, (n, action_size))
    return Disturbance(offset, scale, remaining)


def disturbed_action(
    disturbance: Disturbance, action: Array, key: Array, *, redraw: float = 0.2
) -> tuple[Disturbance, Array]:
    """Adds the offsets to `action` `[N, A]` while they last; each is drawn anew with probability `redraw`."""
    redraw_key, offset_key = jax.random.split(key)
    n = action.shape[0]
    fresh = disturbance.scale[:, None] * jax.random.normal(offset_key, action.shape)
    drawn = jax.random.uniform(redraw_key, (n, 1)) < redraw
    offset = jnp.where(drawn, fresh, disturbance.offset)
    disturbed = (disturbance.remaining > 0)[:, None]
    after = Disturbance(offset, disturbance.scale, disturbance.remaining - 1)
    return after, jnp.clip(action + jnp.where(disturbed, offset, 0.0), -1.0, 1.0)


def monte_carlo_targets(
    observation: Array,
    reward: Array,
    ended: Array,
    tail_value: Array,
    start: Array,
    *,
    gamma: Array | float,
    keep: int,
) -> Targets:
    """Discounted returns of the undisturbed part of rollouts, for its first `keep` states.

    Args:
      observation: `[T, N, O]`; reward: `[T, N]`; ended: `[T, N]` bool, true ends (no return beyond).
      tail_value: `[N]` estimate of the return from the state after the last step.
      start: `[N]` int, the first undisturbed step; start + keep must not exceed T.
      gamma: discount.

    Returns:
      Targets of `keep * N` states; returns run to the end of the rollout, then take `tail_value`.
    """

    def back(value, step):
        reward, ended = step
        value = reward + gamma * jnp.where(ended, 0.0, value)
        return value, value

    _, returns = jax.lax.scan(back, tail_value, (reward, ended), reverse=True)
    index = start[None] + jnp.arange(keep)[:, None]
    kept = jnp.take_along_axis(observation, index[..., None], axis=0)
    return Targets(
        kept.reshape(-1, observation.shape[-1]), jnp.take_along_axis(returns, index, axis=0).reshape(-1)
    )


def fit(
    key: Array,
    observation: Array,
    target: Array,
    *,
    network: ValueEnsemble,
    epochs: int = 30,
    batch: int = 512,
    lr: Array | float = 1e-3,
) -> tuple[Any, Array, Array, dict[str, Array]]:
    """Regresses V on (`observation` `[M, O]` as the network sees it, `target` `[M]`) by shuffled Adam epochs.

    Returns:
      (variables, offset `[]`, scale `[]`, metrics): each member of V = offset + scale * network; `value_loss`
      is the mean squared error of the last epoch and `target_variance` what predicting the mean would give.
    """
    init_key, epoch_key = jax.random.split(key)
    offset, scale = jnp.mean(target), jnp.maximum(jnp.std(target), 1e-6)
    normalised = (target - offset) / scale
    params = network.init(init_key, observation[:1])
    count = observation.shape[0]
    batch = min(batch, count)
    updates = count // batch
    lr_steps = epochs * updates

    def loss(params, x, y):
        return jnp.mean((network.apply(params, x) - y) ** 2)

    def update(carry, index):
        params, opt, step = carry
        value, gradient = jax.value_and_grad(loss)(params, observation[index], normalised[index])
        direction, opt = _adam.update(gradient, opt)
        # Linear decay: the last epochs average out the noise of the targets.
        rate = lr * (1.0 - step / lr_steps)
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
        return (params, opt, step + 1), value

    def epoch(carry, key):
        order = jax.random.permutation(key, count)[: updates * batch].reshape(updates, batch)
        carry, losses = jax.lax.scan(update, carry, order)
        return carry, jnp.mean(losses)

    carry = (params, _adam.init(params), jnp.float32(0))
    (params, _, _), losses = jax.lax.scan(epoch, carry, jax.random.split(epoch_key, epochs))
    metrics = {"value_loss": losses[-1] * scale**2, "target_variance": scale**2}
    return params, offset, scale, metrics


def make_policy(act: Callable) -> Callable:
    """A policy for core.sim.drive, carry (source, Disturbance): `act(source, observation)`, disturbed."""

    def policy(carry, observation, key):
        source, disturbance = carry
        disturbance, action = disturbed_action(disturbance, act(source, observation), key)
        return (source, disturbance), action

    return policy
