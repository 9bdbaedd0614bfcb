"""The tanh-squashed diagonal Gaussian a = tanh(u), u ~ N(mean, exp(log_std)^2)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

__all__ = ["gaussian_entropy", "gaussian_log_prob", "log_prob", "mode", "sample", "squash"]

Array = jax.Array


def squash(noise: Array, mean: Array, log_std: Array) -> tuple[Array, Array]:
    """Reparameterised draw (action in [-1, 1], pre-tanh u) from standard normal `noise`, all `[..., A]`."""
    pre_tanh = mean + jnp.exp(log_std) * noise
    return jnp.tanh(pre_tanh), pre_tanh


def sample(key: Array, mean: Array, log_std: Array) -> tuple[Array, Array]:
    """Draws (action in [-1, 1], pre-tanh u), `[..., A]` as `mean`; `log_std` broadcasts against it."""
    return squash(jax.random.normal(key, mean.shape, mean.dtype), mean, log_std)


def mode(mean: Array) -> Array:
    """Deterministic action tanh(mean), `[..., A]` in [-1, 1]."""
    return jnp.tanh(mean)


def gaussian_log_prob(pre_tanh: Array, mean: Array, log_std: Array) -> Array:
    """Log density of u itself, `[..., A] -> [...]`, without the tanh term (PPO's ratio cancels it)."""
    noise = (pre_tanh - mean) * jnp.exp(-log_std)
    return jnp.sum(-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi), axis=-1)


def log_prob(pre_tanh: Array, mean: Array, log_std: Array) -> Array:
    """Log density of a = tanh(u), `[..., A] -> [...]`: log N(u) - sum log(1 - tanh(u)^2), no epsilon.

    Written with 1 - tanh(u)^2 = 4 sigmoid(2u) sigmoid(-2u), exact in float32 where tanh saturates.
    """
    log_slope = math.log(4.0) + jax.nn.log_sigmoid(2 * pre_tanh) + jax.nn.log_sigmoid(-2 * pre_tanh)
    return gaussian_log_prob(pre_tanh, mean, log_std) - jnp.sum(log_slope, axis=-1)


def gaussian_entropy(log_std: Array) -> Array:
    """Entropy in nats of u, `[..., A] -> [...]`; an upper bound of the entropy of tanh(u)."""
    return jnp.sum(log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1)
