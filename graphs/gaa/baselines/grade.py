"""GRADE (Wu et al., AAAI 2023): all layers' features and the logits face one linear discriminator."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from core.errors import UserError, nearest
from graphs.gaa import losses
from graphs.gaa.networks import Convolution, Domain, dropout
from graphs.gaa.training import Method, by_gradient

__all__ = ["ALIGNMENTS", "GRADE", "domain_loss", "loss", "make"]

Array = jax.Array
ALIGNMENTS = ("JS", "MMD", "C")
_glorot = nn.initializers.glorot_uniform()


class GRADE(nn.Module):
    """A GCN with ReLU and dropout after every layer, a classifier `[N, C]`, a linear discriminator.

    Attributes:
      classes: C. hidden: width. layers: 3 to 5.
      alignment: "JS" (adversarial), "C" (adversarial, told the classes), or "MMD" (no discriminator).
    """

    classes: int
    hidden: int = 128
    layers: int = 3
    alignment: str = "JS"

    def __post_init__(self):
        if self.alignment not in ALIGNMENTS:
            hint = nearest(self.alignment, ALIGNMENTS)
            raise UserError(f"alignment={self.alignment!r}{hint}; one of {', '.join(ALIGNMENTS)}")
        super().__post_init__()

    def setup(self):
        self.convolutions = [Convolution(self.hidden) for _ in range(self.layers)]
        self.classifier = nn.Dense(self.classes, kernel_init=_glorot)
        if self.alignment != "MMD":
            self.discriminator = nn.Dense(2, kernel_init=_glorot)

    def embed(self, domain: Domain, rate: Array | float = 0.0, key: Array | None = None) -> Array:
        """All layers' outputs and the logits, `[N, layers * hidden + C]`; the logits are the last C."""
        keys = [None] * self.layers if key is None else jax.random.split(key, self.layers)
        h, features = domain.x, []
        for convolution, layer_key in zip(self.convolutions, keys):
            h = dropout(layer_key, nn.relu(convolution(domain.channels["topology"], h)), rate)
            features.append(h)
        return jnp.concatenate([*features, self.classifier(h)], axis=-1)

    def classify(self, domain: Domain) -> Array:
        """Logits `[N, C]` without dropout."""
        return self.embed(domain)[:, -self.classes :]

    def __call__(self, source, target, reversal=1.0, rate=0.0, key=None):
        """(features, domain logits `[N, 2]` behind the gradient reversal, or None) of both domains."""
        keys = (None, None) if key is None else jax.random.split(key)
        found = []
        for domain, k, labels in zip((source, target), keys, (source.y, None)):
            features = self.embed(domain, rate, k)
            logits = features[:, -self.classes :]
            seen = features
            if self.alignment == "C":
                said = nn.softmax(logits) if labels is None else jax.nn.one_hot(labels, self.classes)
                seen = jnp.concatenate([features, 8.0 * said], axis=-1)
            seen = losses.grad_reverse(seen, reversal)
            found.append((features, None if self.alignment == "MMD" else self.discriminator(seen)))
        return tuple(found)


def domain_loss(logits_s: Array, logits_t: Array, mask_s: Array, mask_t: Array) -> Array:
    """Cross-entropy `[]` of domain logits `[N_s, 2]` (source 0), `[N_t, 2]` (target 1), one mean of all."""
    n_s, n_t = jnp.sum(mask_s), jnp.sum(mask_t)
    source = losses.cross_entropy(logits_s, jnp.zeros(logits_s.shape[0], jnp.int32), mask_s)
    target = losses.cross_entropy(logits_t, jnp.ones(logits_t.shape[0], jnp.int32), mask_t)
    return (n_s * source + n_t * target) / (n_s + n_t)


def loss(params, source, target, labelled, hyper, key, progress, *, network):
    """CE_s + 0.01 alignment; "MMD" compares the first min(N_s, N_t) nodes. `hyper` has dropout `[]`."""
    reversal = losses.reversal_factor(progress.share)
    (features_s, domain_s), (features_t, domain_t) = network.apply(
        params, source, target, reversal, hyper["dropout"], key
    )
    if network.alignment == "MMD":
        count = jnp.minimum(jnp.sum(source.mask), jnp.sum(target.mask))
        masks = [mask & (jnp.arange(mask.shape[0]) < count) for mask in (source.mask, target.mask)]
        alignment = losses.mmd_multi_rbf(features_s, features_t, *masks)
    else:
        alignment = domain_loss(domain_s, domain_t, source.mask, target.mask)
    logits = features_s[:, -network.classes :]
    parts = {
        "source_loss": losses.cross_entropy(logits, source.y, source.mask & labelled),
        "domain_loss": alignment,
    }
    total = parts["source_loss"] + 0.01 * alignment
    return total, parts | {"loss": total}


@functools.lru_cache(maxsize=16)
def make(network: GRADE) -> Method:
    """GRADE; needs the channel "topology"."""

    def predict(params, domain):
        return network.apply(params, domain, method="classify")

    return by_gradient(network.init, functools.partial(loss, network=network), predict)
