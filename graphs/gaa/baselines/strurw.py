"""StruRW (Liu et al., ICML 2023): source edges reweighted to the class-to-class densities of the target."""

from __future__ import annotations

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from core.errors import UserError, nearest
from graphs.gaa import losses, sparse
from graphs.gaa.networks import Domain, DomainMLP, dropout, linear
from graphs.gaa.training import Learner, Method, adam

__all__ = ["MODES", "StruRW", "StruState", "edge_class_probs", "edge_ratios", "make"]

Array = jax.Array
MODES = ("erm", "adv", "mmd")
_adam = optax.scale_by_adam()
_glorot = nn.initializers.glorot_uniform()


def edge_class_probs(y: Array, senders: Array, receivers: Array, weight: Array, *, classes: int) -> Array:
    """p_kl = (Y^T A Y)_kl / (n_k n_l) `[C, C]`: how densely class k sends to class l.

    Args:
      y: labels `[N]`, -1 for nodes that do not count. senders, receivers: `[E]`. weight: `[E]`, 0 for
        padding.
    """
    one_hot = jax.nn.one_hot(y, classes)
    pairs = (one_hot[senders] * weight[:, None]).T @ one_hot[receivers]
    count = jnp.sum(one_hot, axis=0)
    return pairs / (count[:, None] * count)


def edge_ratios(p_s: Array, p_t: Array) -> Array:
    """R = p_t / p_s `[C, C]`, 1 where that is not finite; edge u -> v of the source gets R[y_v, y_u]."""
    ratio = p_t / p_s
    return jnp.where(jnp.isfinite(ratio), ratio, 1.0)


class MeanLayer(nn.Module):
    """relu(Linear [x_v, mean over edges u -> v of weight * Linear x_u]) -> `[N, width]`."""

    width: int

    @nn.compact
    def __call__(self, mean, x):
        kernel = self.param("kernel", _glorot, (x.shape[-1], self.width))
        bias = self.param("bias", nn.initializers.zeros, (self.width,))
        own = self.param("own_kernel", _glorot, (x.shape[-1], self.width))
        heard = nn.Dense(self.width, kernel_init=_glorot, name="heard")
        # The second Linear of [x_v, heard] is split in two, so that Sparse attributes stay sparse.
        return nn.relu(linear(x, own) + heard(sparse.matmul(mean, linear(x, kernel) + bias)))


class StruRW(nn.Module):
    """Two MeanLayers and a two-layer head: logits `[N, C]`.

    Attributes:
      classes: C. hidden: width. mode: "erm", "adv" (domain adversary) or "mmd".
    """

    classes: int
    hidden: int = 128
    mode: str = "erm"

    def __post_init__(self):
        if self.mode not in MODES:
            raise UserError(f"mode={self.mode!r}{nearest(self.mode, MODES)}; one of {', '.join(MODES)}")
        super().__post_init__()

    def setup(self):
        self.layers = [MeanLayer(self.hidden), MeanLayer(self.hidden)]
        self.head = nn.Dense(self.hidden, kernel_init=_glorot)
        self.classifier = nn.Dense(self.classes, kernel_init=_glorot)
        if self.mode == "adv":
            self.discriminator = DomainMLP(outputs=2)

    def embed(self, x, mean, rate=0.0, key=None):
        """Features `[N, hidden]` from attributes and the neighbour mean `[N, N]`."""
        keys = (None, None) if key is None else jax.random.split(key)
        for layer, layer_key in zip(self.layers, keys):
            x = dropout(layer_key, layer(mean, x), rate)
        return x

    def classify(self, x, mean):
        """Logits `[N, C]` without dropout."""
        return self.classifier(nn.relu(self.head(self.embed(x, mean))))

    def __call__(self, source, target, reversal=1.0, rate=0.0, key=None):
        """Features of both (x, mean) pairs, the source's logits, domain logits `[N, 2]` ("adv") or None."""
        keys = (None, None) if key is None else jax.random.split(key)
        h_s, h_t = (self.embed(*pair, rate, k) for pair, k in zip((source, target), keys))
        domains = None
        if self.mode == "adv":
            domains = [self.discriminator(losses.grad_reverse(h, reversal)) for h in (h_s, h_t)]
        return h_s, h_t, self.classifier(nn.relu(self.head(h_s))), domains


class StruState(flax.struct.PyTreeNode):
    """What is learned, and R `[C, C]`."""

    learner: Learner
    ratios: Array


def neighbour_mean(edges: sparse.Sparse, y: Array | None, ratios: Array | None, share: Array | float):
    """The mean over senders `[N, N]`, entries times (1 - share) + share R[y_v, y_u] if `ratios` are given.

    Args:
      edges: adjacency `[N, N]`, row = receiver v, column = sender u. y: labels `[N]`.
      ratios: R `[C, C]`. share: lambda in 0..1.
    """
    count = jnp.maximum(jnp.diff(edges.rows.indptr), 1)

    def weigh(part, transposed):
        rows, columns = sparse.row_of_each(part), part.indices
        receiver, sender = (columns, rows) if transposed else (rows, columns)
        data = part.data / count[receiver]
        if ratios is not None:
            data = data * ((1.0 - share) + share * ratios[y[receiver], y[sender]])
        return part.replace(data=data)

    return sparse.Sparse(weigh(edges.rows, False), weigh(edges.columns, True))


def _densities(domain: Domain, y: Array, classes: int) -> Array:
    rows = domain.channels["edges"].p.rows
    stored = jnp.arange(rows.data.shape[0]) < rows.indptr[-1]
    weight = jnp.where(stored, rows.data, 0.0)
    y = jnp.where(domain.mask, y, -1)
    return edge_class_probs(y, rows.indices, sparse.row_of_each(rows), weight, classes=classes)


@functools.lru_cache(maxsize=16)
def make(network: StruRW, start: int = 20, every: int = 20) -> Method:
    """StruRW; needs the channel "edges". R is renewed from step `start` on, `every` so many steps.

    `hyper` has lr, weight_decay, dropout, share (lambda), weight (of the alignment, for "adv" and "mmd")
    `[]`.
    """

    def plain(domain):
        return domain.x, neighbour_mean(domain.channels["edges"].p, None, None, 0.0)

    def weighted(domain, ratios, share):
        return domain.x, neighbour_mean(domain.channels["edges"].p, domain.y, ratios, share)

    def init(key, source, target):
        params = network.init(key, plain(source), plain(target))
        ratios = jnp.ones((network.classes, network.classes))
        return StruState(Learner(params, _adam.init(params)), ratios)

    def classify(params, domain):
        return network.apply(params, *plain(domain), method="classify")

    def renew(params, source, target):
        guessed = jnp.argmax(classify(params, target), axis=-1)
        p_s = _densities(source, source.y, network.classes)
        return edge_ratios(p_s, _densities(target, guessed, network.classes))

    def step(state, source, target, labelled, hyper, key, progress):
        due = (progress.step >= start) & (progress.step % every == 0)
        ratios = jax.lax.cond(due, lambda: renew(state.learner.params, source, target), lambda: state.ratios)
        pair = weighted(source, ratios, hyper["share"])

        def loss(params):
            reversal = losses.reversal_factor(progress.share)
            h_s, h_t, logits, domains = network.apply(
                params, pair, plain(target), reversal, hyper["dropout"], key
            )
            parts = {"source_loss": losses.cross_entropy(logits, source.y, source.mask & labelled)}
            total = parts["source_loss"]
            if network.mode == "mmd":
                parts["domain_loss"] = losses.mmd_multi_rbf(h_s, h_t, source.mask, target.mask)
            if domains is not None:
                zeros, ones = (jnp.full(len(h), i, jnp.int32) for i, h in enumerate((h_s, h_t)))
                parts["domain_loss"] = losses.cross_entropy(domains[0], zeros, source.mask)
                parts["domain_loss"] += losses.cross_entropy(domains[1], ones, target.mask)
            total += hyper["weight"] * parts.get("domain_loss", 0.0)
            return total, parts | {"loss": total}

        gradient, metrics = jax.grad(loss, has_aux=True)(state.learner.params)
        learner = adam(state.learner, gradient, lr=hyper["lr"], weight_decay=hyper["weight_decay"])
        return StruState(learner, ratios), metrics

    return Method(init, step, lambda state, domain: classify(state.learner.params, domain))
