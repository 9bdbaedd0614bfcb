"""From learning curves to the claims of the paper, each a number with an interval and a threshold."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from core import stats
from core.rl import evaluate
from core.summary import Claim

__all__ = ["Learned", "as_csv", "measure", "summarise"]


class Learned(NamedTuple):
    """Evaluations of one method: real `steps` `[P]`, success rate and unshaped return `[S, P]`, budget."""

    steps: np.ndarray
    episodes: np.ndarray
    seconds: np.ndarray
    success: np.ndarray
    returns: np.ndarray
    budget: int


def measure(curves: dict[str, Learned], zero_shot_return: np.ndarray, *, threshold: float) -> dict[str, Any]:
    """Each method's numbers `[S]`, one a seed: steps_to_threshold, censored, dip, AUCs, final success."""
    numbers: dict[str, Any] = {}
    for name, curve in curves.items():
        lanes = curve.success.shape[0]
        steps, censored = evaluate.steps_to_threshold(
            curve.steps, curve.success, budget=curve.budget, tau=threshold
        )
        numbers[f"{name}/steps_to_threshold"] = steps
        numbers[f"{name}/censored"] = censored.astype(float)
        numbers[f"{name}/final_success"] = curve.success[:, -1]
        numbers[f"{name}/final_return"] = curve.returns[:, -1]
        numbers[f"{name}/auc_return"] = evaluate.auc(curve.steps, curve.returns)
        numbers[f"{name}/auc_success"] = evaluate.auc(curve.steps, curve.success)
        numbers[f"{name}/initial_dip"] = evaluate.initial_dip(
            curve.steps,
            curve.returns,
            budget=curve.budget,
            zero_shot_return=zero_shot_return[:lanes],
        )
    return numbers


def as_csv(curves: dict[str, Learned], seeds: list[int]) -> str:
    """All evaluations as text, a row each, with the return under the name `reward`."""
    rows = ["method,step,episode,seconds,reward,success,seed"]
    for name, curve in curves.items():
        for returns, success, seed in zip(curve.returns, curve.success, seeds):
            points = zip(curve.steps, curve.episodes, curve.seconds, returns, success)
            rows += [f"{name},{','.join(f'{x:g}' for x in point)},{seed}" for point in points]
    return "\n".join(rows) + "\n"


def summarise(numbers: dict[str, Any], curves: dict[str, Learned], *, level: float = 0.95) -> list[Claim]:
    """The claims whose methods are all in `numbers` (from `measure`)."""
    claims = []
    if {"sgft_mb", "sac_finetune"} <= curves.keys():
        claims.append(_half_steps(numbers, level))
    if "sgft_mb" in curves:
        claims.append(_no_dip(numbers, level))
    if "sgft_mb_no_value" in curves:
        claims.append(_no_value_fails(numbers, level))
    if {"sgft_sac", "sac_finetune"} <= curves.keys():
        claims.append(_auc_difference(numbers, level))
    return claims


def _half_steps(numbers, level):
    ours, theirs = (numbers[f"{name}/steps_to_threshold"] for name in ("sgft_mb", "sac_finetune"))
    seeds = min(len(ours), len(theirs))
    ratio = stats.ratio_of_medians_bootstrap(ours[:seeds], theirs[:seeds], level=level)
    censored = int(numbers["sac_finetune/censored"][:seeds].sum())
    note = f"SAC fine-tuning never got there on {censored} of {seeds} seeds: the ratio is then an upper bound"
    return Claim(
        "mb_half_steps",
        "SGFT-MB needs at most half the real steps of SAC fine-tuning to reach the success threshold "
        "(medians)",
        ratio.value,
        (ratio.lo, ratio.hi),
        level,
        "<=",
        0.5,
        note if censored else "",
    )


def _no_dip(numbers, level):
    dip = numbers["sgft_mb/initial_dip"]
    interval = stats.stratified_bootstrap(dip, np.mean, level=level)
    return Claim(
        "mb_no_dip",
        "SGFT-MB does not unlearn at first: worst return change in the first 20 % of the budget, as a share "
        "of zero-shot's return (mean over seeds)",
        interval.value,
        (interval.lo, interval.hi),
        level,
        ">=",
        -0.1,
    )


def _no_value_fails(numbers, level):
    final = numbers["sgft_mb_no_value/final_success"]
    interval = stats.stratified_bootstrap(final, np.mean, level=level)
    return Claim(
        "no_vsim_fails",
        "the same planner without V_sim does not learn the task: its final success rate (mean over seeds)",
        interval.value,
        (interval.lo, interval.hi),
        level,
        "<=",
        0.1,
    )


def _auc_difference(numbers, level):
    ours, theirs = (numbers[f"{name}/auc_return"] for name in ("sgft_sac", "sac_finetune"))
    seeds = min(len(ours), len(theirs))
    interval = stats.paired_bootstrap(ours[:seeds], theirs[:seeds], np.mean, level=level)
    return Claim(
        "sac_auc_difference",
        "SGFT-SAC is not behind SAC fine-tuning: upper end of the interval of the paired difference of the "
        "area under the return curve",
        interval.hi,
        (interval.lo, interval.hi),
        level,
        ">=",
        0.0,
        f"mean difference {interval.value:.2f}; the paper's setting was not measured before at this gap",
    )
