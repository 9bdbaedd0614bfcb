"""The plots that every method needs: matplotlib Figures of their own, without pyplot's global state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from core import stats

__all__ = ["bars", "curves", "heatmap", "image_grid"]

# Okabe and Ito's palette: told apart with any colour vision, also in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#8C6D00")
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "axes.edgecolor": "#8A8A8A",
    "xtick.color": "#4D4D4D",
    "ytick.color": "#4D4D4D",
    "axes.labelcolor": "#303030",
    "legend.frameon": False,
    "axes.prop_cycle": cycler(color=COLOURS),
}


def curves(
    series: Mapping[str, tuple[Any, Any]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    threshold: float | None = None,
    band: Literal["interquartile", "bootstrap"] = "interquartile",
) -> Figure:
    """Draws one line with a band per entry.

    Args:
      series: label -> (x `[N]`, y `[seeds, N]` or `[N]`); a NaN in y leaves a gap.
      threshold: where a dashed horizontal line goes.
      band: "interquartile" draws the median and the 25 to 75 % range of the seeds; "bootstrap" the
        interquartile mean with its 95 % interval.
    """
    with _axes((6.4, 4.0), title, xlabel, ylabel) as axes:
        for label, (x, y) in series.items():
            y = np.atleast_2d(np.asarray(y, np.float64))
            middle, low, high = _band(y, band)
            (line,) = axes.plot(x, middle, label=label, linewidth=1.8)
            if len(y) > 1:
                axes.fill_between(x, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
        _threshold(axes.axhline, threshold)
        axes.margins(x=0.01)
        if len(series) > 1:
            # Beside the axes: inside, many lines leave it no free corner.
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _figure(axes)


def bars(
    values: Mapping[str, Any],
    *,
    xlabel: str,
    title: str = "",
    threshold: float | None = None,
    statistic: Callable[..., Any] = stats.iqm,
) -> Figure:
    """Draws one horizontal bar per entry: a statistic, its 95 % bootstrap interval, and each seed.

    Args:
      values: label -> one finite number per seed `[seeds]`.
      threshold: where a dashed vertical line goes.
      statistic: reduces the last axis; the interquartile mean by default.
    """
    with _axes((6.4, 0.9 + 0.45 * len(values)), title, xlabel, "") as axes:
        for row, seeds in enumerate(values.values()):
            seeds = np.atleast_1d(np.asarray(seeds, np.float64))
            value, low, high, _ = stats.stratified_bootstrap(seeds, statistic)
            colour = COLOURS[row % len(COLOURS)]
            axes.barh(row, value, color=colour, alpha=0.35, height=0.62)
            axes.plot([low, high], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
            axes.plot(seeds, np.full(seeds.size, row), "o", color=colour, markersize=4, alpha=0.8)
        axes.set_yticks(range(len(values)), list(values))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        _threshold(axes.axvline, threshold)
    return _figure(axes)


def image_grid(
    images: Any, labels: Sequence[str] = (), *, columns: int | None = None, title: str = ""
) -> Figure:
    """Draws images `[N, H, W, 3]` (uint8, or floats in 0..1) in rows of `columns`, with labels above them."""
    images = np.asarray(images)
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    height = 2.0 * images.shape[1] / images.shape[2]
    layout = ConstrainedLayoutEngine(hspace=0.06, wspace=0.04)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(2.0 * columns, (height + 0.3) * rows), layout=layout)
        grid = figure.subplots(rows, columns, squeeze=False)
        for i, axes in enumerate(grid.flat):
            axes.axis("off")
            if i < len(images):
                axes.imshow(images[i] if images.dtype == np.uint8 else np.clip(images[i], 0, 1))
                axes.set_title(labels[i] if i < len(labels) else "", fontsize=9)
        figure.suptitle(title, fontweight="bold")
    return figure


def heatmap(
    matrix: Any,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    colorbar: str = "",
) -> Figure:
    """Draws a matrix `[R, C]`, row 0 on top; up to 12 x 12 each cell shows its value.

    Args:
      rows, columns: names of the rows and columns; numbers where left out.
      colorbar: what the colour means.
    """
    matrix = np.asarray(matrix, np.float64)
    with _axes((6.0, 4.6), title, xlabel, ylabel) as axes:
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        image = axes.imshow(matrix, cmap="viridis", aspect="auto")
        axes.figure.colorbar(image, ax=axes, label=colorbar)
        if len(rows):
            axes.set_yticks(range(len(rows)), rows)
        if len(columns):
            axes.set_xticks(range(len(columns)), columns)
        if max(matrix.shape) <= 12:
            middle = (np.nanmin(matrix) + np.nanmax(matrix)) / 2
            for (i, j), value in np.ndenumerate(matrix):
                colour = "black" if value > middle else "white"
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=8)
    return _figure(axes)


@contextmanager
def _axes(size: tuple[float, float], title: str, xlabel: str, ylabel: str) -> Iterator[Axes]:
    with matplotlib.rc_context(_STYLE):
        axes = Figure(figsize=size, layout="constrained").add_subplot()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        yield axes


def _figure(axes: Axes) -> Figure:
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def _threshold(line: Callable[..., Any], value: float | None) -> None:
    if value is not None:
        line(value, color="#8A8A8A", linestyle="--", linewidth=1.2, zorder=1)


def _band(y: np.ndarray, band: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Middle, low and high `[N]` of y `[seeds, N]`."""
    if band == "interquartile":
        low, middle, high = np.percentile(y, [25, 50, 75], axis=0)
        return middle, low, high
    if band != "bootstrap":
        raise ValueError(f"band is 'interquartile' or 'bootstrap', not {band!r}")
    whole = np.isfinite(y).all(axis=0)
    result = np.full((3, y.shape[1]), np.nan)
    result[:, whole] = np.transpose([stats.stratified_bootstrap(column)[:3] for column in y[:, whole].T])
    return result[0], result[1], result[2]
