"""Learning curves over real interaction, and the numbers read off them (Sec. 3 of the SGFT specification)."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from core.errors import UserError

__all__ = [
    "Curve",
    "Interaction",
    "auc",
    "count",
    "init_curve",
    "initial_dip",
    "record",
    "steps_to_threshold",
]

Array = jax.Array


class Interaction(flax.struct.PyTreeNode):
    """How much of the real system was used: `[]` control steps, finished episodes, seconds of it."""

    steps: Array
    episodes: Array
    seconds: Array

    @classmethod
    def none(cls) -> Interaction:
        """Nothing used yet."""
        return cls(jnp.int32(0), jnp.int32(0), jnp.float32(0))


class Curve(flax.struct.PyTreeNode):
    """Evaluations `[P]` in order; the first `size` are filled, the others NaN (counts: 0)."""

    steps: Array
    episodes: Array
    seconds: Array
    success: Array
    returns: Array
    size: Array


def count(used: Interaction, ended: Array, *, control_seconds: float) -> Interaction:
    """Adds the control steps behind `ended` `[...]` (bool, terminated or truncated, one entry per step)."""
    steps = used.steps + ended.size
    return Interaction(
        steps=steps,
        episodes=used.episodes + jnp.sum(ended, dtype=jnp.int32),
        seconds=steps * jnp.float32(control_seconds),
    )


def init_curve(points: int) -> Curve:
    """An empty curve with room for `points` evaluations; a pytree, so it checkpoints and `vmap`s."""
    zeros, empty = jnp.zeros(points, jnp.int32), jnp.full(points, jnp.nan)
    return Curve(zeros, zeros, empty, empty, empty, jnp.int32(0))


def record(curve: Curve, used: Interaction, *, success: Array, returns: Array) -> Curve:
    """Appends one evaluation, success rate and mean unshaped return `[]`, made after `used` interaction."""

    def put(values, value):
        return values.at[curve.size].set(value)

    return Curve(
        steps=put(curve.steps, used.steps),
        episodes=put(curve.episodes, used.episodes),
        seconds=put(curve.seconds, used.seconds),
        success=put(curve.success, success),
        returns=put(curve.returns, returns),
        size=curve.size + 1,
    )


def steps_to_threshold(
    steps: ArrayLike, success: ArrayLike, *, budget: float, tau: float = 0.5, hold: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """First number of steps at which success reaches `tau` and stays there for the next `hold` evaluations.

    Args:
      steps: `[N]` real steps at each evaluation. success: `[..., N]` rates in 0..1.
      budget: the answer where that never happens; a point too late to be confirmed does not count.

    Returns:
      (steps `[...]`, censored `[...]` bool: true where the answer is the budget, a lower bound).
    """
    steps, success = np.asarray(steps), np.asarray(success)
    if success.shape[-1] != steps.shape[0]:
        raise UserError(f"success has {success.shape[-1]} evaluations but steps has {steps.shape[0]}")
    if steps.shape[0] <= hold:
        shape = success.shape[:-1]
        return np.full(shape, float(budget)), np.ones(shape, bool)
    held = np.lib.stride_tricks.sliding_window_view(success >= tau, hold + 1, axis=-1).all(-1)
    reached = held.any(-1)
    return np.where(reached, steps[held.argmax(-1)], float(budget)), np.logical_not(reached)


def auc(steps: ArrayLike, values: ArrayLike) -> np.ndarray:
    """Mean height `[...]` of the curve `values` `[..., N]` over `steps` `[N]`, by the trapezoid rule."""
    steps = np.asarray(steps, float)
    return np.trapezoid(np.asarray(values, float), steps, axis=-1) / (steps[-1] - steps[0])


def initial_dip(
    steps: ArrayLike,
    returns: ArrayLike,
    *,
    budget: float,
    zero_shot_return: ArrayLike,
    fraction: float = 0.2,
) -> np.ndarray:
    """Worst return(n) - return(0) over n <= fraction * budget as a share of |zero_shot_return|; at most 0.

    steps `[N]` starts with the evaluation before training; returns `[..., N]`; zero_shot_return `[...]`.
    """
    returns = np.asarray(returns, float)
    early = np.asarray(steps) <= fraction * budget
    worst = (returns[..., early] - returns[..., :1]).min(-1)
    return worst / np.abs(np.asarray(zero_shot_return, float))
