"""Benchmark graphs from the files people have: found, read, checked; nothing is ever downloaded."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.io
import scipy.sparse

from core.errors import UserError, nearest
from graphs.gaa.graph import check_edges, symmetrize

__all__ = ["FAMILIES", "Family", "RawGraph", "load", "one_hot_degrees"]

UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    NotImplementedError,
    zipfile.BadZipFile,
    scipy.io.matlab.MatReadError,
)
EMBEDDED = Path(__file__).with_name("airports.npz")


class RawGraph(NamedTuple):
    """A graph as read: `edges` int `[2, E]`, attributes `x` scipy.sparse `[N, F]`, labels `y` `[N]`."""

    name: str
    edges: np.ndarray
    x: Any
    y: np.ndarray


class Family(NamedTuple):
    """Graphs that share attributes and classes: what is known of them, to recognise a file that is cut short.

    Attributes:
      nodes: number of nodes by the graph's name.
      features, classes: F and C.
      where: where people get the files.
    """

    nodes: dict[str, int]
    features: int
    classes: int
    where: str


FAMILIES = {
    "airport": Family(
        {"brazil": 131, "europe": 399, "usa": 1190}, 241, 4, "github.com/leoribeiro/struc2vec, folder graph"
    ),
    "citation": Family(
        {"acmv9": 9360, "citationv1": 8935, "dblpv7": 5484},
        6775,
        5,
        "the releases of ASN, UDAGCN or PyGDA (folder datasets/citation)",
    ),
    "blog": Family(
        {"blog1": 2300, "blog2": 2896}, 8189, 6, "the release of ASN or PyGDA (folder datasets/blog)"
    ),
    "twitch": Family({"de": 9498, "en": 7126}, 3170, 2, "snap.stanford.edu/data/twitch-social-networks.html"),
}


def load(
    family: str, name: str, data_dir: str | Path | None = None, *, undirected: bool = True, width: int = 241
) -> RawGraph:
    """The graph `name` of a family, from the layout that is found in `data_dir`.

    Layouts, in any case, in `data_dir`, or below it in folders named FAMILY, NAME, raw:
      airport: `NAME_edgelist.txt` (u,v) and `NAME_labels.txt`; `NAME-airports.edgelist` and
        `labels-NAME-airports.txt` (header, any ids); `data_airport.npz`; without data_dir the embedded ones.
      citation, blog: `NAME.mat` (network, attrb, group); `NAME_docs.txt`, `NAME_edgelist.txt`,
        `NAME_labels.txt`; `data_FAMILY_NAME.npz` (edges_upper, x_*, group).
      twitch: `musae_NAME_edges.csv`, `musae_NAME_features.json`, `musae_NAME_target.csv`.
      any other family: `NAME.npz` with edges `[2, E]`, y `[N]`, and x `[N, F]` or x_data, x_indices,
        x_indptr, x_shape.

    Args:
      undirected: both directions of every edge, each once; loops stay, once.
      width: of the one-hot degrees that airports have for attributes.

    Raises:
      UserError: a file that is missing (with its full path and where people get it), can not be read, or does
        not hold what the graph is known to have.
    """
    folder = None if data_dir is None else Path(data_dir)
    if family in FAMILIES and name not in FAMILIES[family].nodes:
        known = FAMILIES[family].nodes
        raise UserError(f"family {family} has no graph {name!r}{nearest(name, known)} ({', '.join(known)})")
    if folder is None and family != "airport":
        raise UserError(f"{family} graphs are not embedded: name the folder of their files (data_dir)")
    if folder is not None and not folder.is_dir():
        raise UserError(f"data_dir {folder.resolve()} is not a folder")
    edges, x, y = _READERS.get(family, _own)(_Files(folder, family, name))
    n = len(y)
    edges = symmetrize(edges, n) if undirected else check_edges(edges, n).astype(np.int32)
    x = one_hot_degrees(edges, n, width=width) if x is None else scipy.sparse.csr_array(x)
    graph = RawGraph(name, edges, x, np.asarray(y, np.int32))
    _check(graph, family, folder)
    return graph


def one_hot_degrees(edges: np.ndarray, n: int, *, width: int) -> scipy.sparse.csr_array:
    """One-hot degree `[n, width]`: the row sum of the adjacency, in which a loop counts once.

    Raises:
      UserError: a degree that `width` has no column for.
    """
    degree = np.bincount(edges[0], minlength=n)
    if n and degree.max() >= width:
        node = int(np.argmax(degree))
        raise UserError(
            f"node {node} has degree {degree[node]}, but one-hot degrees have width {width} (0..{width - 1})"
        )
    return scipy.sparse.csr_array((np.ones(n), (np.arange(n), degree)), shape=(n, width))


def _check(graph: RawGraph, family: str, folder: Path | None) -> None:
    n, place = len(graph.y), EMBEDDED if folder is None else folder
    if n == 0 or graph.edges.shape[1] == 0:
        raise UserError(f"{place}: graph {graph.name} has {n} nodes and {graph.edges.shape[1]} edges")
    if graph.x.shape[0] != n:
        raise UserError(f"{place}: {graph.name} has {n} labels, but attributes of {graph.x.shape[0]} nodes")
    known = FAMILIES.get(family)
    if known is None:
        return
    if n != known.nodes[graph.name]:
        wanted = known.nodes[graph.name]
        raise UserError(
            f"{place}: {graph.name} has {n} nodes, but the benchmark's has {wanted}: is a file cut short?"
        )
    if family != "airport" and graph.x.shape[1] != known.features:
        raise UserError(f"{place}: {graph.name} has {graph.x.shape[1]} attributes, not {known.features}")
    if graph.y.min() < 0 or graph.y.max() >= known.classes:
        bad = graph.y[(graph.y < 0) | (graph.y >= known.classes)][0]
        raise UserError(f"{place}: {graph.name} has the label {bad}, but labels are 0..{known.classes - 1}")


class _Files:
    """The files of one graph: looked for in any case, read with errors that name them."""

    def __init__(self, folder: Path | None, family: str, name: str):
        self.folder, self.family, self.name = folder, family, name

    def find(self, *names: str) -> Path | None:
        """The first of `names` that is there."""
        if self.folder is None:
            return None
        places = [self.folder]
        for part in (self.family, self.name, "raw"):
            places += [
                sub
                for place in list(places)
                for sub in place.iterdir()
                if sub.is_dir() and sub.name.lower() == part
            ]
        there = {
            path.name.lower(): path
            for place in reversed(places)
            for path in place.iterdir()
            if path.is_file()
        }
        return next((there[name.lower()] for name in names if name.lower() in there), None)

    def need(self, *names: str) -> Path:
        """As `find`; UserError names the full path of the first."""
        found = self.find(*names)
        if found is None:
            family = FAMILIES.get(self.family)
            source = f"; people get it from {family.where}" if family else ""
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            assert self.folder is not None
            raise UserError(f"{self.folder.resolve() / names[0]}{others} is missing{source}")
        return found

    def read(self, path: Path, reader: Callable[[Path], Any]) -> Any:
        """`reader(path)`; UserError if that fails."""
        try:
            return reader(path)
        except UNREADABLE as error:
            raise UserError(f"{path} can not be read: {type(error).__name__}: {error}") from None


def _table(separator: str | None = ",", skip: int = 0, dtype: Any = np.int64) -> Callable[[Path], np.ndarray]:
    return lambda path: np.loadtxt(path, dtype=dtype, delimiter=separator, skiprows=skip, ndmin=2)


def _npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def _airport(files: _Files):
    name = files.name
    labels = files.find(f"labels-{name}-airports.txt")
    if files.folder is None or (npz := files.find("data_airport.npz", "airports.npz")):
        d = files.read(EMBEDDED if files.folder is None else npz, _npz)
        return d[f"{name}_edges"].T, None, d[f"{name}_labels"]
    if labels is not None:
        rows = files.read(labels, _table(None, skip=1))
        edges = files.read(files.need(f"{name}-airports.edgelist"), _table(None))
        return _renumber(edges.T, rows[:, 0], files.folder), None, rows[:, 1]
    edges = files.read(files.need(f"{name}_edgelist.txt", f"{name}-airports.edgelist"), _table())
    return edges.T, None, files.read(files.need(f"{name}_labels.txt"), _table())[:, -1]


def _renumber(edges: np.ndarray, ids: np.ndarray, place: Path) -> np.ndarray:
    order = np.argsort(ids)
    position = np.minimum(np.searchsorted(ids[order], edges), len(ids) - 1)
    unknown = ids[order][position] != edges
    if unknown.any():
        raise UserError(f"{place}: the edge list names node {edges[unknown][0]}, which has no label")
    return order[position]


def _citation(files: _Files):
    name = files.name
    if mat := files.find(f"{name}.mat"):
        d = files.read(mat, scipy.io.loadmat)
        missing = [key for key in ("network", "attrb", "group") if key not in d]
        if missing:
            raise UserError(f"{mat} has no {', '.join(missing)}: it needs network, attrb and group")
        return np.stack(scipy.sparse.coo_array(d["network"]).nonzero()), d["attrb"], _first_class(d["group"])
    if npz := files.find(f"data_{files.family}_{name}.npz"):
        d = files.read(npz, _npz)
        x = scipy.sparse.csr_array((d["x_data"], d["x_indices"], d["x_indptr"]), shape=tuple(d["x_shape"]))
        return d["edges_upper"].T, x, _first_class(d["group"])
    docs = files.need(f"{name}_docs.txt", f"{name}.mat", f"data_{files.family}_{name}.npz")
    x = files.read(docs, _table(dtype=np.float64))
    edges = files.read(files.need(f"{name}_edgelist.txt"), _table())
    return edges.T, x, files.read(files.need(f"{name}_labels.txt"), _table())[:, -1]


def _first_class(group: Any) -> np.ndarray:
    """Of several labels the first: the single-label protocol of all papers."""
    group = np.asarray(group.todense() if scipy.sparse.issparse(group) else group)
    return np.argmax(group, axis=1)


def _twitch(files: _Files):
    name = files.name.upper()
    target = files.need(f"musae_{name}_target.csv")
    table = files.read(
        target, lambda path: np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    )
    missing = [column for column in ("mature", "new_id") if column not in (table.dtype.names or ())]
    if missing:
        raise UserError(f"{target} has no column {', '.join(missing)}")
    ids, first = np.unique(table["new_id"], return_index=True)  # some files repeat rows
    y = np.char.lower(table["mature"][first].astype(str)) == "true"
    n, width = len(ids), FAMILIES["twitch"].features
    words = files.read(files.need(f"musae_{name}_features.json"), lambda path: json.loads(path.read_text()))
    pairs = [
        (int(node), word) for node, some in words.items() if int(node) < n for word in some if word < width
    ]
    rows, columns = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2).T
    x = scipy.sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=(n, width))
    edges = files.read(files.need(f"musae_{name}_edges.csv"), _table(skip=1))
    return edges.T, x, y.astype(np.int64)


def _own(files: _Files):
    path = files.need(f"{files.name}.npz")
    d = files.read(path, _npz)
    sparse = ("x_data", "x_indices", "x_indptr", "x_shape")
    missing = [key for key in ("edges", "y") if key not in d]
    if "x" not in d and not all(key in d for key in sparse):
        missing.append(f"x (or {', '.join(sparse)})")
    if missing:
        raise UserError(f"{path} has no {', '.join(missing)}")
    x = (
        d["x"]
        if "x" in d
        else scipy.sparse.csr_array((d["x_data"], d["x_indices"], d["x_indptr"]), tuple(d["x_shape"]))
    )
    return d["edges"], x, d["y"]


_READERS: dict[str, Callable[[_Files], Sequence[Any]]] = {
    "airport": _airport,
    "citation": _citation,
    "blog": _citation,
    "twitch": _twitch,
}
