"""A pair of small graphs, and domains made of them."""

import jax
import numpy as np
import scipy.sparse

from graphs.gaa import domains
from graphs.gaa.data import RawGraph
from graphs.gaa.graph import symmetrize

CLASSES, WIDTH = 3, 5


def raw(seed, n):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % CLASSES)
    x = rng.random((n, WIDTH)) * (rng.random((n, WIDTH)) < 0.5)
    x[np.arange(n), y] += 1.0
    edges = symmetrize(rng.integers(0, n, (2, 2 * n)), n)
    return RawGraph(f"g{seed}", edges, scipy.sparse.csr_array(x), y)


def permuted(graph, order):
    """The graph whose node i is node order[i] of `graph`."""
    place = np.argsort(order)
    return RawGraph(graph.name, place[graph.edges].astype(np.int32), graph.x[order], graph.y[order])


def pair(*graphs, names=("topology", "features", "ppmi", "edges")):
    graphs = graphs or (raw(0, 12), raw(1, 9))
    options = {"knn": {"k": 3}, "key": jax.random.key(0), "walks": 5, "walk_length": 3}
    return domains.pad_all([domains.views(graph, names, **options) for graph in graphs])
