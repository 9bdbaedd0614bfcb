"""Running mean and variance of observations. Frozen statistics are simply statistics nobody updates."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

__all__ = ["RunningStats", "apply", "init", "update"]

Array = jax.Array


class RunningStats(flax.struct.PyTreeNode):
    """`count` `[]` samples seen, their `mean` `[D]` and `m2` `[D]`, the sum of squared deviations from it."""

    count: Array
    mean: Array
    m2: Array


def init(size: int) -> RunningStats:
    """Statistics of no samples of width `size`; `apply` then only clips."""
    return RunningStats(jnp.float32(0), jnp.zeros(size), jnp.zeros(size))


def update(stats: RunningStats, x: Array) -> RunningStats:
    """Merges samples `x` `[..., D]` into `stats` by the pairwise rule of Chan et al. (1979)."""
    x = x.reshape(-1, x.shape[-1])
    n = jnp.float32(x.shape[0])
    mean = jnp.mean(x, axis=0)
    m2 = jnp.sum((x - mean) ** 2, axis=0)
    count = stats.count + n
    delta = mean - stats.mean
    return RunningStats(
        count=count,
        mean=stats.mean + delta * (n / count),
        m2=stats.m2 + m2 + delta**2 * (stats.count * n / count),
    )


def apply(stats: RunningStats, x: Array, *, clip: float = 10.0) -> Array:
    """(x - mean) / std `[..., D]` clipped to [-clip, clip]; population std, 1 before two samples."""
    variance = jnp.where(stats.count > 1, stats.m2 / jnp.maximum(stats.count, 1), 1.0)
    return jnp.clip((x - stats.mean) * jax.lax.rsqrt(variance + 1e-8), -clip, clip)
