"""From the history of scores to one number a seed: three rules that say which step counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from core import stats
from core.summary import Claim
from graphs.gaa.training import Scores

__all__ = ["RULES", "Outcome", "claims", "select", "table"]

RULES = ("last", "validation", "oracle")
POINTS = 100.0


class Outcome(NamedTuple):
    """Accuracy and macro-F1 on the target in percent, `[T, S]` (tasks, seeds), by rule."""

    accuracy: dict[str, np.ndarray]
    macro_f1: dict[str, np.ndarray]


def select(scores: Scores) -> Outcome:
    """Applies RULES to Scores `[T, 2, S, P]`: the runs on all source labels, then those that hold some out.

    "last": the last step of the first. "validation": of the second, the first step with the best macro-F1 on
    the held-out source nodes. "oracle": of the first, the first step with the best macro-F1 on the target
    itself: nobody has that, it is there to compare with papers that report it.
    """
    whole, part = (Scores(*(np.asarray(x)[:, i] for x in scores)) for i in (0, 1))
    last = np.full(whole.target_macro.shape[:-1], whole.target_macro.shape[-1] - 1)
    at = {
        "last": (whole, last),
        "validation": (part, np.argmax(part.validation_macro, axis=-1)),
        "oracle": (whole, np.argmax(whole.target_macro, axis=-1)),
    }

    def pick(name):
        return {
            rule: POINTS * np.take_along_axis(getattr(runs, name), step[..., None], axis=-1)[..., 0]
            for rule, (runs, step) in at.items()
        }

    return Outcome(pick("target_micro"), pick("target_macro"))


def numbers(outcomes: Mapping[str, Outcome], tasks: Sequence[str]) -> dict[str, Any]:
    """What summary.json holds: per seed the mean over tasks by row and rule, each task at the last step."""
    found = {}
    for row, outcome in outcomes.items():
        for rule in RULES:
            found[f"{row}/accuracy_{rule}"] = outcome.accuracy[rule].mean(axis=0)
            found[f"{row}/macro_f1_{rule}"] = outcome.macro_f1[rule].mean(axis=0)
    for i, task in enumerate(tasks):
        for row, outcome in outcomes.items():
            found[f"{row} {task}/accuracy"] = outcome.accuracy["last"][i]
            found[f"{row} {task}/macro_f1"] = outcome.macro_f1["last"][i]
    return found


def table(
    outcomes: Mapping[str, Outcome], tasks: Sequence[str], expected: Mapping[str, float]
) -> list[list[str]]:
    """Rows of text: method, measure, rule, then mean +- standard deviation over seeds per task, and the mean.

    Args:
      expected: by task the macro-F1 of the independent re-run, 0..1; its rule is the oracle's.
    """
    rows = [["method", "measure", "step", *tasks, "mean"]]
    for row, outcome in outcomes.items():
        for measure, by_rule in (("accuracy", outcome.accuracy), ("macro-F1", outcome.macro_f1)):
            for rule in RULES:
                cells = [f"{x.mean():.1f} +- {x.std(ddof=min(1, x.size - 1)):.1f}" for x in by_rule[rule]]
                rows.append([row, measure, rule, *cells, f"{by_rule[rule].mean():.1f}"])
    if expected:
        cells = [f"{POINTS * expected[task]:.1f}" if task in expected else "" for task in tasks]
        mean = np.mean([POINTS * value for value in expected.values()])
        rows.append(["GAA, independent re-run", "macro-F1", "oracle", *cells, f"{mean:.1f}"])
    return rows


def claims(outcomes: Mapping[str, Outcome], *, level: float = 0.95) -> list[Claim]:
    """The claims whose rows are all there: differences of accuracy (last step, mean over tasks) in points."""
    wanted = (
        ("knn_over_gcn", "knn_gcn", "gcn", ">=", 6.0, "attributes alone beat the given edges alone"),
        ("gaa_over_gcn", "gaa", "gcn", ">=", 6.0, "GAA beats a GCN without adaptation"),
        (
            "gaa_over_dann",
            "gaa",
            "dann_gcn",
            ">=",
            6.0,
            "GAA beats adversarial alignment of topology",
        ),
        (
            "cross_view_gain",
            "gaa",
            "gaa_no_cross_view",
            ">",
            0.0,
            "aligning the cross-view similarity adds",
        ),
    )
    found = []
    for name, ours, theirs, op, threshold, statement in wanted:
        if not {ours, theirs} <= outcomes.keys():
            continue
        a, b = (outcomes[row].accuracy["last"].mean(axis=0) for row in (ours, theirs))
        interval = stats.paired_bootstrap(a, b, np.mean, level=level)
        error = (a - b).std(ddof=min(1, len(a) - 1)) / np.sqrt(len(a))
        note = f"paired standard error {error:.2f}"
        if op == ">" and interval.value <= 2 * error:
            note += ": inside two standard errors, not established"
        text = f"{statement}: difference of accuracy in points, last step, mean over tasks"
        found.append(
            Claim(name, text, interval.value, (interval.lo, interval.hi), level, op, threshold, note)
        )
    return found
