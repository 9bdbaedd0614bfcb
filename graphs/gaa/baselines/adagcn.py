"""AdaGCN (Dai et al., TKDE 2022): a GCN whose embeddings a Wasserstein critic can not tell apart."""

from __future__ import annotations

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from graphs.gaa import losses
from graphs.gaa.networks import GCN, Domain, DomainMLP
from graphs.gaa.training import Learner, Method, adam

__all__ = ["AdaGCN", "AdaState", "critic_loss", "make"]

Array = jax.Array
_adam = optax.scale_by_adam()


class AdaGCN(nn.Module):
    """A two-layer GCN, a classifier, and the critic h -> 40 -> ReLU -> dropout -> 1 -> sigmoid."""

    classes: int
    hidden: int = 128

    def setup(self):
        self.encoder = GCN(self.hidden, self.hidden)
        self.classifier = nn.Dense(self.classes, kernel_init=nn.initializers.glorot_uniform())
        self.critic = DomainMLP()

    def embed(self, domain: Domain, rate: Array | float = 0.0, key: Array | None = None) -> Array:
        """Embedding `[N, hidden]`."""
        return self.encoder(domain.channels["topology"], domain.x, rate, key)

    def logits(self, h: Array) -> Array:
        """Logits `[N, C]` of embeddings `[N, hidden]`."""
        return self.classifier(h)

    def criticise(self, h: Array, rate: Array | float = 0.0, key: Array | None = None) -> Array:
        """The critic's value `[N]` in 0..1 of embeddings `[N, hidden]`."""
        return nn.sigmoid(self.critic(h, rate, key))

    def __call__(self, domain: Domain) -> tuple[Array, Array]:
        """Logits and critic's values: touches every parameter."""
        h = self.embed(domain)
        return self.logits(h), self.criticise(h)


class AdaState(flax.struct.PyTreeNode):
    """Encoder with classifier, and critic, each with an Adam of its own."""

    model: Learner
    critic: Learner


def critic_loss(critic, h_s, h_t, mask_s, mask_t, key, *, rate=0.0):
    """-|mean D(s) - mean D(t)| + 5 GP `[]`, GP = mean (|dD/dz| - 1)^2 over s, t, and interpolates.

    Args:
      critic: `(h [N, d], rate, key) -> [N]`.
      h_s, h_t: embeddings `[N_s, d]`, `[N_t, d]`. mask_s, mask_t: rows that count.
      key: for the interpolates (as many as the smaller domain has rows, between random rows) and for dropout.
    """
    row_key, mix_key, drop_key = jax.random.split(key, 3)
    size = min(h_s.shape[0], h_t.shape[0])
    rows = [
        jax.random.categorical(k, jnp.where(mask, 0.0, -jnp.inf), shape=(size,))
        for k, mask in zip(jax.random.split(row_key), (mask_s, mask_t))
    ]
    mix = jax.random.uniform(mix_key, (size, 1))
    between = h_s[rows[0]] + mix * (h_t[rows[1]] - h_s[rows[0]])
    every = jnp.concatenate([h_s, h_t, between])
    weight = jnp.concatenate([mask_s, mask_t, jnp.arange(size) < jnp.minimum(mask_s.sum(), mask_t.sum())])
    slope = jax.grad(lambda z: jnp.sum(critic(z, rate, drop_key)))(every)
    norm = jnp.sqrt(jnp.sum(jnp.square(slope), axis=-1) + 1e-12)
    penalty = losses.masked_mean(jnp.square(norm - 1.0), weight)
    return -jnp.abs(gap(critic, h_s, h_t, mask_s, mask_t, rate, drop_key)) + 5.0 * penalty


def gap(critic, h_s, h_t, mask_s, mask_t, rate=0.0, key=None):
    """mean D(s) - mean D(t) `[]`."""
    keys = (None, None) if key is None else jax.random.split(key)
    means = [
        losses.masked_mean(critic(h, rate, k), mask)
        for h, k, mask in ((h_s, keys[0], mask_s), (h_t, keys[1], mask_t))
    ]
    return means[0] - means[1]


@functools.lru_cache(maxsize=16)
def make(network: AdaGCN, critic_steps: int = 10) -> Method:
    """AdaGCN; needs the channel "topology". `hyper`: lr, weight_decay, dropout, weight (of the gap) `[]`."""

    def init(key, source, target):
        params = network.init(key, source)["params"]
        critic = {"critic": params.pop("critic")}
        return AdaState(*(Learner(p, _adam.init(p)) for p in (params, critic)))

    def apply(params, *arguments, method):
        return network.apply({"params": params}, *arguments, method=method)

    def step(state, source, target, labelled, hyper, key, progress):
        del progress
        embed_key, critic_key, step_key = jax.random.split(key, 3)
        rate, masks = hyper["dropout"], (source.mask, target.mask)

        def embed(params):
            keys = jax.random.split(embed_key)
            return [apply(params, d, rate, k, method="embed") for d, k in zip((source, target), keys)]

        fixed = embed(state.model.params)

        def criticise(critic, key):
            def loss(params):
                values = functools.partial(apply, params, method="criticise")
                return critic_loss(values, *fixed, *masks, key, rate=rate)

            gradient = jax.grad(loss)(critic.params)
            return adam(critic, gradient, lr=hyper["lr"], weight_decay=hyper["weight_decay"]), None

        critic, _ = jax.lax.scan(criticise, state.critic, jax.random.split(critic_key, critic_steps))

        def loss(params):
            h_s, h_t = embed(params)
            logits = apply(params, h_s, method="logits")
            values = functools.partial(apply, critic.params, method="criticise")
            parts = {
                "source_loss": losses.cross_entropy(logits, source.y, source.mask & labelled),
                "domain_loss": jnp.abs(gap(values, h_s, h_t, *masks, rate, step_key)),
            }
            total = parts["source_loss"] + hyper["weight"] * parts["domain_loss"]
            return total, parts | {"loss": total}

        gradient, metrics = jax.grad(loss, has_aux=True)(state.model.params)
        model = adam(state.model, gradient, lr=hyper["lr"], weight_decay=hyper["weight_decay"])
        return AdaState(model, critic), metrics

    def predict(state, domain):
        h = apply(state.model.params, domain, method="embed")
        return apply(state.model.params, h, method="logits")

    return Method(init, step, predict)
