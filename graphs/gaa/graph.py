"""Graphs as `jraph.GraphsTuple`: built and checked on the host, padded, normalised for propagation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import scipy.sparse

from core.errors import UserError
from graphs.gaa import sparse
from graphs.gaa.sparse import Sparse

__all__ = ["check_edges", "check_finite", "gcn_norm", "make", "node_mask", "pad", "propagation", "symmetrize"]

Array = jax.Array


def symmetrize(edges: np.ndarray, n: int, *, keep_self_loops: bool = True) -> np.ndarray:
    """Both directions of every edge, each once, in lexicographic order: `[2, E]` -> `[2, E']`, on the host.

    Raises:
      UserError: an edge refers to a node that is not in 0..n-1.
    """
    edges = check_edges(edges, n)
    if not keep_self_loops:
        edges = edges[:, edges[0] != edges[1]]
    keys = np.unique(np.concatenate([edges[0] * n + edges[1], edges[1] * n + edges[0]]))
    return np.stack([keys // n, keys % n]).astype(np.int32)


def check_edges(edges: np.ndarray, n: int) -> np.ndarray:
    """The edges `[2, E]` as int64; UserError for another shape or a node outside 0..n-1."""
    edges = np.asarray(edges)
    if (
        edges.ndim != 2
        or edges.shape[0] != 2
        or not (edges.size == 0 or np.issubdtype(edges.dtype, np.integer))
    ):
        raise UserError(f"edges are integers [2, E], not {edges.dtype} of shape {edges.shape}")
    outside = (edges < 0) | (edges >= n)
    if outside.any():
        u, v = edges[:, outside.any(axis=0)][:, 0].tolist()
        node = v if not 0 <= v < n else u
        raise UserError(f"edge ({u},{v}) refers to node {node} but the graph has {n} nodes; ids are 0-based")
    return edges.astype(np.int64)


def check_finite(x: Any) -> None:
    """UserError names the first attribute of `x` `[N, F]`, dense or scipy.sparse, that is not finite."""
    values = x.data if scipy.sparse.issparse(x) else np.asarray(x)
    if not np.isfinite(values).all():
        coo = scipy.sparse.coo_array(x)
        first = np.flatnonzero(~np.isfinite(coo.data))[0]
        row, column = coo.row[first], coo.col[first]
        raise UserError(f"attribute {column} of node {row} is {coo.data[first]}: attributes must be finite")


def make(
    edges: np.ndarray, x: Any, y: np.ndarray | None = None, *, weight: np.ndarray | None = None
) -> jraph.GraphsTuple:
    """A graph of `nodes={"x": attributes, "y": labels}`; edge (u, v) carries a message u -> v.

    Args:
      edges: int `[2, E]`, as they are: see `symmetrize`. weight: float `[E]`, or None for 1.
      x: attributes `[N, F]`: dense, or any scipy.sparse matrix, which becomes `Sparse`.
      y: labels `[N]`, 0..C-1, or None (all -1).

    Raises:
      UserError: an edge to a node that is not there, an attribute that is not finite, lengths that differ.
    """
    n = x.shape[0]
    edges = check_edges(edges, n)
    check_finite(x)
    y = np.full(n, -1) if y is None else np.asarray(y)
    if y.shape != (n,):
        raise UserError(f"{n} nodes have attributes, but the labels have shape {y.shape}")
    weight = np.ones(edges.shape[1]) if weight is None else np.asarray(weight)
    if weight.shape != edges.shape[1:]:
        raise UserError(f"there are {edges.shape[1]} edges, but the weights have shape {weight.shape}")
    attributes = sparse.from_scipy(x) if scipy.sparse.issparse(x) else jnp.asarray(x, jnp.float32)
    return jraph.GraphsTuple(
        nodes={"x": attributes, "y": jnp.asarray(y, jnp.int32)},
        edges=jnp.asarray(weight, jnp.float32),
        senders=jnp.asarray(edges[0], jnp.int32),
        receivers=jnp.asarray(edges[1], jnp.int32),
        globals=None,
        n_node=jnp.asarray([n], jnp.int32),
        n_edge=jnp.asarray([edges.shape[1]], jnp.int32),
    )


def node_mask(graph: jraph.GraphsTuple) -> Array:
    """`[N]` bool: nodes that are not padding. A graph that was never padded has one entry in `n_node`."""
    n = graph.nodes["y"].shape[0]
    real = jnp.sum(graph.n_node[:-1]) if graph.n_node.shape[0] > 1 else n
    return jnp.arange(n) < real


def pad(graph: jraph.GraphsTuple, *, nodes: int, edges: int, entries: int | None = None) -> jraph.GraphsTuple:
    """The graph padded, as jraph does it, by one graph of spare nodes: to `nodes` > N, `edges` >= E.

    Args:
      entries: how many stored attributes there shall be, where the attributes are `Sparse`.

    Raises:
      UserError: what is there does not fit.
    """
    n, e = graph.nodes["y"].shape[0], graph.senders.shape[0]
    if nodes <= n or edges < e:
        raise UserError(
            f"a graph of {n} nodes and {e} edges does not fit into nodes={nodes} (> N), edges={edges}"
        )
    x = graph.nodes["x"]
    if not isinstance(x, Sparse):
        return jraph.pad_with_graphs(graph, nodes, edges, 2)
    bare = jraph.pad_with_graphs(graph._replace(nodes={"y": graph.nodes["y"]}), nodes, edges, 2)
    return bare._replace(nodes=bare.nodes | {"x": sparse.pad(x, rows=nodes, entries=entries)})


def gcn_norm(
    senders: Array, receivers: Array, n: int, weight: Array | None = None, *, degree_at: str = "receiver"
) -> tuple[Array, Array, Array]:
    """D^-1/2 (A + I) D^-1/2 with *remaining* self loops (Kipf & Welling, 2017): entries of P(A).

    All loops of one node collapse into one, of weight 1 or, with `weight`, of the last one given; a node
    without a loop gets one of weight 1. Other duplicate edges add up. 1/sqrt(0) = 0.

    Args:
      senders, receivers: int `[E]`. weight: `[E]` or None for 1.
      n: number of nodes, static.
      degree_at: where D counts: "receiver", or "sender" (UDAGCN's convolution).

    Returns:
      (senders, receivers, weights) `[E + n]`: the edges, loops with weight 0, then the loops of all nodes.
    """
    weight = jnp.ones(senders.shape, jnp.float32) if weight is None else weight
    loop = senders == receivers
    position = jnp.where(loop, jnp.arange(senders.shape[0]), -1)
    last = jax.ops.segment_max(position, receivers, n)
    given = last >= 0  # also turns segment_max's lowest integer, for nodes without edges, into "none"
    loop_weight = jnp.where(given, weight[jnp.maximum(last, 0)] if senders.shape[0] else 1, 1)
    nodes = jnp.arange(n, dtype=senders.dtype)
    senders, receivers = jnp.concatenate([senders, nodes]), jnp.concatenate([receivers, nodes])
    weight = jnp.concatenate([jnp.where(loop, 0, weight), loop_weight.astype(weight.dtype)])
    degree = jax.ops.segment_sum(weight, receivers if degree_at == "receiver" else senders, n)
    scale = jnp.where(degree > 0, jax.lax.rsqrt(jnp.where(degree > 0, degree, 1)), 0)
    return senders, receivers, scale[senders] * weight * scale[receivers]


def propagation(graph: jraph.GraphsTuple, *, degree_at: str = "receiver") -> Sparse:
    """P(A) `[N, N]` of a graph with `edges` as weights `[E]`: row = receiver, column = sender."""
    n = graph.nodes["y"].shape[0]
    s, r, w = gcn_norm(graph.senders, graph.receivers, n, graph.edges, degree_at=degree_at)
    return sparse.from_coo(r, s, w, shape=(n, n))
