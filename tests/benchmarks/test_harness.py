"""The harness against times that are known, and what it leaves behind."""

import json
import math

import jax
import numpy as np
import pytest

from benchmarks import harness
from benchmarks.harness import Benchmark, Growth, Point
from core import config

ROW_FIELDS = [
    "id",
    "work",
    "size",
    "peer",
    "peer_version",
    "ours",
    "theirs",
    "unit",
    "ratio",
    "ratio_interval",
]
ROW_FIELDS += ["pairs", "outputs_equal", "tolerance", "target", "met", "compile_s", "peak_bytes"]
OURS, THEIRS = [1.0, 2.0, 1.0, 4.0, 1.0], [3.0, 4.0, 2.0, 4.0, 2.5]


def row(**changes):
    options = {"work": "adding", "size": "5", "ours": OURS, "theirs": THEIRS, "target": 2.0}
    return harness.paired_row("add", **options | {"outputs_equal": True, "tolerance": 0.0} | changes)


def strict(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_pairs_alternate_who_goes_first():
    order = []
    clock = iter(range(100))

    def side(name):
        def measure(i):
            order.append(f"{name}{i}")
            return float(next(clock))

        return measure

    ours, theirs = harness.alternate(side("a"), side("b"), pairs=5)
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2", "b3", "a3", "a4", "b4"]
    assert ours == [0, 3, 4, 7, 8]
    assert theirs == [1, 2, 5, 6, 9]
    with pytest.raises(ValueError, match="4 pairs are too few"):
        harness.alternate(side("a"), side("b"), pairs=4)


def test_ratio_is_the_median_over_pairs_and_above_one_when_we_are_faster():
    measured = row()
    assert (measured.ours, measured.theirs, measured.unit) == (1.0, 3.0, "s")
    assert measured.ratio == 2.0  # of 3, 2, 2, 1, 2.5; the ratio of medians would be 3
    low, high = measured.ratio_interval
    assert 1.0 <= low <= 2.0 <= high <= 3.0
    assert measured.met is True
    assert row(ours=THEIRS, theirs=OURS).ratio == 0.5


def test_rates_divide_the_work_and_keep_the_direction_of_the_ratio():
    measured = row(amount=60.0)
    assert (measured.ours, measured.theirs, measured.unit) == (60.0, 20.0, "1/s")
    assert measured.ratio == 2.0


def test_a_target_is_met_only_with_equal_outputs():
    assert row(target=2.01).met is False
    assert row(outputs_equal=False).met is False
    assert row(outputs_equal=None).met is False
    assert row(target=None).met is None


def test_an_absolute_figure_has_no_ratio():
    measured = row(theirs=None, target=None, outputs_equal=None, tolerance=None)
    assert measured.ours == 1.0
    assert {measured.theirs, measured.ratio, measured.ratio_interval, measured.met} == {None}


def test_too_few_or_unequal_pairs_make_no_row():
    with pytest.raises(ValueError, match="not 5 pairs"):
        row(ours=OURS[:4], theirs=THEIRS[:4])
    with pytest.raises(ValueError, match="5 and 4 measurements"):
        row(theirs=THEIRS[:4])


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_exponent_of_a_power_law(power):
    points = [Point(x, 7 * x**power, None, "s") for x in (1, 4, 10, 300)]
    assert math.isclose(harness.exponent(points), power, abs_tol=1e-12)


def test_the_peer_gets_its_fastest_variant():
    calls = []

    def work(name, n):
        def run():
            calls.append(name)
            return np.linalg.norm(np.ones(n))

        return run

    assert harness.fastest({"slow": work("slow", 4_000_000), "quick": work("quick", 4)}) == "quick"
    assert calls.count("slow") == calls.count("quick") == 4


def test_compiling_is_timed_apart_and_its_memory_known():
    product, compile_s, peak_bytes = harness.compile_and_time(lambda a: a @ a, np.ones((64, 64), np.float32))
    assert compile_s > 0
    assert peak_bytes >= 2 * 4 * 64 * 64  # the argument and the result
    assert float(product(np.ones((64, 64), np.float32))[0, 0]) == 64


def test_host_memory_is_that_of_the_call():
    kept = np.ones(1_000_000)
    assert 8e6 <= harness.host_peak_bytes(lambda: kept + 1) < 9e6


def addition(quick):
    points = (Point(1, 2.0, 3.0, "s"), Point(2, 4.0, None, "s"))
    return [row(ours=[float("inf")] * 5 if quick else OURS)], [Growth("add", "size", points, 1.0)]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    return tmp_path / "results"


def test_a_full_run_prints_a_table_and_writes_the_whole_schema(results, capsys):
    assert harness.main("toy", {"add": Benchmark(addition)}, []) == 0
    record = strict(results / "bench_toy.json")
    assert list(record) == ["schema", "name", "threads", "rows", "growth", "environment"]
    assert (record["schema"], record["name"], record["threads"]) == (1, "toy", harness.threads())
    assert [list(each) for each in record["rows"]] == [ROW_FIELDS]
    assert record["rows"][0]["ratio"] == 2.0
    assert len(record["rows"][0]["ratio_interval"]) == 2
    assert record["growth"] == [
        {
            "id": "add",
            "axis": "size",
            "points": [
                {"x": 1, "ours": 2.0, "theirs": 3.0, "unit": "s"},
                {"x": 2, "ours": 4.0, "theirs": None, "unit": "s"},
            ],
            "exponent": 1.0,
        }
    ]
    assert record["environment"]["backend"] == "cpu"
    assert list(results.iterdir()) == [results / "bench_toy.json"]
    printed = capsys.readouterr().out
    assert "ratio 2 [" in printed
    assert "wanted 2: met" in printed
    assert "exponent 1.00" in printed


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "add"]])
def test_a_part_of_a_run_writes_nothing(results, arguments):
    assert harness.main("toy", {"add": Benchmark(addition)}, arguments) == 0
    assert not results.exists()


def test_only_runs_what_it_names(results, capsys):
    def never(quick):
        raise AssertionError("not asked for")

    table = {"add": Benchmark(addition), "other": Benchmark(never, peer="no_such_peer")}
    assert harness.main("toy", table, ["--only=add"]) == 0
    assert harness.main("toy", table, ["--only=ad"]) == 2
    assert "no benchmark 'ad'; did you mean 'add'?" in capsys.readouterr().err


def test_a_missing_peer_stops_the_run_before_it_starts(results, capsys):
    table = {"add": Benchmark(addition), "other": Benchmark(addition, peer="no_such_peer")}
    assert harness.main("toy", table, []) == 2
    printed = capsys.readouterr()
    assert "other compares with no_such_peer, which is not installed: run `make parity`" in printed.err
    assert "extra `bench`" in printed.err
    assert printed.out == ""
    assert not results.exists()


def test_the_compilation_cache_of_a_run_is_its_own(results):
    before = jax.config.jax_compilation_cache_dir
    seen = []

    def look(quick):
        seen.append(jax.config.jax_compilation_cache_dir)
        return [], []

    assert harness.main("toy", {"look": Benchmark(look)}, ["--quick"]) == 0
    assert seen[0] != before
    assert jax.config.jax_compilation_cache_dir == before
