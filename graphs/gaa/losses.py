"""The terms of GAA's objective: alignment of the cross-view similarity, of embeddings, and of predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = [
    "balanced_domain_loss",
    "cross_entropy",
    "cross_view_moment",
    "cross_view_refine",
    "cross_view_xcorr",
    "entropy_loss",
    "grad_reverse",
    "mmd_multi_rbf",
    "moment_distance",
    "pseudo_label_loss",
    "reversal_factor",
    "unit",
    "xcorr_distance",
]

Array = jax.Array


def masked_mean(values: Array, mask: Array) -> Array:
    """Mean `[]` of `values [N]` where `mask [N]`; 0 if nothing is."""
    mask = mask.astype(values.dtype)
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1)


def unit(z: Array) -> Array:
    """z / sqrt(|z|^2 + 1e-8) by rows, `[..., d]`: the root keeps the gradient of a zero row finite."""
    return z * jax.lax.rsqrt(jnp.sum(jnp.square(z), axis=-1, keepdims=True) + 1e-8)


def cross_view_moment(z: Array, zf: Array, mask: Array) -> Array:
    """M = u(Z)^T u(Zf) / N `[d, d]` over the nodes `[N]` of `mask`: topology against attribute embedding."""
    rows = unit(z) * mask[:, None]
    return rows.T @ unit(zf) / jnp.maximum(jnp.sum(mask), 1)


def moment_distance(m_s: Array, m_t: Array) -> Array:
    """d |M_s - M_t|_F^2 `[]` of moments `[d, d]`: the biased MMD^2 of the pairs (topology, attribute
    embedding) under the product of their cosine kernels, times d."""
    return m_s.shape[0] * jnp.sum(jnp.square(m_s - m_t))


def cross_view_refine(z: Array, zf: Array, mask: Array) -> Array:
    """Rows R = S Zf / N `[N, d]` with S = u(Z) u(Zf)^T, in an order that never forms S `[N, N]`."""
    seen = mask[:, None].astype(zf.dtype)
    return unit(z) @ ((unit(zf) * seen).T @ zf / jnp.maximum(jnp.sum(seen), 1))


def cross_view_xcorr(z: Array, zf: Array, mask: Array) -> Array:
    """K = std(Z)^T std(Zf) / N `[d, d]`: correlation of the views' columns, scaled by sqrt(var + 1e-5)."""
    seen = mask[:, None].astype(z.dtype)
    count = jnp.maximum(jnp.sum(seen), 1)

    def standard(x):
        centred = (x - jnp.sum(x * seen, axis=0) / count) * seen
        return centred * jax.lax.rsqrt(jnp.sum(jnp.square(centred), axis=0) / count + 1e-5)

    return standard(z).T @ standard(zf) / count


def xcorr_distance(k_s: Array, k_t: Array) -> Array:
    """|K_s - K_t|_F^2 / d `[]` of correlations `[d, d]`."""
    return jnp.sum(jnp.square(k_s - k_t)) / k_s.shape[0]


@jax.custom_vjp
def grad_reverse(x: Array, factor: Array) -> Array:
    """`x [...]` itself, whose gradient is multiplied by -`factor []` (Ganin & Lempitsky, 2015)."""
    del factor
    return x


grad_reverse.defvjp(
    lambda x, factor: (x, factor), lambda factor, g: (-factor * g, jnp.zeros_like(jnp.asarray(factor)))
)


def reversal_factor(progress: Array) -> Array:
    """2 / (1 + exp(-10 p)) - 1 for progress p `[...]` = step / steps: 0 at first, then towards 1."""
    return 2.0 / (1.0 + jnp.exp(-10.0 * progress)) - 1.0


def balanced_domain_loss(logit_s: Array, logit_t: Array, mask_s: Array, mask_t: Array) -> Array:
    """Binary cross-entropy `[]` of one domain logit a node (source 0, target 1), both domains weighing half.

    Args:
      logit_s, logit_t: `[N_s]`, `[N_t]`. mask_s, mask_t: nodes that count.
    """
    source = masked_mean(jax.nn.softplus(logit_s), mask_s)
    return 0.5 * (source + masked_mean(jax.nn.softplus(-logit_t), mask_t))


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Mean cross-entropy `[]` of `logits [N, C]` with `labels [N]` over the nodes of `mask [N]`."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[:, None], axis=-1)
    return masked_mean(-picked[:, 0], mask)


def entropy_loss(logits: Array, mask: Array) -> Array:
    """Mean entropy `[]` of the predictions `softmax(logits [N, C])` over the nodes of `mask [N]`.

    Probabilities are clipped from below to 1e-9 inside the logarithm's product.
    """
    q = jnp.maximum(jax.nn.softmax(logits), 1e-9)
    return masked_mean(-jnp.sum(q * jnp.log(q), axis=-1), mask)


def pseudo_label_loss(logits: Array, mask: Array) -> Array:
    """Mean cross-entropy `[]` of `logits [N, C]` with their own argmax as labels."""
    return cross_entropy(logits, jnp.argmax(jax.lax.stop_gradient(logits), axis=-1), mask)


def mmd_multi_rbf(
    x: Array,
    y: Array,
    mask_x: Array | None = None,
    mask_y: Array | None = None,
    *,
    kernels: int = 5,
    multiplier: float = 2.0,
) -> Array:
    """MMD^2 `[]` of the rows of `x [n, d]` and `y [m, d]` under a sum of RBF kernels (Long et al., 2015).

    Bandwidths are (sum of squared distances + 1e-6) / (N^2 - N) / multiplier^(kernels // 2) * multiplier^i
    over the N joint rows, without a gradient. Rows outside `mask_x [n]`, `mask_y [m]` do not count.
    """
    masks = [
        jnp.ones(len(a), x.dtype) if m is None else m.astype(x.dtype) for a, m in ((x, mask_x), (y, mask_y))
    ]
    both, seen = jnp.concatenate([x, y]), jnp.concatenate(masks)
    square = jnp.sum(jnp.square(both), axis=-1)
    distance = jnp.maximum(square[:, None] + square[None] - 2.0 * both @ both.T, 0.0)
    n = jnp.sum(seen)
    total = jax.lax.stop_gradient(jnp.sum(distance * seen[:, None] * seen) + 1e-6)
    first = total / (n * n - n) / multiplier ** (kernels // 2)
    kernel = sum(jnp.exp(-distance / (first * multiplier**i)) for i in range(kernels))
    # Signed weights: +1/n_x for rows of x, -1/n_y for rows of y, so that one form gives all four means.
    weight = jnp.concatenate([masks[0] / jnp.sum(masks[0]), -masks[1] / jnp.sum(masks[1])])
    return weight @ kernel @ weight
