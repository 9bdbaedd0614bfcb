"""`make results`: docs/results.md, docs/figures/NAME.png and the README's result, from results/*.json alone.

The same files give the same bytes: nothing is measured here, and no time is written.
"""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from core import figures, stats
from core.config import ROOT
from core.errors import UserError, explain
from core.files import read_json, write_bytes

__all__ = ["main", "write"]

Record = Mapping[str, Any]
NOTHING = "Nothing has been measured yet: a finished `make sgft` writes `results/sgft.json`.\n"
HEAD = (
    "# Results\n\nWritten by `make results` from `results/*.json`, which only runs and benchmarks write. "
    "How the numbers come about: [methods](methods), [the schemas](architecture.md#files-of-a-run).\n"
)
SECTION = re.compile(r"(<!-- (\w+)-result -->\n).*?(<!-- /\2-result -->)", re.DOTALL)


def main() -> int:
    """Writes everything into this repository and prints each path; returns 0, or 2 for a bad results file."""
    try:
        for path in write(ROOT):
            print(path.relative_to(ROOT))
    except UserError as error:
        return explain(error)
    return 0


def write(root: Path) -> list[Path]:
    """Writes docs/results.md, the figures and the marked parts of README.md below `root`; returns the paths.

    A figure shows the measure that most methods of the file report, of several the first.

    Raises:
      UserError: a file in results/ that can not be read or is of another schema.
    """
    runs: dict[str, Record] = {}
    benches: dict[str, Record] = {}
    for path in sorted((root / "results").glob("*.json")):
        (benches if path.stem.startswith("bench_") else runs)[path.stem] = _read(path)
    written = []
    drawn = {stem: figure for stem, record in runs.items() if (figure := _figure(record))}
    for stem, figure in drawn.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
        written.append(root / "docs" / "figures" / f"{stem}.png")
        write_bytes(written[-1], buffer.getvalue())
    parts = [_run(stem, record, stem in drawn) for stem, record in runs.items()]
    parts += [_bench(stem, record) for stem, record in benches.items()]
    written.append(root / "docs" / "results.md")
    write_bytes(written[-1], "\n".join([HEAD, *(parts or [NOTHING])]).encode())
    readme = root / "README.md"
    if readme.is_file():
        text = readme.read_text(encoding="utf-8")
        filled = SECTION.sub(lambda m: m[1] + _short(runs.get(m[2]), m[2]) + m[3], text)
        if filled != text:
            written.append(readme)
            write_bytes(readme, filled.encode())
    return written


def _read(path: Path) -> Record:
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a results file ({error}); delete it or put the old one back") from None
    if not isinstance(record, Mapping) or record.get("schema") != 1:
        raise UserError(f"{path}: not a results file of schema 1; delete it and measure again")
    return record


def _short(record: Record | None, name: str) -> str:
    """The claims of one run in a few lines of Markdown, for the README."""
    if record is None:
        source = f"`make {name}` writes `results/{name}.json`"
        return f"Not measured yet: {source}, then `make results` fills this in.\n"
    lines = []
    for claim in record["claims"]:
        measured = " ".join(filter(None, [_number(claim["value"]), _interval(claim["interval"])]))
        verdict = "holds" if claim["holds"] else "**does not hold**"
        wanted = f"{claim['op']} {_number(claim['threshold'])}"
        note = f" ({claim['note']})" if claim["note"] else ""
        lines.append(f"- {verdict}: {claim['statement']}: {measured}, wanted {wanted}{note}")
    source = f"From `results/{name}.json`: {_facts(record)}. All numbers: [docs/results.md](docs/results.md)."
    return "\n".join([*lines, "", source, ""])


def _run(stem: str, record: Record, has_figure: bool) -> str:
    lines = [f"## {stem}", "", f"`{record['method']}`, variant {record['variant']}: {_facts(record)}.", ""]
    if has_figure:
        lines += [f"![{stem}](figures/{stem}.png)", ""]
    if record["claims"]:
        head = ["claim", "value", "interval", "wanted", "holds", "note"]
        lines += [*_table(head, map(_claim, record["claims"])), ""]
    lines += [*_metrics(record["metrics"]), f"Environment: {_environment(record['environment'])}.", ""]
    return "\n".join(lines)


def _claim(claim: Record) -> list[str]:
    return [
        f"`{claim['name']}`: {claim['statement']}",
        _number(claim["value"]),
        _interval(claim["interval"]),
        f"{claim['op']} {_number(claim['threshold'])}",
        _yes(claim["holds"]),
        claim["note"],
    ]


def _metrics(metrics: Record) -> list[str]:
    """One table for each group of methods that report the same measures."""
    methods: dict[str, dict[str, Any]] = {}
    for key, value in metrics.items():
        method, _, measure = key.rpartition("/")
        methods.setdefault(method, {})[measure] = value
    groups: dict[tuple[str, ...], list[str]] = {}
    for method, measures in methods.items():
        groups.setdefault(tuple(measures), []).append(method)
    lines = []
    if metrics:
        lines = ["Interquartile mean over seeds with its 95 % bootstrap interval:", ""]
    for shared, names in groups.items():
        rows = [
            [f"`{name}`" if name else "", *(_cell(measure, methods[name][measure]) for measure in shared)]
            for name in names
        ]
        lines += [*_table(["", *(measure.replace("_", " ") for measure in shared)], rows), ""]
    return lines


def _cell(measure: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return _number(value)
    seeds = value["per_seed"]
    missing = sum(seed is None for seed in seeds)
    if missing or not seeds:
        return f"n/a ({missing} of {len(seeds)} seeds not finite)"
    if measure == "censored":
        return _censored(value)
    interval = stats.stratified_bootstrap(seeds)
    return f"{_number(interval.value)} {_interval(interval[1:3])}" if len(seeds) > 1 else _number(seeds[0])


def _censored(value: Record) -> str:
    return f"{sum(map(bool, value['per_seed']))} of {len(value['per_seed'])}"


def _figure(record: Record) -> Figure | None:
    """Bars of the measure that most methods report with finite numbers; None if no two report the same."""
    usable = {
        tuple(key.rsplit("/", 1)): value["per_seed"]
        for key, value in record["metrics"].items()
        if "/" in key and isinstance(value, Mapping) and value["per_seed"] and None not in value["per_seed"]
    }
    reports = Counter(measure for _, measure in usable)
    if not reports or max(reports.values()) < 2:
        return None
    measure = max(reports, key=reports.__getitem__)
    bars = {
        _label(method, measure, record["metrics"]): seeds
        for (method, name), seeds in usable.items()
        if name == measure
    }
    title = record["name"] if record["variant"] == "small" else f"{record['name']} ({record['variant']})"
    return figures.bars(bars, xlabel=measure.replace("_", " "), title=title)


def _label(method: str, measure: str, metrics: Record) -> str:
    """A method's name; where the threshold was not reached the bar is the budget, and the label says so."""
    censored = metrics.get(f"{method}/censored") if measure == "steps_to_threshold" else None
    if not censored or not any(censored["per_seed"]):
        return method
    return f"{method}\n({_censored(censored)} seeds: not reached)"


def _bench(stem: str, record: Record) -> str:
    lines = [f"## {stem}", "", f"`python -m benchmarks.{record['name']}`, {record['threads']} threads. "]
    lines[-1] += "A ratio above 1 means that methodax is better."
    head = ["work", "size", "peer", "ours", "peer's", "ratio", "target", "met", "same outputs", "compile s"]
    lines += ["", *_table(head, map(_pair, record["rows"])), ""]
    if record["growth"]:
        lines += [*_table(["growth of", "with", "exponent", "ours"], map(_growth, record["growth"])), ""]
    return "\n".join([*lines, f"Environment: {_environment(record['environment'])}.", ""])


def _pair(row: Record) -> list[str]:
    return [
        f"`{row['id']}`: {row['work']}",
        str(row["size"]),
        " ".join(filter(None, [row["peer"], row["peer_version"]])),
        f"{_number(row['ours'])} {row['unit']}",
        f"{_number(row['theirs'])} {row['unit']}",
        f"{_number(row['ratio'])} {_interval(row['ratio_interval'])}".strip(),
        _number(row["target"]),
        _yes(row["met"]),
        _yes(row["outputs_equal"]),
        _number(row["compile_s"]),
    ]


def _growth(growth: Record) -> list[str]:
    """One row; of many points the first, the last and four between: a cell holds no more."""
    last = len(growth["points"]) - 1
    shown = [growth["points"][i] for i in sorted({round(k * last / 5) for k in range(6)})]
    points = (f"{_number(p['x'])}: {_number(p['ours'])} {p['unit']}" for p in shown)
    return [f"`{growth['id']}`", growth["axis"], _number(growth["exponent"]), "; ".join(points)]


def _facts(record: Record) -> str:
    seeds = record["seeds"]
    facts = [f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}", f"{record['wall_s'] / 60:.1f} min"]
    facts[-1] += f" of which {record['compile_s'] / 60:.1f} compiling"
    facts += [f"status {record['status']}"] if record["status"] != "done" else []
    if record["commit"]:
        facts.append(f"commit {record['commit'][:10]}{' with changes' if record['dirty'] else ''}")
    return ", ".join(facts)


def _environment(environment: Record) -> str:
    shown = (f"{key} {value}" for key, value in environment.items() if value is not None)
    return ", ".join(shown)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, *rows]]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + " --- |" * len(head), *lines[1:]]


def _interval(interval: Sequence[float | None] | None) -> str:
    return f"[{', '.join(map(_number, interval))}]" if interval else ""


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[value]


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
