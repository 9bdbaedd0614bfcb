"""Curves whose claims can be read off by eye."""

import numpy as np
import pytest

from robotics.sgft import claims
from robotics.sgft.claims import Learned

STEPS = np.arange(0, 1601, 200)
ZERO_SHOT = np.full(5, 5.0)


def curve(reached_at, *, seeds=5, low=4.0, high=20.0, dip=0.0):
    """Success 1 and return `high` from `reached_at` on (None: never); `dip` lower at the second point."""
    there = np.zeros(len(STEPS), bool) if reached_at is None else reached_at <= STEPS
    returns = np.where(there, high, low) - dip * (np.arange(len(STEPS)) == 1)
    return Learned(
        STEPS,
        STEPS // 40,
        STEPS * 0.1,
        np.tile(there.astype(float), (seeds, 1)),
        np.tile(returns, (seeds, 1)),
        1600,
    )


def summary(**curves):
    numbers = claims.measure(curves, ZERO_SHOT, threshold=0.5)
    return {claim.name: claim for claim in claims.summarise(numbers, curves)}, numbers


def test_the_numbers_of_a_step_curve():
    _, numbers = summary(sgft_mb=curve(400))
    np.testing.assert_array_equal(numbers["sgft_mb/steps_to_threshold"], np.full(5, 400))
    np.testing.assert_array_equal(numbers["sgft_mb/censored"], np.zeros(5))
    np.testing.assert_array_equal(numbers["sgft_mb/final_success"], np.ones(5))
    # 200 steps at 4, 200 rising to 20, 1200 at 20.
    np.testing.assert_allclose(numbers["sgft_mb/auc_return"], (200 * 4 + 200 * 12 + 1200 * 20) / 1600)


@pytest.mark.parametrize(("reached", "ratio", "holds"), [(400, 0.5, True), (600, 0.75, False)])
def test_half_the_steps(reached, ratio, holds):
    found, _ = summary(sgft_mb=curve(reached), sac_finetune=curve(800))
    claim = found["mb_half_steps"]
    assert (claim.value, claim.holds, claim.note) == (pytest.approx(ratio), holds, "")
    assert claim.interval == pytest.approx((ratio, ratio))


def test_a_method_that_never_gets_there_counts_as_its_budget_and_says_so():
    found, numbers = summary(sgft_mb=curve(400), sac_finetune=curve(None))
    assert found["mb_half_steps"].value == pytest.approx(400 / 1600)
    assert "never got there on 5 of 5 seeds" in found["mb_half_steps"].note
    assert numbers["sac_finetune/censored"].all()


@pytest.mark.parametrize(
    ("dip", "share", "holds"), [(0.0, 0.0, True), (0.4, -0.08, True), (1.0, -0.2, False)]
)
def test_the_dip_is_a_share_of_zero_shots_return(dip, share, holds):
    claim = summary(sgft_mb=curve(800, dip=dip))[0]["mb_no_dip"]
    assert (claim.value, claim.holds) == (pytest.approx(share), holds)


def test_the_ablation_must_fail():
    assert summary(sgft_mb_no_value=curve(None, seeds=2))[0]["no_vsim_fails"].holds
    learns = summary(sgft_mb_no_value=curve(800, seeds=2))[0]["no_vsim_fails"]
    assert (learns.value, learns.holds) == (1.0, False)


def test_the_difference_in_area_is_paired_and_its_upper_end_decides():
    found, numbers = summary(sgft_sac=curve(400), sac_finetune=curve(800))
    difference = numbers["sgft_sac/auc_return"] - numbers["sac_finetune/auc_return"]
    claim = found["sac_auc_difference"]
    assert claim.value == pytest.approx(difference[0]) and claim.holds
    behind = summary(sgft_sac=curve(800), sac_finetune=curve(400))[0]["sac_auc_difference"]
    assert behind.value == pytest.approx(-difference[0]) and not behind.holds


def test_only_claims_whose_methods_ran_are_made():
    assert summary(sac_finetune=curve(800))[0] == {}
    assert set(summary(sgft_mb=curve(800), sgft_sac=curve(800))[0]) == {"mb_no_dip"}
