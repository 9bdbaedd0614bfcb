"""Sparse matrices times dense ones, with gradients that are again such products: never a scatter.

On CPU the product is a compiled kernel whose speed depends on the rows it reads, hardly on how many columns
they have; so a `vmap` over dense operands (seeds, hyper-parameters) becomes one product with wider rows.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental.sparse import BCSR

__all__ = ["Rows", "Sparse", "from_coo", "from_scipy", "matmul", "pad", "row_of_each"]

Array = jax.Array


class Rows(flax.struct.PyTreeNode):
    """Compressed rows of a matrix `[n, m]`: `data`, column `indices` `[E]`, `indptr` `[n + 1]`.

    Entries beyond `indptr[-1]` are padding; duplicates add up.
    """

    data: Array
    indices: Array
    indptr: Array


class Sparse(flax.struct.PyTreeNode):
    """A sparse matrix `[n, m]`: its `rows`, and its `columns`, the rows of the transpose."""

    rows: Rows
    columns: Rows

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.rows.indptr.shape[0] - 1, self.columns.indptr.shape[0] - 1

    @property
    def T(self) -> Sparse:
        """The transpose `[m, n]`, without any work."""
        return Sparse(self.columns, self.rows)


def from_scipy(matrix: Any, *, dtype: Any = np.float32, size: int | None = None) -> Sparse:
    """Sparse of any scipy.sparse matrix, made on the host; padded to `size` entries if given."""

    def compress(matrix):
        matrix = scipy.sparse.csr_array(matrix)
        spare = 0 if size is None else size - matrix.nnz
        if spare < 0:
            raise ValueError(f"size={size} is less than the {matrix.nnz} entries there are")
        data, indices = np.pad(matrix.data.astype(dtype), (0, spare)), np.pad(matrix.indices, (0, spare))
        return Rows(*map(jnp.asarray, (data, indices.astype(np.int32), matrix.indptr.astype(np.int32))))

    return Sparse(compress(matrix), compress(matrix.T))


def pad(a: Sparse, *, rows: int, entries: int | None = None) -> Sparse:
    """`a [n, m]` with rows of zeros below, `[rows, m]`, and padded to `entries` stored entries, if given."""
    spare_rows = rows - a.shape[0]
    spare = 0 if entries is None else entries - a.rows.data.shape[0]
    if spare_rows < 0 or spare < 0:
        raise ValueError(
            f"a sparse {a.shape} of {a.rows.data.shape[0]} entries does not fit {rows}, {entries}"
        )

    def longer(part):
        return part.replace(data=jnp.pad(part.data, (0, spare)), indices=jnp.pad(part.indices, (0, spare)))

    below = jnp.pad(a.rows.indptr, (0, spare_rows), mode="edge")
    return Sparse(longer(a.rows).replace(indptr=below), longer(a.columns))


def from_coo(row: Array, column: Array, data: Array, *, shape: tuple[int, int]) -> Sparse:
    """Sparse of entries `[E]`, in jax.numpy; entries of weight 0 serve as padding."""

    def compress(row, column, n):
        order = jnp.argsort(row, stable=True)
        indptr = jnp.searchsorted(row[order], jnp.arange(n + 1)).astype(jnp.int32)
        return Rows(data[order], column[order].astype(jnp.int32), indptr)

    return Sparse(compress(row, column, shape[0]), compress(column, row, shape[1]))


@jax.custom_vjp
def matmul(a: Sparse, x: Array) -> Array:
    """`a [n, m]` times `x [m, d]` -> `[n, d]`; differentiable in `x`, and in `a.rows.data`."""
    return _product(a.rows, x)


def _matmul_fwd(a, x):
    return matmul(a, x), (a, x)


def _matmul_bwd(residuals, g):
    a, x = residuals
    none = jax.tree.map(lambda leaf: _no_gradient(leaf), a)
    # What a's entries are worth is computed only where somebody asks: jit drops it otherwise.
    worth = jnp.sum(g[row_of_each(a.rows)] * x[a.rows.indices], axis=-1)
    stored = jnp.arange(worth.shape[0]) < a.rows.indptr[-1]
    worth = jnp.where(stored, worth, 0).astype(a.rows.data.dtype)
    return none.replace(rows=none.rows.replace(data=worth)), _product(a.columns, g)


def _no_gradient(leaf):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def row_of_each(rows: Rows) -> Array:
    """The row of every entry, `[E]`; of padding, the last row."""
    counts = jnp.diff(rows.indptr)
    return jnp.repeat(jnp.arange(counts.shape[0]), counts, total_repeat_length=rows.data.shape[0])


@jax.custom_batching.custom_vmap
def _product(rows, x):
    shape = rows.indptr.shape[0] - 1, x.shape[0]
    return BCSR((rows.data.astype(x.dtype), rows.indices, rows.indptr), shape=shape) @ x


@_product.def_vmap
def _product_batched(axis_size, in_batched, rows, x):
    rows_batched, x_batched = in_batched
    if not any(jax.tree.leaves(rows_batched)):
        wide = jnp.moveaxis(x, 0, -2).reshape(x.shape[1], -1)
        return jnp.moveaxis(_product(rows, wide).reshape(-1, axis_size, x.shape[-1]), 1, 0), True

    def whole(leaf, batched):
        return leaf if batched else jnp.broadcast_to(leaf, (axis_size, *leaf.shape))

    # Several matrices at once, on accelerators mostly: sums over entries, which any device can batch.
    return jax.vmap(_sums)(jax.tree.map(whole, rows, rows_batched), whole(x, x_batched)), True


def _sums(rows, x):
    terms = rows.data.astype(x.dtype)[:, None] * x[rows.indices]
    n = rows.indptr.shape[0] - 1
    return jax.ops.segment_sum(terms, row_of_each(rows), n, indices_are_sorted=True)
