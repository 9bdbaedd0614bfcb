"""The networks of GAA: a GCN for each channel, attention over the channels, a classifier, discriminators."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from graphs.gaa import sparse
from graphs.gaa.losses import cross_view_refine, grad_reverse
from graphs.gaa.sparse import Sparse

__all__ = [
    "GAA",
    "GCN",
    "Channel",
    "ChannelAttention",
    "Convolution",
    "Domain",
    "DomainMLP",
    "LinearAttention",
    "dropout",
    "linear",
]

Array = jax.Array
_glorot = nn.initializers.glorot_uniform()


class Channel(flax.struct.PyTreeNode):
    """A graph to propagate on: P `[N, N]`, and P X `[N, F]` where that is cheaper than its factors."""

    p: Sparse
    px: Sparse | None = None


class Domain(flax.struct.PyTreeNode):
    """One graph as training sees it, padded to N nodes.

    Attributes:
      x: attributes `[N, F]`, dense or Sparse.
      channels: by name the graphs on these nodes: "topology", the given edges; where a method needs them,
        "features", the nearest neighbours by attributes, "ppmi", and "edges", the given ones without loops or
        normalisation.
      y: labels `[N]`, -1 where unknown. mask: `[N]` bool, nodes that are not padding.
    """

    x: Any
    channels: dict[str, Channel]
    y: Array
    mask: Array


def linear(x: Any, kernel: Array) -> Array:
    """`x [N, F]`, dense or Sparse, times `kernel [F, d]`."""
    return sparse.matmul(x, kernel) if isinstance(x, Sparse) else x @ kernel


def dropout(key: Array | None, x: Array, rate: Array | float) -> Array:
    """Sets a share `rate []` of `x [N, d]` to 0 and scales up the rest; without a key, x itself.

    Two elements share one random word, 16 bits each: random numbers are a quarter of a training step on CPU.
    """
    if key is None:
        return x
    width = x.shape[-1]
    words = jax.random.bits(key, (*x.shape[:-1], (width + 1) // 2))
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)[..., :width]
    keep = halves >= jnp.round(rate * 2**16).astype(jnp.uint32)
    return jnp.where(keep, x / jnp.maximum(1.0 - rate, 1e-6), 0.0)


class Convolution(nn.Module):
    """P^hops (x W) + b (Kipf & Welling, 2017): `[N, F]`, dense or Sparse, -> `[N, width]`."""

    width: int

    @nn.compact
    def __call__(self, channel: Channel, x: Any, hops: int = 1) -> Array:
        """A Sparse `x` must be the domain's attributes: the channel may know P x."""
        kernel = self.param("kernel", _glorot, (x.shape[-1], self.width))
        bias = self.param("bias", nn.initializers.zeros, (self.width,))
        if isinstance(x, Sparse) and channel.px is not None and hops:
            x, hops = channel.px, hops - 1
        x = linear(x, kernel)
        for _ in range(hops):
            x = sparse.matmul(channel.p, x)
        return x + bias


class GCN(nn.Module):
    """P dropout(relu(P X W1 + b1)) W2 + b2: a channel's embedding `[N, out]`.

    Attributes:
      hidden, out: widths.
    """

    hidden: int
    out: int

    @nn.compact
    def __call__(
        self, channel: Channel, x: Any, rate: Array | float = 0.0, key: Array | None = None
    ) -> Array:
        hidden = nn.relu(Convolution(self.hidden, name="conv_0")(channel, x))
        return Convolution(self.out, name="conv_1")(channel, dropout(key, hidden, rate))


class ChannelAttention(nn.Module):
    """Weights of two channels, softmax of q . tanh(z Wa + ba): `[N, d]` twice -> `[N, 2]`."""

    width: int = 16

    @nn.compact
    def __call__(self, z: Array, zf: Array) -> Array:
        both = jnp.stack([z, zf], axis=-2)
        hidden = nn.tanh(nn.Dense(self.width, kernel_init=_glorot, name="hidden")(both))
        score = nn.Dense(1, use_bias=False, kernel_init=_glorot, name="query")(hidden)
        return nn.softmax(score[..., 0], axis=-1)


class LinearAttention(nn.Module):
    """Weights of two channels, softmax of z w + b (UDAGCN's): `[N, d]` twice -> `[N, 2]`."""

    @nn.compact
    def __call__(self, z: Array, zf: Array) -> Array:
        score = nn.Dense(1, kernel_init=_glorot, name="score")(jnp.stack([z, zf], axis=-2))
        return nn.softmax(score[..., 0], axis=-1)


class DomainMLP(nn.Module):
    """d -> `width` -> ReLU -> dropout -> `outputs`: `[N, d]` -> logits `[N, outputs]`, or `[N]` for 1."""

    width: int = 40
    outputs: int = 1

    @nn.compact
    def __call__(self, h: Array, rate: Array | float = 0.0, key: Array | None = None) -> Array:
        hidden = nn.relu(nn.Dense(self.width, kernel_init=_glorot, name="hidden")(h))
        logits = nn.Dense(self.outputs, kernel_init=_glorot, name="logit")(dropout(key, hidden, rate))
        return logits[:, 0] if self.outputs == 1 else logits


class GAA(nn.Module):
    """Both domains through the same encoders, the fusion, the classifier `[N, C]`, the discriminators.

    Attributes:
      classes: C. hidden, out: widths h and d of the encoders.
      fusion: "attention", "linear" (weights of the channels by softmax), "mean", "concat", "z" (the topology
        channel alone: a GCN) or "zf" (the attribute channel alone: a kNN-GCN).
      attention_width, domain_width: hidden widths of the attention and of the discriminators.
      share_channels: one set of encoder weights for both channels.
      disc_on: what the discriminator of L_D sees: "h" (the fusion) or "z".
      refined: also a discriminator on the refined rows R, for the adversarial cross-view form.
    """

    classes: int
    hidden: int = 128
    out: int = 128
    fusion: str = "attention"
    attention_width: int = 16
    domain_width: int = 40
    share_channels: bool = False
    disc_on: str = "h"
    refined: bool = False

    def setup(self):
        if self.fusion != "zf":
            self.encoder = GCN(self.hidden, self.out)
        if self.fusion != "z":
            shared = self.share_channels and self.fusion != "zf"
            self.feature_encoder = self.encoder if shared else GCN(self.hidden, self.out)
        if self.fusion == "attention":
            self.attention = ChannelAttention(self.attention_width)
        if self.fusion == "linear":
            self.attention = LinearAttention()
        self.classifier = nn.Dense(self.classes, kernel_init=_glorot)
        self.discriminator = DomainMLP(self.domain_width)
        if self.refined:
            self.refined_discriminator = DomainMLP(self.domain_width)

    def embed(self, domain: Domain, rate: Array | float = 0.0, key: Array | None = None) -> dict[str, Array]:
        """Embeddings of one graph: `z`, `zf` `[N, d]` (those there are), `h`, `logits` `[N, C]`, and
        `channels` `[N, 2]`, the weights of the two, with attention."""
        keys = (None, None) if key is None else jax.random.split(key)
        found = {}
        if self.fusion != "zf":
            found["z"] = self.encoder(domain.channels["topology"], domain.x, rate, keys[0])
        if self.fusion != "z":
            found["zf"] = self.feature_encoder(domain.channels["features"], domain.x, rate, keys[1])
        if self.fusion in ("attention", "linear"):
            found["channels"] = self.attention(found["z"], found["zf"])
        found["h"] = self._fuse(found)
        return found | {"logits": self.classifier(found["h"])}

    def _fuse(self, found):
        if self.fusion in ("z", "zf"):
            return found[self.fusion]
        if self.fusion == "mean":
            return (found["z"] + found["zf"]) / 2
        if self.fusion == "concat":
            return jnp.concatenate([found["z"], found["zf"]], axis=-1)
        weights = found["channels"]
        return weights[:, :1] * found["z"] + weights[:, 1:] * found["zf"]

    def __call__(
        self,
        source: Domain,
        target: Domain,
        reversal: Array | float = 1.0,
        rate: Array | float = 0.0,
        key: Array | None = None,
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """`embed` of both, each with `domain` `[N]`: the discriminator's logit, whose gradient towards the
        encoders is multiplied by -`reversal`; with `refined` also `r` `[N, d]` and `refined_domain` `[N]`."""
        keys = (None, None) if key is None else jax.random.split(key)
        both = [self.embed(domain, rate, k) for domain, k in zip((source, target), keys)]
        for found, domain in zip(both, (source, target)):
            seen = found["z"] if self.disc_on == "z" else found["h"]
            found["domain"] = self.discriminator(grad_reverse(seen, reversal))
            if self.refined:
                found["r"] = cross_view_refine(found["z"], found["zf"], domain.mask)
                found["refined_domain"] = self.refined_discriminator(grad_reverse(found["r"], reversal))
        return both[0], both[1]
