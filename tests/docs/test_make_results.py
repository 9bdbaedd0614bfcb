"""docs/results.md, figures and the README's result follow from results/*.json, and from nothing else."""

import json

import pytest

from core.errors import UserError
from docs import make_results

ENVIRONMENT = {"python": "3.11.7", "jax": "0.10.2", "mujoco": None, "cpu_count": 2}
RUN = {
    "schema": 1,
    "name": "toy",
    "method": "tests.toy",
    "variant": "small",
    "overrides": {},
    "config_sha256": "ab",
    "commit": "0123456789abcdef",
    "dirty": True,
    "status": "done",
    "seeds": [0, 1, 2],
    "claims": [
        {
            "name": "fewer",
            "statement": "fewer steps | than before",
            "value": 0.25,
            "interval": [0.2, 0.75],
            "level": 0.95,
            "op": "<=",
            "threshold": 0.5,
            "holds": True,
            "note": "an upper bound",
        },
        {
            "name": "better",
            "statement": "better",
            "value": None,
            "interval": None,
            "level": 0.95,
            "op": ">=",
            "threshold": 1.0,
            "holds": False,
            "note": "",
        },
    ],
    "metrics": {
        "gap": 0.5,
        "zero/success": {"per_seed": [0.25, 0.25, 0.25]},
        "ours/steps_to_threshold": {"per_seed": [100, 200, 300]},
        "ours/censored": {"per_seed": [0.0, 0.0, 0.0]},
        "ours/success": {"per_seed": [1.0, None, 1.0]},
        "scratch/steps_to_threshold": {"per_seed": [900]},
        "scratch/censored": {"per_seed": [0.0]},
        "theirs/steps_to_threshold": {"per_seed": [400, 800]},
        "theirs/censored": {"per_seed": [0.0, 1.0]},
        "theirs/success": {"per_seed": [0.5]},
    },
    "environment": ENVIRONMENT,
    "wall_s": 600.0,
    "compile_s": 60.0,
}
BENCH = {
    "schema": 1,
    "name": "toy",
    "threads": 2,
    "rows": [
        {
            "id": "update",
            "work": "one update",
            "size": "batch 128",
            "peer": "torch",
            "peer_version": "2.13.0",
            "ours": 1500.0,
            "theirs": 500.0,
            "unit": "1/s",
            "ratio": 3.0,
            "ratio_interval": [2.5, 3.5],
            "pairs": 5,
            "outputs_equal": True,
            "tolerance": 1e-5,
            "target": 2.0,
            "met": True,
            "compile_s": 1.5,
            "peak_bytes": None,
        }
    ],
    "growth": [
        {
            "id": "update",
            "axis": "batch",
            "points": [{"x": 32, "ours": 0.5, "theirs": 1.0, "unit": "s"}],
            "exponent": 0.9,
        }
    ],
    "environment": ENVIRONMENT,
}
README = "Before.\n<!-- toy-result -->\nold\n<!-- /toy-result -->\nAfter.\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def put(root, name, record):
    (root / "results" / name).write_text(json.dumps(record))


def page(root):
    make_results.write(root)
    return (root / "docs" / "results.md").read_text()


def test_it_says_plainly_that_nothing_is_there(root):
    assert "Nothing has been measured yet" in page(root)
    assert "Not measured yet: `make toy`" in (root / "README.md").read_text()
    assert [path.name for path in (root / "docs").iterdir()] == ["results.md"]


def test_claims_carry_value_interval_threshold_and_verdict(root):
    put(root, "toy.json", RUN)
    text = page(root)
    assert (
        r"| `fewer`: fewer steps \| than before | 0.25 | [0.2, 0.75] | <= 0.5 | yes | an upper bound |"
        in text
    )
    assert "| `better`: better | n/a |  | >= 1 | **no** |  |" in text
    assert "3 seeds, 10.0 min of which 1.0 compiling, commit 0123456789 with changes" in text
    assert "Environment: python 3.11.7, jax 0.10.2, cpu_count 2." in text


def test_metrics_are_interquartile_means_with_intervals_per_method(root):
    put(root, "toy.json", RUN)
    text = page(root)
    assert "|  | steps to threshold | censored | success |" in text
    assert "| `ours` | 200 [100, 300] | 0 of 3 | n/a (1 of 3 seeds not finite) |" in text
    assert "| `theirs` | 600 [400, 800] | 1 of 2 | 0.5 |" in text
    assert "| `zero` | 0.25 [0.25, 0.25] |" in text
    assert "|  | gap |\n| --- | --- |\n|  | 0.5 |" in text


def test_the_figure_draws_the_measure_that_most_methods_report(root):
    put(root, "toy.json", RUN)
    put(root, "toy.sweep.json", {**RUN, "variant": "sweep", "metrics": {"accuracy": 0.5}})
    text = page(root)
    assert (root / "docs/figures/toy.png").read_bytes().startswith(b"\x89PNG")
    assert "![toy](figures/toy.png)" in text and "## toy.sweep" in text and "toy.sweep.png" not in text
    axes = make_results._figure(RUN).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert axes.get_xlabel() == "steps to threshold"
    assert labels == ["ours", "scratch", "theirs\n(1 of 2 seeds: not reached)"]


def test_benchmarks_give_both_sides_and_the_ratio(root):
    put(root, "bench_toy.json", BENCH)
    text = page(root)
    assert (
        "| `update`: one update | batch 128 | torch 2.13.0 | 1500 1/s | 500 1/s | 3 [2.5, 3.5] | 2 |" in text
    )
    assert "[2.5, 3.5] | 2 | yes | yes | 1.5 |" in text and "| `update` | batch | 0.9 | 32: 0.5 s |" in text


def test_of_a_long_growth_six_points_are_shown(root):
    points = [{"x": x, "ours": 2.0 * x, "theirs": None, "unit": "s"} for x in range(1, 41)]
    put(root, "bench_toy.json", {**BENCH, "growth": [{**BENCH["growth"][0], "points": points}]})
    assert "| 1: 2 s; 9: 18 s; 17: 34 s; 24: 48 s; 32: 64 s; 40: 80 s |" in page(root)


def test_the_readme_gets_the_claims_and_keeps_the_rest(root):
    put(root, "toy.json", RUN)
    make_results.write(root)
    text = (root / "README.md").read_text()
    assert text.startswith(
        "Before.\n<!-- toy-result -->\n- holds: fewer steps | than before: 0.25 [0.2, 0.75]"
    )
    assert "- **does not hold**: better: n/a, wanted >= 1\n" in text and "\nold\n" not in text
    assert text.endswith("<!-- /toy-result -->\nAfter.\n")


def test_the_same_results_give_the_same_bytes(root):
    put(root, "toy.json", RUN)
    first = {path: path.read_bytes() for path in make_results.write(root)}
    again = {path: path.read_bytes() for path in make_results.write(root)}
    assert root / "README.md" in first and root / "README.md" not in again
    assert all(first[path] == data for path, data in again.items()) and len(again) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}'])
def test_a_file_that_is_no_result_is_named(root, text):
    (root / "results" / "toy.json").write_text(text)
    with pytest.raises(UserError, match=r"results/toy\.json: not a results file"):
        make_results.write(root)


def test_the_command_writes_into_the_repository_it_is_in(root, monkeypatch, capsys):
    monkeypatch.setattr(make_results, "ROOT", root)
    assert make_results.main() == 0
    assert capsys.readouterr().out == "docs/results.md\nREADME.md\n"
    (root / "results" / "toy.json").write_text("{")
    assert make_results.main() == 2 and "toy.json: not a results file" in capsys.readouterr().err
