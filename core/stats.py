"""The intervals and tests behind every claim. Plain numpy; the same numbers give the same interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from core.errors import UserError

__all__ = [
    "Interval",
    "iqm",
    "paired_bootstrap",
    "ratio_of_medians_bootstrap",
    "sign_test",
    "stratified_bootstrap",
    "wilson_interval",
]


class Interval(NamedTuple):
    """A measured value with its interval [lo, hi] at confidence `level`."""

    value: float
    lo: float
    hi: float
    level: float


def iqm(x: Any, axis: int | None = -1) -> Any:
    """Interquartile mean: the mean without the lowest and the highest quarter (n // 4 values each).

    As in Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice".

    Args:
      x: `[..., N]` finite numbers; N < 4 gives the plain mean.
      axis: what to reduce; None reduces everything.

    Raises:
      UserError: no values, or one is NaN or infinite.
    """
    return stats.trim_mean(_finite("iqm", x), 0.25, axis=axis)


def stratified_bootstrap(
    scores: Any,
    statistic: Callable[..., Any] = iqm,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a statistic over all scores, resampling runs within each stratum.

    Agarwal et al. (2021), Sec. 4.1: strata (tasks) are fixed, runs (seeds) are the sample.

    Args:
      scores: `[strata, runs]` or `[runs]` finite numbers.
      statistic: reduces the last axis, `statistic(x, axis=-1)`: `iqm`, `np.mean`, `np.median`, ..

    Returns:
      The statistic of `scores` and its interval. A single run, or equal ones, give [value, value]: the data
      say nothing about spread.

    Raises:
      UserError: no values, a NaN or infinity, or more than two axes.
    """
    scores = np.atleast_2d(_finite("scores", scores))
    if scores.ndim > 2:
        raise UserError(f"scores: expected [strata, runs] or [runs], got the shape {scores.shape}")
    strata, runs = scores.shape
    draws = np.random.default_rng(seed).integers(runs, size=(resamples, strata, runs))
    samples = np.take_along_axis(scores[None], draws, axis=-1).reshape(resamples, -1)
    return _percentile(statistic(scores.reshape(-1), axis=-1), statistic(samples, axis=-1), level)


def paired_bootstrap(
    a: Any,
    b: Any,
    statistic: Callable[..., Any] = np.mean,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap of `statistic(a - b)`, resampling pairs: use it where run i of both shares its seed.

    Args:
      a, b: `[runs]` finite numbers of equal length.
      statistic: as in `stratified_bootstrap`.

    Raises:
      UserError: other shapes, no values, a NaN or infinity.
    """
    a, b = _finite("a", a), _finite("b", b)
    if a.ndim != 1 or a.shape != b.shape:
        raise UserError(f"a paired comparison needs two lists of equal length, got {a.shape} and {b.shape}")
    return stratified_bootstrap(a - b, statistic, resamples=resamples, level=level, seed=seed)


def ratio_of_medians_bootstrap(
    a: Any, b: Any, *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Bootstrap of median(a) / median(b), both resampled independently: the lengths may differ.

    Args:
      a: `[runs_a]` finite numbers.
      b: `[runs_b]` positive numbers.

    Raises:
      UserError: no values, a NaN or infinity, another number of axes, or a `b` that is not positive.
    """
    a, b = _finite("a", a), _finite("b", b)
    if a.ndim != 1 or b.ndim != 1 or b.min() <= 0:
        raise UserError("a ratio of medians needs two lists, the second of positive numbers")
    rng = np.random.default_rng(seed)
    top, bottom = (np.median(x[rng.integers(x.size, size=(resamples, x.size))], axis=-1) for x in (a, b))
    return _percentile(np.median(a) / np.median(b), top / bottom, level)


def sign_test(differences: Any, *, alternative: str = "two-sided") -> float:
    """Exact sign test: the p value of "differences are as often positive as negative"; zeros are left out.

    Args:
      differences: `[runs]` finite numbers; no non-zero one gives p = 1.
      alternative: "two-sided", "greater" (more are positive) or "less".
    """
    differences = _finite("differences", differences).ravel()
    positive, negative = int((differences > 0).sum()), int((differences < 0).sum())
    if positive + negative == 0:
        return 1.0
    return float(stats.binomtest(positive, positive + negative, 0.5, alternative=alternative).pvalue)


def wilson_interval(successes: int, trials: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a success rate (Wilson 1927); inside [0, 1] for any counts.

    Raises:
      UserError: no trial, or counts that can not be.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise UserError(f"a rate needs trials >= 1 and 0 <= successes <= trials, got {successes}/{trials}")
    interval = stats.binomtest(int(successes), int(trials)).proportion_ci(level, method="wilson")
    return Interval(successes / trials, float(interval.low), float(interval.high), level)


def _finite(name: str, x: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    if x.size == 0:
        raise UserError(f"{name}: there are no values to summarise")
    if not np.isfinite(x).all():
        raise UserError(f"{name}: {int((~np.isfinite(x)).sum())} of {x.size} values are NaN or infinite")
    return np.atleast_1d(x)


def _percentile(value: Any, samples: np.ndarray, level: float) -> Interval:
    if not 0 < level < 1:
        raise UserError(f"level must lie between 0 and 1, got {level}")
    lo, hi = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(lo), float(hi), level)
