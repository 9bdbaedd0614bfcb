"""Positive pointwise mutual information between nodes that random walks visit (UDAGCN's global view)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from graphs.gaa.graph import symmetrize

__all__ = ["normalised_ppmi", "ppmi_from_counts", "random_walk_counts", "walk"]

Array = jax.Array


def random_walk_counts(
    key: Array, edges: np.ndarray, n: int, *, walks: int = 40, length: int = 10
) -> scipy.sparse.csr_array:
    """How often walks from node i visit node j, `[N, N]`; the start is not counted.

    Args:
      key: typed key.
      edges: int `[2, E]`; walks go both ways along each, and duplicates count once.
      walks: from each node, each of a random length in 1..`length`.
    """
    edges = symmetrize(edges, n)
    indptr = np.searchsorted(edges[0], np.arange(n + 1)).astype(np.int32)
    visited = np.asarray(walk(key, jnp.asarray(indptr), jnp.asarray(edges[1]), walks=walks, length=length))
    start = np.broadcast_to(np.arange(n)[:, None, None], visited.shape)
    seen = visited >= 0
    pairs = (np.ones(seen.sum()), (start[seen], visited[seen]))
    return scipy.sparse.csr_array(scipy.sparse.coo_array(pairs, shape=(n, n)))


@functools.partial(jax.jit, static_argnames=("walks", "length"))
def walk(key: Array, indptr: Array, neighbours: Array, *, walks: int, length: int) -> Array:
    """Nodes visited by `walks` uniform walks from every node: `[N, walks, length]`, -1 beyond a walk's end.

    Args:
      indptr: `[N + 1]`, neighbours: `[E]`: compressed rows of the graph. A node without any ends the walk.
    """
    n = indptr.shape[0] - 1
    length_key, step_key = jax.random.split(key)
    lengths = jax.random.randint(length_key, (n, walks), 1, length + 1)
    degree = jnp.diff(indptr)

    def step(node, inputs):
        key, t = inputs
        choice = jax.random.randint(key, node.shape, 0, jnp.maximum(degree[node], 1))
        following = neighbours[jnp.minimum(indptr[node] + choice, neighbours.shape[0] - 1)]
        moves = (degree[node] > 0) & (t < lengths)
        return jnp.where(moves, following, node), jnp.where(moves, following, -1)

    start = jnp.broadcast_to(jnp.arange(n, dtype=neighbours.dtype)[:, None], (n, walks))
    if neighbours.shape[0] == 0:
        return jnp.full((n, walks, length), -1, neighbours.dtype)
    _, visited = jax.lax.scan(step, start, (jax.random.split(step_key, length), jnp.arange(length)))
    return jnp.moveaxis(visited, 0, -1)


def ppmi_from_counts(counts: Any, length: int) -> scipy.sparse.csr_array:
    """max(log(p_ij / sum_i p_ij * n_visited / length), 0) with p the counts `[N, N]`, rows scaled to 1.

    Entries that counts store stay stored, also where the value is 0; `n_visited` nodes were ever visited.
    """
    counts = scipy.sparse.csr_array(counts, dtype=np.float64)
    counts.eliminate_zeros()
    total = counts.sum(axis=1)
    rows, columns = counts.nonzero()
    p = counts.data / total[rows]
    by_column = np.bincount(columns, weights=p, minlength=counts.shape[1])
    visited = np.count_nonzero(by_column)
    values = np.maximum(np.log(p / by_column[columns] * visited / length), 0)
    return scipy.sparse.csr_array((values, counts.indices, counts.indptr), shape=counts.shape)


def normalised_ppmi(ppmi: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """D^-1/2 (PPMI + I') D^-1/2 `[N, N]`, entry (i, j) = edge i -> j, D the row sums, 1/sqrt(0) = 0.

    I' has a loop of weight 1 at nodes that never visited themselves; a stored self visit of value 0 stays.
    """
    n = ppmi.shape[0]
    rows, columns = np.repeat(np.arange(n), np.diff(ppmi.indptr)), ppmi.indices
    lonely = np.setdiff1d(np.arange(n), rows[rows == columns])
    loops = scipy.sparse.coo_array((np.ones(len(lonely)), (lonely, lonely)), shape=(n, n))
    whole = scipy.sparse.csr_array(ppmi + loops)
    degree = whole.sum(axis=1)
    scale = scipy.sparse.diags_array(np.where(degree > 0, 1 / np.sqrt(np.where(degree > 0, degree, 1)), 0))
    return scipy.sparse.csr_array(scale @ whole @ scale)
