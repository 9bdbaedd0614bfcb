"""From scores to numbers: which step each rule takes, the table, the claims."""

import numpy as np
import pytest

from graphs.gaa import outcome
from graphs.gaa.training import Scores

# One task, both kinds of runs, two seeds, three scores.
TARGET = np.array([[[[0.1, 0.4, 0.2], [0.3, 0.1, 0.3]], [[0.5, 0.6, 0.7], [0.9, 0.8, 0.7]]]])
VALIDATION = np.array([[[[0, 0, 0], [0, 0, 0]], [[0.2, 0.5, 0.5], [0.6, 0.1, 0.3]]]], float)


def test_rules():
    found = outcome.select(Scores(TARGET + 0.05, TARGET, VALIDATION, VALIDATION))
    np.testing.assert_allclose(found.macro_f1["last"], [[20, 30]])
    np.testing.assert_allclose(found.macro_f1["oracle"], [[40, 30]])  # of equals the first
    np.testing.assert_allclose(found.macro_f1["validation"], [[60, 90]])
    np.testing.assert_allclose(found.accuracy["last"], [[25, 35]])


def flat(values):
    accuracy = {rule: np.asarray(values, float) for rule in outcome.RULES}
    return outcome.Outcome(accuracy, accuracy)


def test_claims_are_paired_differences_of_means_over_tasks():
    rows = {
        "gcn": flat([[40, 42], [50, 52]]),
        "knn_gcn": flat([[50, 50], [60, 56]]),
        "gaa": flat([[52, 55], [60, 61]]),
        "gaa_no_cross_view": flat([[50, 57], [58, 60]]),
    }
    claims = {claim.name: claim for claim in outcome.claims(rows)}
    assert set(claims) == {"knn_over_gcn", "gaa_over_gcn", "cross_view_gain"}
    assert claims["knn_over_gcn"].value == pytest.approx(8.0) and claims["knn_over_gcn"].holds
    gain = claims["cross_view_gain"]
    assert gain.value == pytest.approx(0.75) and gain.holds and gain.interval == (-0.5, 2.0)
    assert gain.note == "paired standard error 1.25: inside two standard errors, not established"


def test_the_table_gives_mean_and_deviation_beside_the_independent_numbers():
    lines = outcome.table({"gaa": flat([[52, 54], [60, 62]])}, ("a>b", "b>a"), {"a>b": 0.5})
    assert lines[0] == ["method", "measure", "step", "a>b", "b>a", "mean"]
    assert lines[1] == ["gaa", "accuracy", "last", "53.0 +- 1.4", "61.0 +- 1.4", "57.0"]
    assert len(lines) == 1 + 2 * 3 + 1
    assert lines[-1] == ["GAA, independent re-run", "macro-F1", "oracle", "50.0", "", "50.0"]


def test_numbers_have_one_value_a_seed():
    found = outcome.numbers({"gaa": flat([[52, 54], [60, 62]])}, ("a>b", "b>a"))
    np.testing.assert_allclose(found["gaa/accuracy_last"], [56, 58])
    np.testing.assert_allclose(found["gaa b>a/macro_f1"], [60, 62])
