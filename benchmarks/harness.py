"""What every `python -m benchmarks.NAME` shares: alternating pairs, ratios with intervals, the results file.

A ratio above 1 always means that we are better: less time, more per second, fewer bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from core import config, stats, summary
from core.errors import UserError, explain, nearest
from core.files import write_json

__all__ = [
    "PAIRS",
    "Benchmark",
    "Growth",
    "Point",
    "Row",
    "alternate",
    "compile_and_time",
    "exponent",
    "fastest",
    "host_peak_bytes",
    "main",
    "paired_row",
    "seconds",
    "threads",
    "version",
]

PAIRS = 5  # fewer have no median worth its interval


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison, or one absolute figure (`theirs`, `ratio` and the peer None), as the file holds it.

    `ours` and `theirs` are medians in `unit` ("s", "bytes" or "1/s"); `ratio` is the median of the pairs' own
    ratios, `ratio_interval` its 95 % interval; `compile_s` and `peak_bytes` are ours.
    """

    id: str
    work: str
    size: str
    peer: str | None
    peer_version: str | None
    ours: float
    theirs: float | None
    unit: str
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    pairs: int
    outputs_equal: bool | None
    tolerance: float | None
    target: float | None
    met: bool | None
    compile_s: float | None
    peak_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Point:
    """What `ours` and `theirs` measured, in `unit`, at size `x`."""

    x: float
    ours: float
    theirs: float | None
    unit: str


@dataclasses.dataclass(frozen=True)
class Growth:
    """How `ours` grows along `axis`: like x ** exponent; None where that is not the question."""

    id: str
    axis: str
    points: tuple[Point, ...]
    exponent: float | None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """`run(quick)` measures and returns rows and growth curves; `peer` is a module it can not do without.

    `quick` asks for the smallest work that still runs all code.
    """

    run: Callable[[bool], tuple[Sequence[Row], Sequence[Growth]]]
    peer: str | None = None


def seconds(function: Callable[[], Any]) -> float:
    """Wall seconds of one call; arrays `[..]` in what it returns are waited for."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def alternate(
    ours: Callable[[int], float], theirs: Callable[[int], float], *, pairs: int = PAIRS
) -> tuple[list[float], list[float]]:
    """Measures both sides in the order ours, theirs, theirs, ours, ..: drifts of the machine cancel.

    Args:
      ours, theirs: measure pair i on equal work, in seconds or bytes.
      pairs: at least PAIRS.

    Returns:
      the measurements `[pairs]` of both sides.
    """
    if pairs < PAIRS:
        raise ValueError(f"{pairs} pairs are too few for a median: take at least {PAIRS}")
    sides: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs):
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            sides[side].append((ours, theirs)[side](i))
    return sides


def paired_row(
    id: str,
    *,
    work: str,
    size: str,
    ours: Sequence[float],
    theirs: Sequence[float] | None = None,
    amount: float | None = None,
    unit: str = "s",
    peer: str | None = None,
    peer_version: str | None = None,
    outputs_equal: bool | None = None,
    tolerance: float | None = None,
    target: float | None = None,
    compile_s: float | None = None,
    peak_bytes: int | None = None,
) -> Row:
    """The row of measurements `[pairs]` in which less is better; `theirs` None records an absolute figure.

    Args:
      amount: units of work behind each measurement in seconds; the row is then a rate in 1/s.
      outputs_equal: whether both sides gave the same, within `tolerance`. False can not meet a target.
    """
    ratio = interval = met = None
    if theirs is not None:
        if len(ours) != len(theirs) or len(ours) < PAIRS:
            raise ValueError(f"{id}: {len(ours)} and {len(theirs)} measurements are not {PAIRS} pairs")
        ratios = np.asarray(theirs, float) / np.asarray(ours, float)
        ratio, low, high, _ = stats.stratified_bootstrap(ratios, np.median)
        interval = (low, high)
        met = None if target is None else bool(ratio >= target and outputs_equal)

    def middle(values: Sequence[float]) -> float:
        return float(np.median(values)) if amount is None else amount / float(np.median(values))

    return Row(
        id=id,
        work=work,
        size=size,
        peer=peer,
        peer_version=peer_version,
        ours=middle(ours),
        theirs=None if theirs is None else middle(theirs),
        unit=unit if amount is None else "1/s",
        ratio=ratio,
        ratio_interval=interval,
        pairs=len(ours),
        outputs_equal=outputs_equal,
        tolerance=tolerance,
        target=target,
        met=met,
        compile_s=compile_s,
        peak_bytes=peak_bytes,
    )


def exponent(points: Sequence[Point]) -> float:
    """Slope of log(ours) against log(x) by least squares: 1 is linear, 0 is free."""
    x, ours = np.log([[point.x, point.ours] for point in points]).T
    return float(np.polyfit(x, ours, 1)[0])


def fastest(variants: Mapping[Any, Callable[[], Any]], *, repeats: int = 3) -> Any:
    """Key of the variant with the shortest of `repeats` calls after a first: a peer gets its best setting."""
    for variant in variants.values():
        variant()
    return min(variants, key=lambda key: min(seconds(variants[key]) for _ in range(repeats)))


def compile_and_time(function: Callable, *arguments: Any, **options: Any) -> tuple[Any, float, int | None]:
    """Compiles `function` for `arguments` `[..]`; `options` are those of jax.jit.

    Returns:
      (the compiled function, seconds of tracing and compiling, peak bytes of a call or None if unknown).
    """
    start = time.perf_counter()
    compiled = jax.jit(function, **options).lower(*arguments).compile()
    compile_s = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    return compiled, compile_s, int(getattr(analysis, "peak_memory_in_bytes", 0)) or None


def host_peak_bytes(function: Callable[[], Any]) -> int:
    """Peak bytes of Python and numpy memory that one (untimed) call of `function` adds."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def threads() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str:
    """Installed version of a peer."""
    return importlib.metadata.version(package)


def main(name: str, benchmarks: Mapping[str, Benchmark], arguments: Sequence[str] | None = None) -> int:
    """The command `python -m benchmarks.NAME [--only ID[,ID]] [--quick]`.

    Prints a table as it goes; a full run writes results/bench_NAME.json, a part of it measures nothing anyone
    should quote and writes nothing.

    Returns:
      the exit code: 0 whether or not targets are met, 2 for an unknown ID or a missing peer.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description="Times us against peers; a ratio above 1 means that we are better.",
    )
    parser.add_argument("--only", metavar="ID[,ID]", help=f"some of: {', '.join(benchmarks)}")
    parser.add_argument("--quick", action="store_true", help="little work, to see that all of it runs")
    flags = parser.parse_args(arguments)
    try:
        chosen = _chosen(benchmarks, flags.only)
        rows, growth = [], []
        with _empty_compilation_cache():
            for id in chosen:
                print(f"{id} ..", flush=True)
                new_rows, new_growth = benchmarks[id].run(flags.quick)
                print("\n".join([*map(_row_text, new_rows), *map(_growth_text, new_growth)]), flush=True)
                rows += new_rows
                growth += new_growth
        if flags.quick or flags.only:
            print("not written to results/: only a full run is")
        else:
            path = config.ROOT / "results" / f"bench_{name}.json"
            write(path, name, rows, growth)
            print(f"wrote {path}")
    except UserError as error:
        return explain(error)
    return 0


def write(path: Path, name: str, rows: Sequence[Row], growth: Sequence[Growth]) -> None:
    """Writes the results file, whole or not at all: strict JSON, `{schema: 1, name, threads, rows, ..}`."""
    record = {
        "schema": 1,
        "name": name,
        "threads": threads(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "growth": [dataclasses.asdict(curve) for curve in growth],
        "environment": summary.environment(),
    }
    write_json(path, record)


@contextlib.contextmanager
def _empty_compilation_cache():
    """Compile times are those of a first run, while a peer that compiles anew in every call does so once."""
    before = jax.config.jax_compilation_cache_dir
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        try:
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", before)


def _chosen(benchmarks, only):
    chosen = only.split(",") if only else list(benchmarks)
    for id in chosen:
        if id not in benchmarks:
            raise UserError(f"--only: no benchmark {id!r}{nearest(id, benchmarks)} ({', '.join(benchmarks)})")
        peer = benchmarks[id].peer
        if peer and importlib.util.find_spec(peer) is None:
            raise UserError(
                f"{id} compares with {peer}, which is not installed: "
                "run `make parity` (extra `bench` names the version)"
            )
    return chosen


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _row_text(row: Row) -> str:
    unit = "/s" if row.unit == "1/s" else f" {row.unit}"
    facts = [f"ours {_number(row.ours)}{unit}"]
    if row.theirs is not None:
        low, high = row.ratio_interval or (None, None)
        facts += [
            f"{row.peer} {row.peer_version} {_number(row.theirs)}{unit}",
            f"ratio {_number(row.ratio)} [{_number(low)}, {_number(high)}] of {row.pairs} pairs",
        ]
    if row.target is not None:
        facts.append(f"wanted {row.target:g}: {'met' if row.met else 'NOT met'}")
    if row.outputs_equal is not None:
        facts.append(f"outputs {'equal' if row.outputs_equal else 'DIFFER'} within {row.tolerance:g}")
    if row.compile_s is not None:
        facts.append(f"compiled in {row.compile_s:.1f} s")
    if row.peak_bytes is not None:
        facts.append(f"peak {_number(row.peak_bytes / 2**20)} MiB")
    return f"  {row.work}\n  {row.size}\n    {'; '.join(facts)}"


def _growth_text(curve: Growth) -> str:
    lines = [f"  {curve.id}: {curve.points[0].unit} by {curve.axis}"]
    for point in curve.points:
        beside = "" if point.theirs is None else f", peer {_number(point.theirs)}"
        lines.append(f"    {_number(point.x)}: {_number(point.ours)}{beside}")
    if curve.exponent is not None:
        lines.append(f"    ours grows with exponent {curve.exponent:.2f}")
    return "\n".join(lines)
