"""How far two graphs lie apart: in attributes, in topology, and in the feature graph; all on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.ndimage
import scipy.sparse
import scipy.stats
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from core.errors import UserError
from core.figures import COLOURS
from graphs.gaa.data import RawGraph
from graphs.gaa.graph import check_edges, check_finite, symmetrize
from graphs.gaa.knn import knn_graph

__all__ = ["ShiftReport", "figure", "shift_report"]

STEPS, PROBES = 80, 32  # of the Lanczos quadrature: steps, random vectors
WEDGES = 2**24  # entries of A^2 held at once, at most
DENSE = 0.02  # share of non-zeros from which dense products are faster
SMOOTH = 0.03  # standard deviation of the kernel that smooths spectra, in the figure only
UNITLESS = ("rbf_share", "degree_w1_relative", "clustering_w1", "spectrum_w1")
TITLES = {"topology": "graph A", "features": "feature graph Ahat"}


class ShiftReport(NamedTuple):
    """What `shift_report` found.

    Attributes:
      source, target: names of the graphs.
      values: the numbers by key.
      grid: where spectra are given, from 0 to 2, `[bins]`.
      spectra: of "topology" and "features" the densities of the normalised Laplacian's eigenvalues, source's
        and target's, `[2, bins]`; a row times the step of the grid sums to 1.
    """

    source: str
    target: str
    values: dict[str, float]
    grid: np.ndarray
    spectra: dict[str, np.ndarray]

    def numbers(self) -> dict[str, float]:
        """The numbers by flat key, such as "attributes/linear_mmd/X" or "features/spectrum_w1"."""
        return dict(self.values)


def shift_report(
    source: RawGraph, target: RawGraph, *, k: int = 5, bins: int = 201, nodes: int = 2000, seed: int = 0
) -> ShiftReport:
    """Shift between two graphs with attributes `[N, F]`, of one F; N may differ, no `[N, N]` is dense.

    Keys are attributes/M/V for V of X, PX, P2X with P = P(A); features/M/V for V of PX, P2X with P = P(Ahat),
    Ahat the feature graph; topology/W of A; features/W of Ahat.

    M, both MMDs squared and biased (means over all pairs, so >= 0; of rbf_mmd up to 1/N_s + 1/N_t is chance):
      linear_mmd: |mean_s - mean_t|^2, over all nodes.
      rbf_mmd: kernel exp(-d^2 / (2 m^2)), m the median distance in the joint sample of nodes.
      linear_share, rbf_share: the share, 0 to 1, of the scatter of both graphs together (weighing the same)
        in the kernel's space that lies between the two means.

    W, Wasserstein-1 distances on the symmetrised graph without loops:
      degree_w1, and degree_w1_relative: divided by the mean of the two mean degrees.
      clustering_w1: of local clustering coefficients, 0 for nodes with fewer than 2 neighbours.
      spectrum_w1: of the normalised Laplacian's eigenvalues, in 0..2; a node without edges has eigenvalue 0.

    Args:
      k: neighbours in the feature graph.
      bins: points of the spectra's grid. An eigenvalue is shared by the two next to it.
      nodes: of each graph at most so many, drawn at random, are compared by RBF; a graph of more nodes has
        its spectrum estimated (stochastic Lanczos quadrature), others have all eigenvalues computed.
      seed: of the nodes drawn and the quadrature's vectors.

    Raises:
      UserError: numbers of attributes that differ, attributes that are not finite, an edge to a node that is
        not there, or what knn_graph refuses, such as k >= N.
    """
    if source.x.shape[1] != target.x.shape[1]:
        raise UserError(
            f"source {source.name} has {source.x.shape[1]} attributes, target {target.name} "
            f"{target.x.shape[1]}; a shift needs one attribute space"
        )
    pair = (source, target)
    for graph in pair:
        check_finite(graph.x)
    x = [scipy.sparse.csr_array(graph.x, dtype=np.float64) for graph in pair]
    edges = {"topology": [graph.edges for graph in pair], "features": [knn_graph(one, k) for one in x]}
    grid, values, spectra = np.linspace(0.0, 2.0, bins), {}, {}
    for channel, both in edges.items():
        views = [_views(one, _propagation(e, one.shape[0]), nodes, seed) for one, e in zip(x, both)]
        for view, first, second in zip(("X", "PX", "P2X"), *views):
            if channel == "topology" or view != "X":  # X is the same in both
                group = "attributes" if channel == "topology" else "features"
                values |= {f"{group}/{key}/{view}": v for key, v in _mmd(first, second).items()}
        simple = [_simple(e, one.shape[0]) for one, e in zip(x, both)]
        spectra[channel] = np.stack([_density(a, bins, nodes, seed) for a in simple])
        values |= {f"{channel}/{key}": v for key, v in _topology(*simple).items()}
        apart = np.cumsum(spectra[channel][0] - spectra[channel][1]) * grid[1]  # of cumulative distributions
        values[f"{channel}/spectrum_w1"] = float(np.sum(np.abs(apart)) * grid[1])
    return ShiftReport(source.name, target.name, values, grid, spectra)


def _propagation(edges, n) -> scipy.sparse.csr_array:
    """P(A) in float64, as graph.gcn_norm without weights: row = receiver, degree = row sum."""
    senders, receivers = check_edges(edges, n)
    keep = senders != receivers
    ones = np.ones(np.count_nonzero(keep))
    a = scipy.sparse.csr_array((ones, (receivers[keep], senders[keep])), shape=(n, n))
    a = a + scipy.sparse.eye_array(n)
    scale = scipy.sparse.diags_array(1 / np.sqrt(a.sum(axis=1)))
    return scipy.sparse.csr_array(scale @ a @ scale)


def _simple(edges, n) -> scipy.sparse.csr_array:
    """The adjacency of ones, symmetric, without loops."""
    row, column = symmetrize(edges, n, keep_self_loops=False)
    return scipy.sparse.csr_array((np.ones(len(row)), (row, column)), shape=(n, n))


def _views(x, p, nodes, seed) -> Iterator[tuple[np.ndarray, Any]]:
    """Of X, P X and P^2 X the mean over all nodes and at most `nodes` rows; the whole is never formed."""
    n = x.shape[0]
    rows = np.arange(n)
    if n > nodes:
        rows = np.sort(np.random.default_rng(seed).choice(n, nodes, replace=False))
    pick, weight = scipy.sparse.eye_array(n, format="csr")[rows], np.full(n, 1 / n)
    for _ in range(3):
        yield x.T @ weight, pick @ x
        pick, weight = pick @ p, p.T @ weight


def _mmd(source, target) -> dict[str, float]:
    (mean_s, s), (mean_t, t) = source, target
    joint = scipy.sparse.vstack([s, t], format="csr")
    if joint.nnz > DENSE * joint.shape[0] * joint.shape[1]:
        joint = joint.toarray()
    gram = joint @ joint.T
    gram = gram.toarray() if scipy.sparse.issparse(gram) else gram
    parts = [slice(None, s.shape[0]), slice(s.shape[0], None)]
    linear = float(np.sum((mean_s - mean_t) ** 2))
    spread = [np.diagonal(gram)[part].mean() - gram[part, part].mean() for part in parts]

    square = np.diagonal(gram)
    distance = np.maximum(square[:, None] + square - 2 * gram, 0)
    distance[distance < 1e-12 * square.max()] = 0  # equal rows, but for rounding
    pairs = np.sqrt(distance[np.triu(np.ones(distance.shape, bool), 1)])
    width = np.median(pairs) or pairs.mean() or 1.0  # median 0: most rows are equal
    kernel = np.exp(-distance / (2 * width**2))
    within = [kernel[part, part].mean() for part in parts]
    rbf = float(max(sum(within) - 2 * kernel[parts[0], parts[1]].mean(), 0))
    return {
        "linear_mmd": linear,
        "linear_share": _share(linear, max(sum(spread) / 2, 0)),
        "rbf_mmd": rbf,
        "rbf_share": _share(rbf, 1 - sum(within) / 2),
    }


def _share(mmd: float, within: float) -> float:
    """Between two equally heavy groups, MMD^2 apart, lies MMD^2 / 4 of the scatter around the common mean."""
    return float(mmd / 4 / (within + mmd / 4)) if mmd > 0 else 0.0


def _topology(source, target) -> dict[str, float]:
    degrees = [a.sum(axis=1) for a in (source, target)]
    degree = scipy.stats.wasserstein_distance(*degrees)
    mean = (degrees[0].mean() + degrees[1].mean()) / 2
    return {
        "degree_w1": float(degree),
        "degree_w1_relative": float(degree / mean) if mean > 0 else 0.0,
        "clustering_w1": float(scipy.stats.wasserstein_distance(_clustering(source), _clustering(target))),
    }


def _clustering(a) -> np.ndarray:
    """Closed pairs of neighbours over all pairs of neighbours, from rows of A^2 * A taken in blocks."""
    degree = a.sum(axis=1)
    block = (np.cumsum(a @ degree) // WEDGES).astype(int)
    closed = [
        (a[rows] @ a).multiply(a[rows]).sum(axis=1)
        for rows in np.split(np.arange(len(degree)), np.flatnonzero(np.diff(block)) + 1)
    ]
    return np.concatenate(closed) / np.maximum(degree * (degree - 1), 1)


def _density(a, bins: int, nodes: int, seed: int) -> np.ndarray:
    """The density of the normalised Laplacian's eigenvalues on the grid, `[bins]`."""
    n = a.shape[0]
    laplacian = scipy.sparse.csr_array(scipy.sparse.csgraph.laplacian(a, normed=True))
    if n <= nodes:
        values, weights = scipy.linalg.eigvalsh(laplacian.toarray()), np.full(n, 1 / n)
    else:
        values, weights = _lanczos_quadrature(laplacian, seed)
    step = 2 / (bins - 1)
    place = np.clip(values, 0, 2) / step
    low = np.minimum(place.astype(int), bins - 2)
    mass = np.bincount(low, weights * (1 - (place - low)), bins)
    return (mass + np.bincount(low + 1, weights * (place - low), bins)) / step


def _lanczos_quadrature(matrix, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights that stand for the eigenvalues: Gauss quadrature for every random sign vector.

    Without reorthogonalisation points repeat, but their weights still add up to what they should.
    """
    n = matrix.shape[0]
    steps = min(STEPS, n)
    vector = np.random.default_rng(seed).choice([-1.0, 1.0], (n, PROBES)) / np.sqrt(n)
    previous, beta = np.zeros_like(vector), np.zeros(PROBES)
    alphas, betas = np.zeros((steps, PROBES)), np.zeros((steps, PROBES))
    for i in range(steps):
        new = matrix @ vector - beta * previous
        alphas[i] = np.sum(new * vector, axis=0)
        new -= alphas[i] * vector
        beta = np.linalg.norm(new, axis=0)
        beta[beta < 1e-10] = 0  # the vector's subspace is used up: what follows has weight 0
        betas[i] = beta
        previous, vector = vector, np.divide(new, beta, out=np.zeros_like(new), where=beta > 0)
    found = [scipy.linalg.eigh_tridiagonal(alphas[:, j], betas[:-1, j]) for j in range(PROBES)]
    points, vectors = zip(*found)
    return np.concatenate(points), np.concatenate([v[0] ** 2 for v in vectors]) / PROBES


def figure(report: ShiftReport) -> Figure:
    """Spectra of A and of the feature graph, source against target, smoothed; and bars of the shifts.

    The bars are shifts without units: rbf_share, degree_w1_relative, clustering_w1, spectrum_w1.
    """
    drawn = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = drawn.subplots(1, 3, width_ratios=(1, 1, 1.1))
    middle.sharey(left)
    for axes, (channel, both) in zip((left, middle), report.spectra.items()):
        _draw_spectra(axes, report, both)
        distance = report.values[f"{channel}/spectrum_w1"]
        axes.set(title=f"{TITLES[channel]}: W1 = {distance:.3g}", xlabel="eigenvalue")
    left.set_ylabel("density")
    left.legend(frameon=False)
    shown = {key: value for key, value in report.values.items() if key.split("/")[1] in UNITLESS}
    colours = dict(zip(("attributes", "topology", "features"), COLOURS[2:]))
    right.barh(list(shown), list(shown.values()), color=[colours[key.split("/")[0]] for key in shown])
    right.tick_params(axis="y", labelsize=8)
    right.invert_yaxis()
    right.set(title=f"shift {report.source} to {report.target}", xlabel="without units")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _draw_spectra(axes: Axes, report: ShiftReport, both) -> None:
    for name, density, colour in zip((report.source, report.target), both, COLOURS):
        smooth = scipy.ndimage.gaussian_filter1d(density, SMOOTH / report.grid[1])
        axes.plot(report.grid, smooth, color=colour, label=name)
        axes.fill_between(report.grid, smooth, color=colour, alpha=0.15, linewidth=0)
