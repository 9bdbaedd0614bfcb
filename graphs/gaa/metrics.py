"""Accuracy as graph domain adaptation reports it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["micro_macro_f1"]

Array = jax.Array


def micro_macro_f1(y: Array, predicted: Array, mask: Array, *, classes: int) -> tuple[Array, Array]:
    """Micro-F1 (accuracy) and macro-F1 `[]` of `predicted [N]` against labels `y [N]` where `mask [N]`.

    Macro-F1 is the mean over the classes that occur in the truth or in the prediction (scikit-learn's rule).
    """
    true = jax.nn.one_hot(y, classes) * mask[:, None]
    guess = jax.nn.one_hot(predicted, classes) * mask[:, None]
    hits, support = jnp.sum(true * guess, axis=0), jnp.sum(true, axis=0) + jnp.sum(guess, axis=0)
    f1 = 2 * hits / jnp.maximum(support, 1)
    occurs = support > 0
    macro = jnp.sum(f1 * occurs) / jnp.maximum(jnp.sum(occurs), 1)
    return jnp.sum(hits) / jnp.maximum(jnp.sum(mask), 1), macro
