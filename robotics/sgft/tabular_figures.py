"""Figures of the exact worlds: what the window gains with an exact model and few data, where it fails."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from matplotlib.figure import Figure

from robotics.sgft import gridworld, tabular

__all__ = ["figure_counter_example", "figure_exact", "figure_finite_data"]


def figure_exact(*, horizons=(1, 2, 4, 8, 16)):
    """Bars of the mean loss of value, zero-shot and each window length, with the exact model of two grids."""
    exact_gaps = jax.jit(partial(tabular.exact_gaps, horizons=horizons))
    with jax.enable_x64(True):
        gaps = {name: exact_gaps(world) for name, world in gridworld.exact_grids().items()}
    labels = ["zero-shot", *(f"H={horizon}" for horizon in horizons)]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(1, len(gaps)), gaps.items()):
        heights = np.maximum(np.hstack(values), 0.0)
        bars = axes.bar(labels, heights, color=["0.6"] + ["C0"] * len(horizons))
        axes.bar_label(bars, labels=[f"{height:.2g}" for height in heights], fontsize=8)
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set_ylim(0, 4 * heights.max())
        axes.set_title(f"grid world, {name}")
    figure.supylabel("mean of V* - V in reality")
    return figure


def figure_finite_data(losses=None, *, steps=(100, 200, 400, 800, 1500, 3000)):
    """Lines of the start state's loss of value against real steps, relative to zero-shot's, one per method.

    Args:
      losses: {method: `[seeds, len(steps)]`} from `gridworld.compare`; computed here (5 seeds) if None.
      steps: numbers of real steps.
    """
    if losses is None:
        losses = jax.jit(partial(gridworld.compare, steps=steps))(jax.random.key(0), gridworld.turned_grid())
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in losses.items():
        values = np.asarray(values)
        style = {"linewidth": 2.5} if name.startswith("SGFT") else {"linewidth": 1.2, "linestyle": "--"}
        (line,) = axes.plot(steps, np.median(values, axis=0), marker="o", markersize=3, label=name, **style)
        axes.fill_between(
            steps, *np.quantile(values, [0.25, 0.75], axis=0), color=line.get_color(), alpha=0.12, linewidth=0
        )
    axes.axhline(1.0, color="0.4", linewidth=1, label="zero-shot")
    axes.set_xscale("log")
    axes.set_xticks(steps, [str(n) for n in steps], minor=False)
    axes.set(xlabel="real steps", ylabel="loss of value at the start / zero-shot's", ylim=(0, None))
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def figure_counter_example(*, horizon=40):
    """Value of the start state against the window length, up to `horizon`, where V_sim is not improvable."""
    with jax.enable_x64(True):
        values = jax.jit(partial(tabular.policy_values, horizon=horizon))
        _, zero_shot, windows = values(tabular.counter_example())
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.step(np.arange(1, horizon + 1), windows[:, 0], where="mid", linewidth=2.5, label="SGFT")
    axes.axhline(float(zero_shot[0]), color="0.4", linestyle="--", label="zero-shot, optimal here")
    axes.set(xlabel="window length H", ylabel="value of the start state in reality", ylim=(-0.05, 1))
    axes.legend()
    return figure
