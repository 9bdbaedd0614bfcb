"""Multilayer perceptrons, alone and as ensembles with stacked parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

__all__ = ["MLP", "Ensemble", "scaled_normal", "split_members", "stack_members"]


def scaled_normal(gain: float = 1.0) -> Initializer:
    """Kernel initializer N(0, gain^2 * 2 / fan_in), untruncated (He et al., 2015, with a gain)."""
    return nn.initializers.variance_scaling(2.0 * gain**2, "fan_in", "normal")


class MLP(nn.Module):
    """Dense layers `[..., D] -> [..., features[-1]]`, with (layer norm and) activation on all but the last.

    Attributes:
      features: widths of the hidden layers and, last, of the output.
      activation: elementwise function.
      layer_norm: LayerNorm (affine, epsilon 1e-5) between each hidden layer and its activation.
      kernel_init, final_kernel_init: initializers of the hidden kernels and of the last one.
    """

    features: Sequence[int]
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    layer_norm: bool = False
    kernel_init: Initializer = scaled_normal()
    final_kernel_init: Initializer = scaled_normal()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.features[:-1]:
            x = nn.Dense(width, kernel_init=self.kernel_init)(x)
            if self.layer_norm:
                x = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)(x)
            x = self.activation(x)
        return nn.Dense(self.features[-1], kernel_init=self.final_kernel_init)(x)


class Ensemble(nn.Module):
    """`size` independent MLPs on one input: `[..., D] -> [size, ..., features[-1]]`.

    Parameters are stacked on a leading axis of length `size`; attributes are those of `MLP`.
    """

    size: int
    features: Sequence[int]
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    layer_norm: bool = False
    kernel_init: Initializer = scaled_normal()
    final_kernel_init: Initializer = scaled_normal()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        members = nn.vmap(
            MLP,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=0,
            axis_size=self.size,
        )
        return members(
            self.features,
            self.activation,
            self.layer_norm,
            self.kernel_init,
            self.final_kernel_init,
            name="members",
        )(x)


def split_members(stacked: Any, size: int) -> tuple[Any, ...]:
    """A pytree with leaves `[size, ...]` as a tuple of `size` pytrees with leaves `[...]`.

    On CPU a few plain matrix products keep both cores and the cache busier than one batched product does.
    """
    return tuple(jax.tree.map(operator.itemgetter(i), stacked) for i in range(size))


def stack_members(members: Sequence[Any]) -> Any:
    """The inverse of `split_members`: leaves `[...]` of each member become one leaf `[size, ...]`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
