"""Improves V_sim from pi_sim's value towards the best policy's in simulation, by fitted value iteration.

The value of pi_sim falls wherever pi_sim is clumsy, such as just off its own path, and a planner with real
dynamics then shuns states that are good. The best policy's value has no such holes: it orders states by how
soon the goal can be reached, which is what carries over to other dynamics (docs/methods/sgft.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from core.rl.networks import ValueEnsemble

__all__ = ["Alternatives", "backup", "improve"]

Array = jax.Array
_adam = optax.scale_by_adam()


class Alternatives(NamedTuple):
    """M states `observation` `[M, O]` and what C held actions lead to: see core.sim.branch.Branches."""

    observation: Array
    reached: Array
    earned: Array
    discount: Array


def backup(value_reached: Array, earned: Array, discount: Array) -> Array:
    """max_a earned + discount * V(reached): `[.., C]` each -> `[..]`, the window's optimality operator."""
    return jnp.max(earned + discount * value_reached, axis=-1)


def improve(
    key: Array,
    params: Any,
    alternatives: Alternatives,
    *,
    network: ValueEnsemble,
    offset: Array | float,
    scale: Array | float,
    updates: int,
    batch: int = 256,
    lr: Array | float = 1e-3,
    tau: Array | float = 0.01,
) -> tuple[Any, dict[str, Array]]:
    """Fits V = offset + scale * network to the backup of its own slow average, by Adam on minibatches.

    What is reached counts as the lowest of the members says: the maximum over actions would otherwise pick
    out, and feed on, what one network overestimates.

    Args:
      params: variables of `network` to start from.
      alternatives: what was tried in simulation, leaves `[M, ...]`.
      updates: Adam steps, static; the step size falls linearly from `lr` to 0.
      tau: share by which the averaged parameters follow in each update.

    Returns:
      (variables, metrics): `backup_error`, the mean squared error to the backups over the last tenth, in
      units of reward squared.
    """

    def value(params, observation):
        return offset + scale * network.apply(params, observation)

    def loss(params, observation, target):
        return jnp.mean(jnp.square((value(params, observation) - target) / scale))

    def update(carry, step):
        params, averaged, opt = carry
        key, number = step
        rows = jax.random.randint(key, (batch,), 0, alternatives.observation.shape[0])
        observation, reached, earned, discount = (leaf[rows] for leaf in alternatives)
        target = backup(jnp.min(value(averaged, reached), axis=0), earned, discount)
        error, gradient = jax.value_and_grad(loss)(params, observation, target)
        direction, opt = _adam.update(gradient, opt)
        rate = lr * (1.0 - number / updates)
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
        averaged = jax.tree.map(lambda a, p: a + tau * (p - a), averaged, params)
        return (params, averaged, opt), error

    steps = jax.random.split(key, updates), jnp.arange(updates, dtype=jnp.float32)
    (params, _, _), errors = jax.lax.scan(update, (params, params, _adam.init(params)), steps)
    return params, {"backup_error": jnp.mean(errors[-max(updates // 10, 1) :]) * scale**2}
