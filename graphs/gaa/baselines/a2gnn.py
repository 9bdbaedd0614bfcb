"""A2GNN (Liu et al., AAAI 2024): many propagations on the target, none on the source, MMD between them."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from core.errors import UserError, nearest
from graphs.gaa import losses
from graphs.gaa.networks import Convolution, Domain, DomainMLP, dropout
from graphs.gaa.training import Method, by_gradient

__all__ = ["A2GNN", "ALIGNMENTS", "loss", "make", "sampled_mmd"]

Array = jax.Array
ALIGNMENTS = ("MMD", "adversarial")


class A2GNN(nn.Module):
    """Two layers, each a linear map, n propagations, bias, ReLU, dropout; then `[N, C]` by one more.

    Attributes:
      classes: C. hidden: width. hops: n on the target; the source has 0.
      alignment: "MMD" or "adversarial".
    """

    classes: int
    hidden: int = 128
    hops: int = 10
    alignment: str = "MMD"

    def __post_init__(self):
        if self.alignment not in ALIGNMENTS:
            hint = nearest(self.alignment, ALIGNMENTS)
            raise UserError(f"alignment={self.alignment!r}{hint}; one of {', '.join(ALIGNMENTS)}")
        super().__post_init__()

    def setup(self):
        self.layers = [Convolution(self.hidden), Convolution(self.hidden)]
        self.classifier = Convolution(self.classes)
        if self.alignment == "adversarial":
            self.discriminator = DomainMLP(outputs=2)

    def embed(self, domain: Domain, hops: int, rate: Array | float = 0.0, key: Array | None = None) -> Array:
        """Features `[N, hidden]` after two layers of `hops` propagations each."""
        keys = (None, None) if key is None else jax.random.split(key)
        h = domain.x
        for layer, layer_key in zip(self.layers, keys):
            h = dropout(layer_key, nn.relu(layer(domain.channels["topology"], h, hops)), rate)
        return h

    def classify(self, domain: Domain) -> Array:
        """Logits `[N, C]` of a target: `hops` propagations a layer, without dropout."""
        return self.classifier(domain.channels["topology"], self.embed(domain, self.hops))

    def __call__(self, source, target, reversal=1.0, rate=0.0, key=None):
        """Features of both domains, the source's logits, and domain logits `[N, 2]` (adversarial) or None."""
        keys = (None, None) if key is None else jax.random.split(key)
        h_s, h_t = self.embed(source, 0, rate, keys[0]), self.embed(target, self.hops, rate, keys[1])
        domains = None
        if self.alignment == "adversarial":
            domains = [self.discriminator(losses.grad_reverse(h, reversal)) for h in (h_s, h_t)]
        return h_s, h_t, self.classifier(source.channels["topology"], h_s), domains


def sampled_mmd(
    key: Array, x: Array, y: Array, mask_x: Array, mask_y: Array, *, draws: int = 5, size: int = 1000
):
    """Mean MMD^2 `[]` of `draws` samples of `size` rows, with replacement, of `x [n, d]` and `y [m, d]`."""

    def one(key):
        keys = jax.random.split(key)
        rows = [
            jax.random.categorical(k, jnp.where(m, 0.0, -jnp.inf), shape=(size,)) for k, m in zip(keys, masks)
        ]
        return losses.mmd_multi_rbf(x[rows[0]], y[rows[1]])

    masks = mask_x, mask_y
    return jnp.mean(jax.lax.map(one, jax.random.split(key, draws)))


def loss(params, source, target, labelled, hyper, key, progress, *, network):
    """CE_s + `weight` times the alignment of the features; `hyper` has dropout, weight `[]`."""
    dropout_key, draw_key = jax.random.split(key)
    h_s, h_t, logits, domains = network.apply(
        params, source, target, losses.reversal_factor(progress.share), hyper["dropout"], dropout_key
    )
    parts = {"source_loss": losses.cross_entropy(logits, source.y, source.mask & labelled)}
    if domains is None:
        parts["domain_loss"] = sampled_mmd(draw_key, h_s, h_t, source.mask, target.mask)
    else:
        zeros, ones = jnp.zeros(h_s.shape[0], jnp.int32), jnp.ones(h_t.shape[0], jnp.int32)
        parts["domain_loss"] = losses.cross_entropy(domains[0], zeros, source.mask)
        parts["domain_loss"] += losses.cross_entropy(domains[1], ones, target.mask)
    total = parts["source_loss"] + hyper["weight"] * parts["domain_loss"]
    return total, parts | {"loss": total}


@functools.lru_cache(maxsize=16)
def make(network: A2GNN) -> Method:
    """A2GNN; needs the channel "topology". Held-out source nodes are predicted as a target's."""

    def predict(params, domain):
        return network.apply(params, domain, method="classify")

    return by_gradient(network.init, functools.partial(loss, network=network), predict)
