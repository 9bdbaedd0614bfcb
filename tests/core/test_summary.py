"""What a run says when it is done: claims that hold by their numbers, the summary and its copy."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import config as configs
from core import run as running
from core import summary as summaries
from core.run import Claim, Run

CONFIG = configs.load("tests/toy/config.py")[0]


class Crash(Exception):
    """Stands for whatever kills a process."""


@pytest.mark.parametrize(
    ("value", "op", "threshold", "holds"),
    [
        (0.5, "<=", 0.5, True),
        (0.5, "<", 0.5, False),
        (0.6, ">=", 0.5, True),
        (0.4, ">", 0.5, False),
        (math.nan, ">=", 0.5, False),
        (None, "<=", 0.5, False),
    ],
)
def test_a_claim_holds_by_its_numbers(value, op, threshold, holds):
    claim = Claim("c", "s", value, None, 0.95, op, threshold)
    assert claim.holds is holds and claim.as_dict()["holds"] is holds


def test_a_claim_with_another_operator_is_a_mistake():
    with pytest.raises(ValueError, match="not '=='"):
        Claim("c", "s", 1.0, None, 0.95, "==", 1.0)


def test_the_summary_has_its_schema_to_the_letter(tmp_path):
    run = Run(CONFIG, tmp_path, variant="smoke", overrides={"batch": 8}, quiet=True)
    claim = Claim("c", "said", np.float32(0.5), (0.25, np.inf), 0.95, "<=", 1, note="why")
    run.summary(
        claims=[claim], metrics={"a": jnp.float32(2), "b": np.arange(3), "bad": np.nan}, seeds=range(3)
    )
    run.close()
    text = (tmp_path / "summary.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    record = json.loads(text)
    assert list(record) == [
        *["schema", "name", "method", "variant", "overrides", "config_sha256", "commit", "dirty", "status"],
        *["seeds", "claims", "metrics", "environment", "wall_s", "compile_s"],
    ]
    assert record["claims"] == [
        {
            **{"name": "c", "statement": "said", "value": 0.5, "interval": [0.25, None], "level": 0.95},
            **{"op": "<=", "threshold": 1, "holds": True, "note": "why"},
        }
    ]
    assert record["metrics"] == {"a": 2.0, "b": {"per_seed": [0.0, 1.0, 2.0]}, "bad": None}
    assert record["seeds"] == [0, 1, 2] and record["status"] == "done" and record["overrides"] == {"batch": 8}
    assert record["environment"]["device_count"] == 8 and record["environment"]["jax"] == jax.__version__


def test_a_metric_of_more_axes_is_a_mistake(tmp_path):
    run = Run(CONFIG, tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"metric m has shape \(2, 2\)"):
        run.summary(claims=[], metrics={"m": np.zeros((2, 2))}, seeds=[0])
    run.close()


@pytest.mark.parametrize(
    ("variant", "overrides", "name"),
    [
        ("small", {}, "toy.json"),
        ("h_sweep", {}, "toy.h_sweep.json"),
        ("smoke", {}, None),
        ("small", {"seed": 1}, None),
        ("full", {"seed": 1}, None),
    ],
)
def test_only_a_run_as_published_is_copied_to_results(tmp_path, variant, overrides, name):
    results = tmp_path / "results"
    run = Run(CONFIG, tmp_path / "w", variant=variant, overrides=overrides, results=results, quiet=True)
    record = run.summary(claims=[], metrics={}, seeds=[0])
    run.close()
    assert [p.name for p in results.glob("*")] == ([name] if name else [])
    if name:
        assert json.loads((results / name).read_text()) == record


def test_time_adds_up_over_resumes_and_not_between_them(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(running, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def go(crash):
        run = Run(CONFIG, tmp_path, quiet=True)

        def step(state, i):
            if crash and i == 2:
                raise Crash
            now[0] += 10
            return state

        try:
            run.loop("a", init=lambda: np.zeros(1), step=step, total=4, checkpoint_every=2)
            return run.summary(claims=[], metrics={}, seeds=[0])["wall_s"]
        finally:
            run.close()

    with pytest.raises(Crash):
        go(crash=True)
    now[0] += 1000
    assert go(crash=False) == 40.0


def test_the_commit_is_that_of_this_repository_only(tmp_path):
    assert summaries.commit(tmp_path) == (None, None)
    below = configs.ROOT / "core"
    assert summaries.commit(below) == (None, None)
