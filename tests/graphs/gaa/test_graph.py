"""Graphs: what is refused, both directions, padding, and the normalised propagation."""

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest
import scipy.sparse

from core.errors import UserError
from graphs.gaa import graph, sparse

EDGES = np.array([[0, 1, 1, 3], [1, 2, 2, 3]])


@pytest.fixture(scope="module")
def small():
    x = np.arange(12.0).reshape(4, 3)
    return graph.make(EDGES, x, np.array([0, 1, 1, 0]))


def test_both_directions_once():
    expected = [[0, 1], [1, 0], [1, 2], [2, 1], [3, 3]]
    assert graph.symmetrize(EDGES, 4).T.tolist() == expected
    assert graph.symmetrize(EDGES, 4, keep_self_loops=False).T.tolist() == expected[:-1]
    assert graph.symmetrize(np.zeros((2, 0), int), 4).shape == (2, 0)


def test_normalisation(golden, close):
    d = golden("gcn")
    given = d["gcn_edge_index"]
    s, r, w = graph.gcn_norm(*given, 9, jnp.ones(given.shape[1], d["gcn_x"].dtype))
    loop = np.zeros(s.shape[0], bool)
    loop[: given.shape[1]] = given[0] == given[1]
    assert not w[loop].any()
    np.testing.assert_array_equal(np.stack([s, r])[:, ~loop], d["norm_edge_index"])
    close(w[~loop], d["norm_weight"])


def test_convolution_and_propagation(golden, close):
    d = golden("gcn")
    senders, receivers, weight = graph.gcn_norm(*d["gcn_edge_index"], 9, jnp.ones(22, d["gcn_x"].dtype))
    p = sparse.from_coo(receivers, senders, weight, shape=(9, 9))
    hidden = d["gcn_x"] @ d["gcn_w"]
    close(sparse.matmul(p, hidden) + d["gcn_b"], d["gcn_y"])
    for k in range(11):
        if f"prop_y_{k}" in d:
            close(hidden + d["gcn_b"], d[f"prop_y_{k}"], double=1e-6 if k else 1e-9)
        hidden = sparse.matmul(p, hidden)


def test_weighted_loops_keep_the_last_weight_and_the_degree_counts_at_either_end():
    edges, weight = jnp.array([[0, 1, 1], [1, 1, 1]]), jnp.array([2.0, 5.0, 3.0])
    _, _, w = graph.gcn_norm(*edges, 3, weight)
    # Node 1 receives 2 and its loop of 3; nodes 0 and 2 their own loops of 1.
    np.testing.assert_allclose(w, [2 / np.sqrt(5), 0, 0, 1, 3 / 5, 1], rtol=1e-6)
    _, _, w = graph.gcn_norm(*edges, 3, weight, degree_at="sender")
    np.testing.assert_allclose(w, [2 / 3, 0, 0, 1 / 3, 1, 1], rtol=1e-6)


def test_without_edges_nothing_propagates():
    empty = graph.make(np.zeros((2, 0), int), np.ones((4, 1)))
    np.testing.assert_allclose(sparse.matmul(graph.propagation(empty), jnp.eye(4)), np.eye(4))


def test_a_graph_is_a_graphs_tuple(small):
    assert isinstance(small, jraph.GraphsTuple)
    assert small.n_node.tolist() == [4] and small.n_edge.tolist() == [4]
    assert graph.node_mask(small).all() and small.nodes["y"].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array])
def test_padding_leaves_the_real_nodes_as_they_are(form):
    x = np.arange(12.0).reshape(4, 3)
    whole = graph.make(EDGES, form(x))
    padded = graph.pad(whole, nodes=6, edges=9)
    assert graph.node_mask(padded).tolist() == [True] * 4 + [False] * 2
    eye = np.eye(6)[:, :4]
    p = sparse.matmul(graph.propagation(padded), jnp.asarray(eye, jnp.float32))
    np.testing.assert_allclose(p[:4], sparse.matmul(graph.propagation(whole), jnp.eye(4)), rtol=1e-6)
    attributes = padded.nodes["x"]
    if isinstance(attributes, sparse.Sparse):
        attributes = sparse.matmul(attributes, jnp.eye(3))
    np.testing.assert_array_equal(attributes, np.pad(x, ((0, 2), (0, 0))))


def test_what_does_not_fit_is_said(small):
    with pytest.raises(UserError, match=r"4 nodes and 4 edges does not fit into nodes=4 \(> N\), edges=9"):
        graph.pad(small, nodes=4, edges=9)


def test_propagation_compiles_once_for_equal_sizes(small):
    compiled = jax.jit(graph.propagation)
    compiled(small)
    compiled(small._replace(senders=small.receivers))
    assert compiled._cache_size() == 1


NAN = np.ones((4, 3))
NAN[2, 1] = np.nan
REFUSED = {
    "a node too high": (
        (np.array([[0], [4]]), np.ones((4, 3))),
        r"edge \(0,4\) refers to node 4 but the graph has 4 nodes; ids are 0-based",
    ),
    "a negative node": ((np.array([[-1], [2]]), np.ones((4, 3))), "refers to node -1"),
    "edges of rows": (
        (EDGES.T, np.ones((4, 3))),
        r"edges are integers \[2, E\], not int64 of shape \(4, 2\)",
    ),
    "NaN": ((EDGES, NAN), "attribute 1 of node 2 is nan: attributes must be finite"),
    "sparse NaN": ((EDGES, scipy.sparse.csr_array(NAN)), "attribute 1 of node 2 is nan"),
    "labels": ((EDGES, np.ones((4, 3)), np.zeros(3, int)), r"4 nodes .* labels have shape \(3,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_graph_is_refused(case):
    arguments, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        graph.make(*arguments)
    if case == "labels":
        with pytest.raises(UserError, match=r"4 edges, but the weights have shape \(2,\)"):
            graph.make(EDGES, np.ones((4, 3)), weight=np.ones(2))
