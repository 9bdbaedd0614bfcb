"""UDAGCN (Wu et al., WWW 2020): edges and PPMI through one GCN, attention, an adversary, target entropy."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from graphs.gaa import losses
from graphs.gaa.networks import GCN, Domain, DomainMLP, LinearAttention
from graphs.gaa.training import Method, by_gradient

__all__ = ["UDAGCN", "loss", "make"]

Array = jax.Array
_glorot = nn.initializers.glorot_uniform()


class UDAGCN(nn.Module):
    """Embeddings by a GCN that both views share, fused by attention; classifier `[N, C]` and domain MLP.

    Attributes:
      classes: C. hidden: width. domain_width: of the domain MLP. ppmi: use the second view.
    """

    classes: int
    hidden: int = 128
    domain_width: int = 40
    ppmi: bool = True

    def setup(self):
        self.encoder = GCN(self.hidden, self.hidden)
        if self.ppmi:
            self.attention = LinearAttention()
        self.classifier = nn.Dense(self.classes, kernel_init=_glorot)
        self.discriminator = DomainMLP(self.domain_width, outputs=2)

    def embed(self, domain: Domain, rate: Array | float = 0.0, key: Array | None = None) -> Array:
        """Fused embedding `[N, hidden]`."""
        keys = (None, None) if key is None else jax.random.split(key)
        z = self.encoder(domain.channels["topology"], domain.x, rate, keys[0])
        if not self.ppmi:
            return z
        zg = self.encoder(domain.channels["ppmi"], domain.x, rate, keys[1])
        weights = self.attention(z, zg)
        return weights[:, :1] * z + weights[:, 1:] * zg

    def classify(self, domain: Domain) -> Array:
        """Logits `[N, C]` without dropout."""
        return self.classifier(self.embed(domain))

    def __call__(self, source, target, reversal=1.0, rate=0.0, key=None):
        """(embedding, logits, domain logits `[N, 2]` behind the gradient reversal) of both domains."""
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        found = []
        for domain, embed_key, domain_key in zip((source, target), keys[:2], keys[2:]):
            h = self.embed(domain, rate, embed_key)
            seen = losses.grad_reverse(h, reversal)
            found.append((h, self.classifier(h), self.discriminator(seen, rate, domain_key)))
        return tuple(found)


def loss(params, source, target, labelled, hyper, key, progress, *, network):
    """CE_s + CE(source is 0) + CE(target is 1) + 0.01 (epoch / E) entropy_t, reversal min((e + 1) / E, 0.05).

    `hyper` has dropout `[]`; arguments and result as training.by_gradient's `loss`.
    """
    reversal = jnp.minimum((progress.step + 1) / progress.steps, 0.05)
    (_, logits_s, domain_s), (_, logits_t, domain_t) = network.apply(
        params, source, target, reversal, hyper["dropout"], key
    )
    n_s, n_t = source.mask.shape[0], target.mask.shape[0]
    parts = {
        "source_loss": losses.cross_entropy(logits_s, source.y, source.mask & labelled),
        "domain_loss": losses.cross_entropy(domain_s, jnp.zeros(n_s, jnp.int32), source.mask)
        + losses.cross_entropy(domain_t, jnp.ones(n_t, jnp.int32), target.mask),
        "target_loss": losses.entropy_loss(logits_t, target.mask),
    }
    total = parts["source_loss"] + parts["domain_loss"] + 0.01 * progress.share * parts["target_loss"]
    return total, parts | {"loss": total}


@functools.lru_cache(maxsize=16)
def make(network: UDAGCN) -> Method:
    """UDAGCN; needs the channels "topology" and "ppmi"."""

    def predict(params, domain):
        return network.apply(params, domain, method="classify")

    return by_gradient(network.init, functools.partial(loss, network=network), predict)
