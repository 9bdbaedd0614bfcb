"""From graphs to Domains: the channels of a method on one set of nodes, padded alike for a whole family."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import scipy.sparse

from core.errors import UserError, nearest
from graphs.gaa import graph as graphs
from graphs.gaa import ppmi, sparse
from graphs.gaa.data import RawGraph
from graphs.gaa.knn import knn_graph
from graphs.gaa.networks import Channel, Domain

__all__ = ["CHANNELS", "Views", "check_pair", "from_graphs", "pad_all", "views"]

CHANNELS = ("topology", "features", "ppmi", "edges")


class Views(NamedTuple):
    """A graph on the host: attributes `x` `[N, F]`, labels `y` `[N]`, and matrices `[N, N]` by channel."""

    x: scipy.sparse.csr_array
    y: np.ndarray
    channels: dict[str, scipy.sparse.csr_array]


def views(
    raw: RawGraph,
    names: Sequence[str] = ("topology", "features"),
    *,
    knn: Mapping[str, Any],
    key: jax.Array,
    walks: int = 40,
    walk_length: int = 10,
    cache: Path | None = None,
) -> Views:
    """The matrices of the channels `names`: row = receiver, column = sender.

    Args:
      names: of CHANNELS: "topology" P(A), "features" P(Ahat), "ppmi", "edges" A as it is.
      knn: options of knn_graph, k among them.
      key: of the random walks. walks, walk_length: as random_walk_counts.
      cache: folder in which feature graphs are kept.

    Raises:
      UserError: an attribute that is not finite, an unknown channel, or what knn_graph refuses.
    """
    n = len(raw.y)
    made = {}
    graphs.check_finite(raw.x)
    for name in names:
        if name not in CHANNELS:
            raise UserError(f"no channel {name!r}{nearest(name, CHANNELS)}; one of {', '.join(CHANNELS)}")
        if name == "edges":
            made[name] = _matrix(raw.edges[1], raw.edges[0], np.ones(raw.edges.shape[1]), n)
        elif name == "ppmi":
            counts = ppmi.random_walk_counts(key, raw.edges, n, walks=walks, length=walk_length)
            normed = ppmi.normalised_ppmi(ppmi.ppmi_from_counts(counts, walk_length))
            made[name] = scipy.sparse.csr_array(normed.T)
        else:
            edges = raw.edges if name == "topology" else knn_graph(raw.x, cache=cache, **knn)
            senders, receivers, weight = map(np.asarray, graphs.gcn_norm(*map(jnp.asarray, edges), n))
            made[name] = _matrix(receivers, senders, weight, n)
        made[name].eliminate_zeros()
    return Views(scipy.sparse.csr_array(raw.x), raw.y, made)


def _matrix(rows, columns, data, n):
    return scipy.sparse.csr_array(scipy.sparse.coo_array((data, (rows, columns)), shape=(n, n)))


def pad_all(family: Sequence[Views]) -> list[Domain]:
    """Domains of at most two sizes, so that the tasks among them share few compiled programs.

    One size is that of the largest graph; graphs of less than half its nodes get that of the largest of them.
    A channel's P X is stored where, over all graphs, it has fewer entries than P and X together.
    """
    products = {
        name: [scipy.sparse.csr_array(one.channels[name] @ one.x) for one in family]
        for name in family[0].channels
        if name != "edges"
    }
    stored = {
        name: some
        for name, some in products.items()
        if sum(px.nnz for px in some) < sum(one.channels[name].nnz + one.x.nnz for one in family)
    }
    most = max(len(one.y) for one in family)
    small = [2 * len(one.y) < most for one in family]
    found: dict[int, Domain] = {}
    for kind in sorted(set(small)):
        members = [i for i, is_small in enumerate(small) if is_small == kind]
        px = {name: [some[i] for i in members] for name, some in stored.items()}
        found |= zip(members, _pad_alike([family[i] for i in members], px))
    return [found[i] for i in range(len(family))]


def _pad_alike(graphs, products):
    """Domains of the largest one's size; `products` has P X of all graphs by channel."""
    nodes = max(len(one.y) for one in graphs)

    def fit(matrices, width):
        size = max(matrix.nnz for matrix in matrices)
        for matrix in matrices:
            padded = matrix.copy()
            padded.resize((nodes, width))
            yield sparse.from_scipy(padded, size=size)

    features = graphs[0].x.shape[1]
    x = fit([one.x for one in graphs], features)
    found = [Domain(attributes, {}, *_padded_labels(one.y, nodes)) for one, attributes in zip(graphs, x)]
    for name in graphs[0].channels:
        p = fit([one.channels[name] for one in graphs], nodes)
        px = fit(products[name], features) if name in products else [None] * len(graphs)
        for domain, *parts in zip(found, p, px):
            domain.channels[name] = Channel(*parts)
    return found


def _padded_labels(y, nodes):
    padded = np.pad(np.asarray(y, np.int32), (0, nodes - len(y)), constant_values=-1)
    return jnp.asarray(padded), jnp.arange(nodes) < len(y)


def from_graphs(topology: jraph.GraphsTuple, **others: jraph.GraphsTuple) -> Domain:
    """A Domain of graphs that are already there, padded or not; all on the nodes of `topology`.

    Args:
      topology: as graph.make makes it.
      others: by channel name further graphs, such as features=; their nodes are not read.
    """
    channels = {
        name: Channel(graphs.propagation(one._replace(nodes=topology.nodes)))
        for name, one in {"topology": topology, **others}.items()
    }
    return Domain(topology.nodes["x"], channels, topology.nodes["y"], graphs.node_mask(topology))


def check_pair(source: RawGraph, target: RawGraph, *, classes: int) -> None:
    """Raises UserError for graphs that share no classifier; warns of a class that the source lacks.

    Args:
      classes: C; labels are 0..C-1.
    """
    if source.x.shape[1] != target.x.shape[1]:
        raise UserError(
            f"source {source.name} has {source.x.shape[1]} attributes, target {target.name} "
            f"{target.x.shape[1]}; GAA needs one attribute space"
        )
    for graph in (source, target):
        if len(graph.y) == 0:
            raise UserError(f"graph {graph.name} has no nodes")
        outside = (graph.y < 0) | (graph.y >= classes)
        if outside.any():
            node = int(np.argmax(outside))
            raise UserError(
                f"node {node} of {graph.name} has label {graph.y[node]}, outside 0..{classes - 1}"
            )
    absent = sorted(set(range(classes)) - set(source.y.tolist()))
    if absent:
        listed = ", ".join(map(str, absent))
        warnings.warn(
            f"no node of source {source.name} has class {listed}: it can not be learned", stacklevel=2
        )
