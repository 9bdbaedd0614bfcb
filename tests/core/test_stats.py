"""Statistics against values worked out by hand, scipy, and what the definitions imply."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from core.errors import UserError
from core.stats import (
    Interval,
    iqm,
    paired_bootstrap,
    ratio_of_medians_bootstrap,
    sign_test,
    stratified_bootstrap,
    wilson_interval,
)


def test_iqm_drops_a_quarter_at_each_end():
    assert iqm([100.0, 1, 2, 3, 4, 5, 6, -50]) == (2 + 3 + 4 + 5) / 4
    assert iqm([9.0, 1, 2, 3, 4]) == 3.0
    assert iqm([1.0, 2, 6]) == 3.0
    assert iqm([7.0]) == 7.0
    np.testing.assert_array_equal(iqm([[0.0, 1, 2, 100], [4, 4, 4, 4]]), [1.5, 4])
    np.testing.assert_array_equal(iqm([[0.0, 1], [2, 3]], axis=0), [1, 2])
    assert iqm([[0.0, 1], [2, 100]], axis=None) == 1.5


def test_bootstrap_of_two_runs_has_the_distribution_worked_out_by_hand():
    """Resamples of {0, 1} have mean 0, 1/2, 1 with probability 1/4, 1/2, 1/4."""
    assert stratified_bootstrap([0.0, 1.0], np.mean, level=0.95) == Interval(0.5, 0.0, 1.0, 0.95)
    assert stratified_bootstrap([0.0, 1.0], np.mean, level=0.4)[:3] == (0.5, 0.5, 0.5)


def test_bootstrap_quantiles_equal_the_exact_ones_of_all_resamples():
    """Means of four lie on a grid of 1/4; a quantile between two points of it may fall on either side."""
    scores = np.array([1.0, 2.0, 4.0, 8.0])
    exact = [np.mean(draw) for draw in itertools.product(scores, repeat=4)]
    value, lo, hi, _ = stratified_bootstrap(scores, np.mean, resamples=50_000, level=0.9)
    assert value == 3.75
    np.testing.assert_allclose([lo, hi], np.quantile(exact, [0.05, 0.95]), atol=0.07)


def test_bootstrap_agrees_with_scipy():
    scores = np.random.default_rng(1).normal(size=12)
    ours = stratified_bootstrap(scores, np.mean, resamples=20_000)
    theirs = scipy_stats.bootstrap((scores,), np.mean, n_resamples=20_000, method="percentile", rng=0)
    np.testing.assert_allclose(ours[1:3], theirs.confidence_interval, atol=0.02)


def test_strata_are_kept_apart():
    """Each stratum is constant, so no resample differs; pooled, they would."""
    assert stratified_bootstrap([[0.0, 0, 0, 0], [10, 10, 10, 10]], np.mean)[:3] == (5, 5, 5)
    pooled = stratified_bootstrap([0.0, 0, 0, 0, 10, 10, 10, 10], np.mean)
    assert pooled.lo < 5 < pooled.hi


def test_pairs_are_kept_together():
    a = np.array([1.0, 100, 7, -3])
    assert paired_bootstrap(a + 2, a)[:3] == (2, 2, 2)
    value, lo, hi, level = paired_bootstrap([3.0, 5, 9], [1.0, 1, 1], np.median, level=0.9)
    assert (value, lo, hi, level) == (4, 2, 8, 0.9)


def test_ratio_of_medians():
    assert ratio_of_medians_bootstrap([2.0, 4, 6], [8.0, 8])[0] == 0.5
    assert ratio_of_medians_bootstrap([3.0], [4.0, 4, 4])[:3] == (0.75, 0.75, 0.75)
    value, lo, hi, _ = ratio_of_medians_bootstrap([1.0, 3.0], [1.0])
    assert (value, lo, hi) == (2, 1, 3)


def test_intervals_depend_on_the_numbers_and_the_seed_only():
    scores = np.random.default_rng(0).normal(size=9)
    assert stratified_bootstrap(scores) == stratified_bootstrap(list(scores))
    assert stratified_bootstrap(scores) != stratified_bootstrap(scores, seed=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: stratified_bootstrap(x),
        lambda x: paired_bootstrap(x, np.zeros_like(x)),
        lambda x: ratio_of_medians_bootstrap(x, np.ones(3)),
    ],
)
@pytest.mark.parametrize("x", [np.array([3.0]), np.full(6, 3.0)])
def test_one_run_or_equal_runs_give_a_point(call, x):
    assert call(x)[:3] == (3, 3, 3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), st.sampled_from([0.5, 0.9, 0.99]))
def test_intervals_are_ordered_and_inside_the_data(scores, level):
    value, lo, hi, _ = stratified_bootstrap(scores, np.median, resamples=50, level=level)
    assert min(scores) <= lo <= hi <= max(scores) and min(scores) <= value <= max(scores)


def test_sign_test():
    assert sign_test([1.0, 2, 3, 4, 5]) == pytest.approx(2 / 32)
    assert sign_test([1.0, 2, 3, 4, 5], alternative="greater") == pytest.approx(1 / 32)
    assert sign_test([1.0, 2, 3, 4, 5], alternative="less") == 1.0
    assert sign_test([1.0, 1, 1, 0, -1], alternative="greater") == pytest.approx((4 + 1) / 16)
    assert sign_test([0.0, 0.0]) == 1.0


def test_wilson_interval_by_its_formula():
    z = scipy_stats.norm.ppf(0.975)
    n, p = 20, 7 / 20
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    expected = (p, (centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n), 0.95)
    assert wilson_interval(7, 20) == pytest.approx(expected)
    assert wilson_interval(0, 1)[:2] == (0, 0) and 0 < wilson_interval(0, 1).hi < 1
    assert wilson_interval(5, 5).hi == pytest.approx(1) and wilson_interval(5, 5).lo > 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iqm([1.0, math.nan]), "iqm: 1 of 2 values are NaN"),
        (lambda: iqm([]), "no values"),
        (lambda: stratified_bootstrap([1.0, math.inf, math.nan]), "scores: 2 of 3 values"),
        (lambda: stratified_bootstrap(np.zeros((2, 2, 2))), r"got the shape \(2, 2, 2\)"),
        (lambda: stratified_bootstrap([1.0], level=1.0), "between 0 and 1"),
        (lambda: paired_bootstrap([1.0, 2], [1.0]), r"equal length, got \(2,\) and \(1,\)"),
        (lambda: paired_bootstrap([1.0], [math.nan]), "b: 1 of 1"),
        (lambda: ratio_of_medians_bootstrap([1.0], [0.0, 1]), "positive"),
        (lambda: ratio_of_medians_bootstrap([math.nan], [1.0]), "a: 1 of 1"),
        (lambda: sign_test([math.nan]), "differences: 1 of 1"),
        (lambda: wilson_interval(1, 0), "got 1/0"),
        (lambda: wilson_interval(3, 2), "got 3/2"),
    ],
)
def test_what_can_not_be_summarised_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
