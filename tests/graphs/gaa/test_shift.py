"""The shift report: zero where nothing differs, numbers by hand, estimated spectra against exact ones."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from core.errors import UserError
from graphs.gaa import data, graph, shift
from graphs.gaa.data import RawGraph
from graphs.gaa.shift import shift_report
from tests.graphs.gaa.small import permuted, raw

K = 3


def report(source, target, **options):
    return shift_report(source, target, k=K, **options).numbers()


def dense(one):
    return np.asarray(one.x.todense())


@pytest.mark.parametrize("nodes", [2000, 10])
def test_a_graph_is_no_shift_from_itself(nodes):
    numbers = report(raw(0, 40), raw(0, 40), nodes=nodes)
    assert len(numbers) == 5 * 4 + 2 * 4
    np.testing.assert_allclose(list(numbers.values()), 0, atol=1e-12)


def test_the_order_of_nodes_does_not_matter():
    one, other = raw(0, 40), raw(1, 30)
    expected = report(one, other)
    found = report(permuted(one, np.random.default_rng(0).permutation(40)), other)
    assert found.keys() == expected.keys() and min(expected.values()) > 0
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=0, atol=1e-9)


def test_other_attributes_leave_the_topology_as_it_is():
    one = raw(0, 40)
    numbers = report(one, one._replace(x=scipy.sparse.csr_array(dense(one) + np.array([1.0, 0, 0, 0, 2]))))
    assert all((value == 0) == key.startswith("topology") for key, value in numbers.items())
    assert numbers["attributes/linear_mmd/X"] == pytest.approx(5.0)


def test_other_edges_leave_attributes_and_feature_graph_as_they_are():
    one = raw(0, 40)
    numbers = report(one, one._replace(edges=raw(5, 40).edges))
    same = [key for key, value in numbers.items() if abs(value) < 1e-12]
    assert same == [key for key in numbers if key.endswith("/X") or key.startswith("features")]


def test_linear_mmd_of_every_view_is_the_distance_of_the_means():
    pair, means = (raw(0, 12), raw(1, 9)), []
    for one in pair:
        n = len(one.y)
        senders, receivers, weight = graph.gcn_norm(*map(jnp.asarray, one.edges), n)
        p = np.zeros((n, n))
        np.add.at(p, (np.asarray(receivers), np.asarray(senders)), np.asarray(weight))
        means.append([view.mean(axis=0) for view in (dense(one), p @ dense(one), p @ p @ dense(one))])
    for nodes in (2000, 5):  # the sample does not touch it
        numbers = report(*pair, nodes=nodes)
        for view, s, t in zip(("X", "PX", "P2X"), *means):
            assert numbers[f"attributes/linear_mmd/{view}"] == pytest.approx(np.sum((s - t) ** 2), rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 2.0])
def test_rbf_mmd_and_shares_by_definition(share, monkeypatch):
    monkeypatch.setattr(shift, "DENSE", share)
    one, other = raw(0, 7), raw(1, 6)
    rows = [*dense(one), *dense(other)]
    sign = [1 / 7] * 7 + [-1 / 6] * 6
    square = lambda a, b: sum((a - b) ** 2)  # noqa: E731
    median = np.median([np.sqrt(square(a, b)) for a, b in itertools.combinations(rows, 2)])
    kernel = lambda a, b: np.exp(-square(a, b) / (2 * median**2))  # noqa: E731
    for name, inner in (("rbf", kernel), ("linear", lambda a, b: a @ b)):
        mmd = scatter = 0.0
        for (a, u), (b, v) in itertools.product(zip(rows, sign), repeat=2):
            mmd += u * v * inner(a, b)
            scatter -= abs(u * v) / 4 * inner(a, b)
        scatter += sum(abs(u) / 2 * inner(a, a) for a, u in zip(rows, sign))
        numbers = report(one, other)
        assert numbers[f"attributes/{name}_mmd/X"] == pytest.approx(mmd, rel=1e-9)
        assert numbers[f"attributes/{name}_share/X"] == pytest.approx(mmd / 4 / scatter, rel=1e-9)


def ring(n, x, chords=()):
    """Nodes in a ring, some of them joined across; the last is alone."""
    edges = np.array([*((i, (i + 1) % (n - 1)) for i in range(n - 1)), *chords]).T
    return RawGraph(f"ring{n}", edges, x, np.zeros(n, int))


def test_degrees_clustering_and_spectrum_of_known_graphs(monkeypatch):
    x = scipy.sparse.csr_array(np.random.default_rng(0).random((5, 2)))
    square, crossed = ring(5, x), ring(5, x, [(0, 2), (1, 3), (1, 1), (2, 0)])  # loop, duplicate: no matter
    for limit in (shift.WEDGES, 1):
        monkeypatch.setattr(shift, "WEDGES", limit)
        numbers = report(square, crossed, bins=31)  # 1 and 4/3 are on the grid
        assert numbers["topology/degree_w1"] == pytest.approx(4 / 5)
        assert numbers["topology/degree_w1_relative"] == pytest.approx(4 / 5 / 2)
        assert numbers["topology/clustering_w1"] == pytest.approx(4 / 5)
        # 0, 1, 1, 2 in a ring, 0, 4/3, 4/3, 4/3 with all chords, and 0 for the node alone.
        assert numbers["topology/spectrum_w1"] == pytest.approx(4 / 3 / 5)


def test_the_estimated_spectrum_is_the_exact_one():
    one, other = raw(0, 300), data.load("airport", "brazil")
    found = {nodes: shift_report(one, one, nodes=nodes) for nodes in (300, 299)}
    for channel in ("topology", "features"):
        exact, rough = (found[nodes].spectra[channel][0] for nodes in (300, 299))
        step = found[300].grid[1]
        np.testing.assert_allclose([exact.sum() * step, rough.sum() * step], 1)
        assert 0 < np.abs(np.cumsum(exact - rough)).sum() * step**2 < 0.02
    bare = other._replace(edges=np.zeros((2, 0), int))  # n < STEPS, and nothing to iterate on
    np.testing.assert_allclose(shift_report(bare, bare, nodes=20).spectra["topology"][:, 0] * step, 1)


def test_seeds_draw_nodes():
    first, again, other = (report(raw(0, 40), raw(1, 30), nodes=20, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first["attributes/rbf_mmd/X"] != other["attributes/rbf_mmd/X"]


@pytest.mark.parametrize("nodes", [2000, 4])
def test_no_edges_and_no_attributes_give_numbers(nodes):
    empty = RawGraph("empty", np.zeros((2, 0), int), scipy.sparse.csr_array((8, 5)), np.zeros(8, int))
    assert set(report(empty, empty, nodes=nodes).values()) == {0.0}
    numbers = report(empty, raw(0, 12), nodes=nodes)
    assert np.isfinite(list(numbers.values())).all()
    assert numbers["topology/degree_w1_relative"] == pytest.approx(2)


def test_airports_and_their_figure():
    usa, brazil = (data.load("airport", name) for name in ("usa", "brazil"))
    found = shift_report(usa, brazil)
    numbers = found.numbers()
    assert np.isfinite(list(numbers.values())).all()
    assert numbers["features/spectrum_w1"] > 5 * numbers["topology/spectrum_w1"]
    drawn = shift.figure(found)
    assert len(drawn.axes) == 3 and len(drawn.axes[2].patches) == 5 + 2 * 3
    drawn.canvas.draw()


def test_what_can_not_be_compared():
    one = raw(0, 12)
    with pytest.raises(UserError, match=r"g0 has 5 attributes.* g1 4;"):
        shift_report(one, raw(1, 12)._replace(x=one.x[:, :4]))
    with pytest.raises(UserError, match="k=12 needs at least 13 nodes"):
        shift_report(one, one, k=12)
    with pytest.raises(UserError, match="attribute 1 of node 2 is nan"):
        bad = dense(one)
        bad[2, 1] = np.nan
        shift_report(one, one._replace(x=scipy.sparse.csr_array(bad)))
