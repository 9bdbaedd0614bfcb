"""Loaders: every layout on small files, the embedded airports, and what is wrong with a folder."""

import json

import numpy as np
import pytest
import scipy.io
import scipy.sparse

from core.errors import UserError
from graphs.gaa import data

N, F = 6, 5
UPPER = np.array([[0, 1], [1, 2], [3, 4], [5, 5]])
X = np.random.default_rng(0).integers(0, 2, (N, F)).astype(float)
GROUP = np.eye(3, dtype=int)[[0, 1, 2, 0, 1, 2]]
GROUP[4] = [0, 1, 1]  # two labels: the first counts
Y = np.argmax(GROUP, axis=1)


@pytest.fixture(autouse=True)
def small_families(monkeypatch):
    small = {"acmv9": N, "blog1": N, "de": N, "usa": N, "brazil": 131, "europe": 399}
    for name, nodes in (("citation", "acmv9"), ("blog", "blog1"), ("twitch", "de")):
        changed = data.FAMILIES[name]._replace(nodes={nodes: small[nodes]}, features=F, classes=3)
        monkeypatch.setitem(data.FAMILIES, name, changed)


def write(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def lines(rows, separator=","):
    return "".join(separator.join(map(str, row)) + "\n" for row in rows)


def mat(folder, name):
    network = np.zeros((N, N))
    network[UPPER[:, 0], UPPER[:, 1]] = 1
    parts = {"network": scipy.sparse.csc_matrix(network), "attrb": X, "group": GROUP}
    scipy.io.savemat(folder / name, parts)


def texts(folder):
    write(folder / "ACMv9" / "raw", "ACMv9_docs.txt", lines(X))
    write(folder / "ACMv9" / "raw", "ACMv9_edgelist.txt", lines(UPPER))
    write(folder / "ACMv9" / "raw", "ACMv9_labels.txt", lines(Y[:, None]))


def npz(folder):
    x = scipy.sparse.csr_array(X)
    parts = {"x_indptr": x.indptr, "x_indices": x.indices, "x_data": x.data, "x_shape": x.shape}
    np.savez(folder / "data_citation_acmv9.npz", edges_upper=UPPER, group=GROUP, **parts)


def is_the_graph(graph):
    assert graph.edges.T.tolist() == [[0, 1], [1, 0], [1, 2], [2, 1], [3, 4], [4, 3], [5, 5]]
    np.testing.assert_array_equal(graph.x.toarray(), X)
    assert graph.y.tolist() == Y.tolist()


@pytest.mark.parametrize(
    "put", [lambda folder: mat(folder, "acmv9.mat"), texts, npz], ids=["mat", "texts", "npz"]
)
def test_citation_layouts(tmp_path, put):
    put(tmp_path)
    is_the_graph(data.load("citation", "acmv9", tmp_path))


def test_blog(tmp_path):
    mat(tmp_path, "Blog1.mat")
    is_the_graph(data.load("blog", "blog1", tmp_path))


def test_twitch_drops_repeated_rows_and_features_of_nodes_that_are_not_there(tmp_path):
    rows = [f"7,1,{Y[i] == 1},9,0,{i}" for i in (3, 1, 2, 0, 4, 5, 5)]
    write(tmp_path, "musae_DE_target.csv", "id,days,mature,views,partner,new_id\n" + "\n".join(rows) + "\n")
    words = {str(i): [int(j) for j in np.flatnonzero(X[i])] for i in range(N)} | {"6": [0]}
    words["0"] = words["0"] * 2
    write(tmp_path, "musae_DE_features.json", json.dumps(words))
    write(tmp_path, "musae_DE_edges.csv", "from,to\n" + lines(UPPER))
    graph = data.load("twitch", "de", tmp_path)
    np.testing.assert_array_equal(graph.x.toarray(), X)
    assert graph.y.tolist() == (Y == 1).astype(int).tolist()
    assert data.load("twitch", "de", tmp_path, undirected=False).edges.T.tolist() == UPPER.tolist()


def test_airport_texts(tmp_path, monkeypatch):
    monkeypatch.setitem(data.FAMILIES["airport"].nodes, "usa", N)
    write(tmp_path, "USA_edgelist.txt", lines(UPPER))
    write(tmp_path, "USA_labels.txt", lines(Y[:, None]))
    graph = data.load("airport", "usa", tmp_path, width=3)
    np.testing.assert_array_equal(graph.x.toarray(), np.eye(3)[[1, 2, 1, 1, 1, 1]])
    other = tmp_path / "struc2vec"
    ids = np.array([50, 10, 40, 30, 20, 60])
    write(other, "labels-usa-airports.txt", "node label\n" + lines(np.stack([ids, Y], 1), " "))
    write(other, "usa-airports.edgelist", lines(ids[UPPER], " "))
    again = data.load("airport", "usa", other, width=3)
    np.testing.assert_array_equal(again.edges, graph.edges)
    assert again.y.tolist() == Y.tolist()
    write(other, "usa-airports.edgelist", "10 70\n")
    with pytest.raises(UserError, match="the edge list names node 70, which has no label"):
        data.load("airport", "usa", other)


@pytest.mark.parametrize(("name", "entries", "degree"), [("brazil", 2077, 80), ("europe", 11988, 202)])
def test_embedded_airports(name, entries, degree):
    graph = data.load("airport", name)
    assert graph.edges.shape[1] == entries and graph.x.shape[1] == 241 and graph.x.sum() == len(graph.y)
    assert graph.x.indices.max() == degree and set(graph.y.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_of_ones_own(tmp_path, sparse):
    x = scipy.sparse.csr_array(X)
    parts = {"x_indptr": x.indptr, "x_indices": x.indices, "x_data": x.data, "x_shape": x.shape}
    np.savez(tmp_path / "mine.npz", edges=UPPER.T, y=Y, **(parts if sparse else {"x": X}))
    is_the_graph(data.load("other", "mine", tmp_path))


def broken_mat(folder):
    (folder / "acmv9.mat").write_bytes(b"nothing")


def missing_key(folder):
    scipy.io.savemat(folder / "acmv9.mat", {"network": np.eye(N)})


def short(folder):
    texts(folder)
    write(folder / "ACMv9" / "raw", "ACMv9_labels.txt", lines(Y[:4, None]))
    write(folder / "ACMv9" / "raw", "ACMv9_edgelist.txt", "0,1\n")


def far_edge(folder):
    texts(folder)
    write(folder / "ACMv9" / "raw", "ACMv9_edgelist.txt", "0,6\n")


def no_edges(folder):
    np.savez(folder / "mine.npz", edges=np.zeros((2, 0), int), y=Y, x=X)


def no_nodes(folder):
    np.savez(folder / "mine.npz", edges=np.zeros((2, 0), int), y=Y[:0], x=X[:0])


REFUSED = {
    "missing": (lambda folder: None, ("citation", "acmv9"), r"acmv9_docs\.txt \(or acmv9\.mat, .*PyGDA"),
    "broken": (broken_mat, ("citation", "acmv9"), r"acmv9\.mat can not be read"),
    "key": (missing_key, ("citation", "acmv9"), "has no attrb, group: it needs network, attrb and group"),
    "short": (short, ("citation", "acmv9"), "has 4 labels, but attributes of 6 nodes"),
    "edge": (far_edge, ("citation", "acmv9"), r"edge \(0,6\) refers to node 6 but the graph has 6 nodes"),
    "name": (lambda folder: None, ("citation", "acmv8"), "no graph 'acmv8'; did you mean 'acmv9'"),
    "no edges": (no_edges, ("other", "mine"), "graph mine has 6 nodes and 0 edges"),
    "no nodes": (no_nodes, ("other", "mine"), "graph mine has 0 nodes"),
    "own": (lambda folder: np.savez(folder / "mine.npz", y=Y), ("other", "mine"), r"no edges, x \(or x_data"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(tmp_path, case):
    put, graph, message = REFUSED[case]
    put(tmp_path)
    with pytest.raises(UserError, match=message):
        data.load(*graph, tmp_path)


def test_a_cut_airport_a_label_and_a_degree_too_high(tmp_path):
    write(tmp_path, "usa_edgelist.txt", lines(UPPER))
    write(tmp_path, "usa_labels.txt", lines(Y[:, None]))
    with pytest.raises(UserError, match="usa has 6 nodes, but the benchmark's has 1190: is a file cut short"):
        data.load("airport", "usa", tmp_path)
    with pytest.raises(UserError, match=r"node 1 has degree 2, but one-hot degrees have width 2 \(0\.\.1\)"):
        data.load("airport", "usa", tmp_path, width=2)


def test_folders_are_needed_and_must_be_there(tmp_path):
    with pytest.raises(UserError, match=r"citation graphs are not embedded: .*data_dir"):
        data.load("citation", "acmv9")
    with pytest.raises(UserError, match="nowhere is not a folder"):
        data.load("citation", "acmv9", tmp_path / "nowhere")
