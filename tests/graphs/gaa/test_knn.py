"""The feature graph: golden edges for dense and sparse input, ties, limits, the cache."""

import numpy as np
import pytest
import scipy.sparse

from core.errors import UserError
from graphs.gaa import knn
from graphs.gaa.knn import knn_graph
from tests.graphs.gaa.conftest import GOLDEN


@pytest.fixture(scope="module")
def cases():
    with np.load(GOLDEN / "knn.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parametrize("case", "abc")
@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array, scipy.sparse.coo_matrix])
def test_golden_edges(cases, case, form):
    x, k = form(cases[f"{case}_x"]), int(cases[f"{case}_k"])
    assert knn_graph(x, k, symmetric=False).T.tolist() == cases[f"{case}_dir"].tolist()
    assert knn_graph(x, k).T.tolist() == cases[f"{case}_sym"].tolist()


def test_small_blocks_and_sparse_products_give_the_same(cases, monkeypatch):
    expected = cases["b_sym"].tolist()
    monkeypatch.setattr(knn, "CELLS", 30)
    assert knn_graph(cases["b_x"], int(cases["b_k"])).T.tolist() == expected
    monkeypatch.setattr(knn, "DENSE", 2.0)
    assert knn_graph(cases["b_x"], int(cases["b_k"])).T.tolist() == expected


def test_rows_of_zeros_stay_alone_and_duplicates_are_neighbours():
    x = np.array([[1.0, 2.0], [0.0, 0.0], [2.0, 4.0], [-1.0, 0.5]])
    assert knn_graph(x, 2).T.tolist() == [[0, 2], [2, 0]]


def test_all_ties_up_to_a_degree():
    x = np.repeat(np.eye(2), [6, 3], axis=0)
    degree = lambda edges: np.bincount(edges[0], minlength=9).tolist()  # noqa: E731
    assert degree(knn_graph(x, 2, symmetric=False)) == [2] * 9
    assert degree(knn_graph(x, 2, symmetric=False, tie="all")) == [5] * 6 + [2] * 3
    assert degree(knn_graph(x, 2, symmetric=False, tie="all", max_degree=4)) == [4] * 6 + [2] * 3


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array])
def test_rbf_ranks_by_distance(form):
    x = np.array([[0.0], [1.0], [3.0], [6.0]])
    assert knn_graph(form(x), 1, metric="rbf", symmetric=False).T.tolist() == [[0, 1], [1, 0], [2, 1], [3, 2]]


def test_results_are_kept_by_content(tmp_path, monkeypatch):
    x = np.random.default_rng(0).random((8, 3))
    first = knn_graph(x, 2, cache=tmp_path)
    monkeypatch.setattr(knn, "_similar", None)  # nothing is searched again
    np.testing.assert_array_equal(knn_graph(x, 2, cache=tmp_path), first)
    with pytest.raises(TypeError):
        knn_graph(x + 1e-9, 2, cache=tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0: every node needs at least 1 neighbour"),
        ({"k": 4}, "k=4 needs at least 5 nodes, graph has 4"),
        ({"k": 1, "metric": "cosin"}, "metric='cosin'; did you mean 'cosine'"),
        ({"k": 1, "tie": "random"}, "tie='random'; one of index, all"),
    ],
)
def test_what_can_not_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        knn_graph(np.eye(4), **options)
