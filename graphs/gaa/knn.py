"""The feature graph: k nearest neighbours by attributes, with ties that fall the same way everywhere."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from core.errors import UserError, nearest
from core.files import write_bytes

__all__ = ["knn_graph"]

METRICS = ("cosine", "rbf")
TIES = ("index", "all")
DECIMALS = 12
CELLS = 2**24  # similarities held at once
DENSE = 0.1  # share of non-zeros from which dense products are faster


def knn_graph(
    x: Any,
    k: int,
    *,
    metric: str = "cosine",
    tie: str = "index",
    max_degree: int = 64,
    symmetric: bool = True,
    cache: Path | None = None,
) -> np.ndarray:
    """Edges `[2, E]` (int32, lexicographic) from every node to its k most similar other nodes; on the host.

    Similarities are float64, rounded to 12 decimals. Pairs of similarity <= 0 get no edge, so a row of zeros
    has none. Rows are taken in blocks: memory grows with N, never with N^2.

    Args:
      x: attributes `[N, F]`, dense or scipy.sparse.
      k: neighbours of a node, 1 <= k < N.
      metric: "cosine", or "rbf": exp(-distance^2 / (2 m^2)), m the median distance among 1000 of the nodes.
      tie: of equals at the k-th place "index" takes lower numbers first, "all" all of them, up to
        `max_degree` neighbours.
      symmetric: also the other direction of every edge, each once.
      cache: a folder that keeps results, by a hash of all that they depend on.

    Raises:
      UserError: k < 1, k >= N, or an unknown metric or tie rule.
    """
    n = x.shape[0]
    for name, value, known in (("metric", metric, METRICS), ("tie", tie, TIES)):
        if value not in known:
            raise UserError(f"{name}={value!r}{nearest(value, known)}; one of {', '.join(known)}")
    if k < 1:
        raise UserError(f"k={k}: every node needs at least 1 neighbour")
    if k >= n:
        raise UserError(f"k={k} needs at least {k + 1} nodes, graph has {n}")
    x = scipy.sparse.csr_array(x, dtype=np.float64)
    most = max(k, max_degree) if tie == "all" else k
    path = None if cache is None else Path(cache) / f"knn-{_digest(x, (k, metric, most, symmetric))}.npy"
    if path is not None and path.is_file():
        return np.load(path, allow_pickle=False)
    found = [_best(columns, values, k, most) for columns, values in _similar(x, metric)]
    pairs = np.stack([np.repeat(np.arange(n), [len(row) for row in found]), np.concatenate(found)])
    if symmetric:
        pairs = np.concatenate([pairs, pairs[::-1]], axis=1)
    keys = np.unique(pairs[0] * n + pairs[1])
    edges = np.stack([keys // n, keys % n]).astype(np.int32)
    if path is not None:
        buffer = io.BytesIO()
        np.save(buffer, edges)
        write_bytes(path, buffer.getvalue())
    return edges


def _best(columns: np.ndarray, values: np.ndarray, k: int, most: int) -> np.ndarray:
    """Of candidates `columns` (ascending) the k of largest value, lower ones first among equals; of those
    equal to the k-th, as many more as there are up to `most` in all."""
    if len(columns) <= k:
        return columns
    smallest = np.partition(values, len(values) - k)[len(values) - k]
    above, equal = np.flatnonzero(values > smallest), np.flatnonzero(values == smallest)
    return columns[np.concatenate([above, equal[: most - len(above)]])]


def _similar(x, metric: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For every row the other rows of positive similarity, ascending, and that similarity."""
    n = x.shape[0]
    product, compare = _products(x), _cosine(x) if metric == "cosine" else _rbf(x)
    size = max(1, CELLS // n)
    for first in range(0, n, size):
        block = product(first, min(first + size, n))
        for i, (columns, values) in enumerate(block, start=first):
            columns, values = compare(i, columns, values)
            values = np.round(values, DECIMALS)
            keep = (values > 0) & (columns != i)
            yield columns[keep], values[keep]


def _products(x) -> Callable[[int, int], Iterator[tuple[np.ndarray, np.ndarray]]]:
    """x_i . x_j for rows i of a block: the columns j that may differ from 0, and the products."""
    n, width = x.shape
    if x.nnz > DENSE * n * width:
        dense, everyone = x.toarray(), np.arange(n)
        return lambda first, last: ((everyone, row) for row in dense[first:last] @ dense.T)

    def rows(first, last):
        block = scipy.sparse.csr_array(x[first:last] @ x.T)
        block.sort_indices()
        for start, stop in zip(block.indptr, block.indptr[1:]):
            yield block.indices[start:stop], block.data[start:stop]

    return rows


def _cosine(x):
    inverse = 1 / np.sqrt(_squares(x, empty=np.inf))
    return lambda i, columns, products: (columns, products * inverse[i] * inverse[columns])


def _rbf(x):
    n, square = x.shape[0], _squares(x)
    some = np.unique(np.linspace(0, n - 1, min(n, 1000)).astype(int))
    pairs = square[some][:, None] + square[some] - 2 * (x[some] @ x[some].T).toarray()
    scale = 2 * max(np.median(pairs[~np.eye(len(some), dtype=bool)]), 1e-12)

    def compare(i, columns, products):
        whole = np.zeros(n)
        whole[columns] = products
        return np.arange(n), np.exp(-np.maximum(square[i] + square - 2 * whole, 0) / scale)

    return compare


def _squares(x, empty=0.0):
    """|x_i|^2 `[N]`, `empty` for rows of zeros."""
    square = np.asarray(x.multiply(x).sum(axis=1)).ravel()
    return np.where(square > 0, square, empty)


def _digest(x, settings) -> str:
    text = hashlib.sha256(repr((x.shape, settings)).encode())
    for part in (x.indptr.astype(np.int64), x.indices.astype(np.int64), x.data):
        text.update(np.ascontiguousarray(part).tobytes())
    return text.hexdigest()[:24]
