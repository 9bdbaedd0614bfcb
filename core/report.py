"""report.html: one offline file that says what a run claimed, what it measured, and where it ran."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import UserError
from core.files import read_json, write_bytes

__all__ = ["write"]

_POINTS = 300  # of a curve: more than a panel has pixels
_OPERATORS = {">=": "≥", "<=": "≤", ">": "&gt;", "<": "&lt;"}


def write(workdir: Path) -> Path:
    """Writes WORKDIR/report.html from config.json, summary.json, metrics.jsonl, figures/; its path.

    Works at any time: a run without summary.json is shown as unfinished. Nothing is loaded from elsewhere.

    Raises:
      UserError: the folder holds no run, or its config.json or summary.json can not be read.
    """
    workdir = Path(workdir)
    record = _json(workdir / "config.json")
    if record is None:
        raise UserError(f"{workdir}: no config.json, so there is no run to report on; check --workdir")
    summary = _json(workdir / "summary.json")
    curves = _curves(workdir / "metrics.jsonl")
    sections = [
        _header(record, summary),
        _claims(summary["claims"]) if summary else "",
        _figures(workdir / "figures"),
        _measured(summary["metrics"]) if summary else "",
        _panels(curves),
        _environment(summary) if summary else "",
        _config(record),
    ]
    name, body = escape(str(record["name"])), "\n".join(filter(None, sections))
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}: report</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )
    path = workdir / "report.html"
    write_bytes(path, page.encode())
    return path


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can not be read ({error}); it was edited or the disk is damaged") from error


def _header(record: Mapping[str, Any], summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        status = '<span class="badge open">not finished</span>'
        facts = ["The run has written no summary yet: this page shows what is there so far."]
    else:
        status = f'<span class="badge done">{escape(summary["status"])}</span>'
        held = sum(bool(claim["holds"]) for claim in summary["claims"])
        changed = " with changes" if summary["dirty"] else ""
        facts = [
            f"{held} of {len(summary['claims'])} claims hold" if summary["claims"] else "",
            f"seeds {', '.join(map(str, summary['seeds']))}",
            f"{_duration(summary['wall_s'])}, of which {_duration(summary['compile_s'])} compiling",
            f"commit {summary['commit'][:10]}{changed}" if summary["commit"] else "",
        ]
    overrides = "".join(
        f"<code>--config.{escape(key)}={escape(str(value))}</code> "
        for key, value in (record.get("overrides") or {}).items()
    )
    return (
        f"<header><h1>{escape(record['name'])} <small>{escape(record['variant'])}</small> {status}</h1>"
        f'<p class="facts">{" · ".join(escape(fact) for fact in facts if fact)}</p>'
        + (f'<p class="facts">overridden: {overrides}</p>' if overrides else "")
        + "</header>"
    )


def _claims(claims: Sequence[Mapping[str, Any]]) -> str:
    if not claims:
        return ""
    rows = []
    for claim in claims:
        interval = claim["interval"]
        band = f'<div class="muted">[{", ".join(map(_number, interval))}]</div>' if interval else ""
        level = f"{100 * claim['level']:g} % interval" if interval else "no interval"
        badge = ("holds", "holds") if claim["holds"] else ("fails", "does not hold")
        note = f'<div class="muted">{escape(claim["note"])}</div>' if claim["note"] else ""
        rows.append(
            f"<tr><td><code>{escape(claim['name'])}</code><div>{escape(claim['statement'])}</div>{note}</td>"
            f'<td class="number" title="{level}"><b>{_number(claim["value"])}</b>{band}</td>'
            f'<td class="number">{_OPERATORS[claim["op"]]} {_number(claim["threshold"])}</td>'
            f'<td>{_claim_plot(claim)}</td><td><span class="badge {badge[0]}">{badge[1]}</span></td></tr>'
        )
    head = "<tr><th>claim</th><th>measured</th><th>wanted</th><th></th><th></th></tr>"
    return f"<section><h2>Claims</h2><table class='wide'>{head}{''.join(rows)}</table></section>"


def _claim_plot(claim: Mapping[str, Any]) -> str:
    """The value with its interval as a dot and bar, over the side of the threshold where the claim holds."""
    value, threshold = claim["value"], claim["threshold"]
    if value is None:
        return ""
    low, high = claim["interval"] or (value, value)
    numbers = [x for x in (value, threshold, low, high) if x is not None]
    margin = 0.15 * (max(numbers) - min(numbers) or abs(value) or 1.0)
    start, end = min(numbers) - margin, max(numbers) + margin

    def at(x: float) -> float:
        return round(160 * (x - start) / (end - start), 1)

    good = (at(threshold), 160.0) if claim["op"].startswith(">") else (0.0, at(threshold))
    bar = "" if low is None or high is None else f'<path class="line" d="M{at(low)} 12H{at(high)}"/>'
    return (
        '<svg class="claim" viewBox="0 0 160 24" width="160" height="24" aria-hidden="true">'
        f'<rect class="good" x="{good[0]}" width="{round(good[1] - good[0], 1)}" height="24"/>'
        f'<path class="threshold" d="M{at(threshold)} 0V24"/>{bar}'
        f'<circle cx="{at(value)}" cy="12" r="4"/></svg>'
    )


def _figures(folder: Path) -> str:
    captions = _json(folder / "captions.json") or {}
    paths = {path.stem: path for path in sorted(folder.glob("*.png"))}
    ordered = [name for name in captions if name in paths] + [name for name in paths if name not in captions]
    shown = "".join(
        f'<figure><img alt="{escape(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(paths[name].read_bytes()).decode()}">'
        f"<figcaption>{escape(captions.get(name) or name.replace('_', ' '))}</figcaption></figure>"
        for name in ordered
    )
    return f'<section><h2>Figures</h2><div class="figures">{shown}</div></section>' if shown else ""


def _measured(metrics: Mapping[str, Any]) -> str:
    rows = []
    for key, value in metrics.items():
        seeds = value["per_seed"] if isinstance(value, Mapping) else [value]
        finite = [seed for seed in seeds if seed is not None]
        middle = _number(float(np.median(finite))) if finite else _number(None)
        each = " ".join(_number(seed) for seed in seeds) if len(seeds) > 1 else ""
        rows.append([f"<code>{escape(key)}</code>", f"<b>{middle}</b>", each])
    table = _table(rows, ["metric", "value or median", "per seed"])
    return f"<section><h2>Measured</h2>{table}</section>" if rows else ""


def _curves(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Key -> [(step, value)]; null is NaN. A last line that a crash cut short is left out."""
    curves: dict[str, list[tuple[float, float]]] = {}
    if not path.is_file():
        return curves
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            for key, value in record.items():
                if key not in ("step", "time"):
                    point = (record["step"], np.nan if value is None else value)
                    curves.setdefault(key, []).append(point)
    return curves


def _panels(curves: Mapping[str, list[tuple[float, float]]]) -> str:
    groups: dict[str, list[str]] = {}
    for key, points in curves.items():
        group, _, name = key.rpartition("/")
        groups.setdefault(group, []).append(_panel(name, np.array(points, np.float64)))
    shown = "".join(
        (f"<h3>{escape(group)}</h3>" if group else "") + f'<div class="panels">{"".join(panels)}</div>'
        for group, panels in sorted(groups.items(), key=lambda item: item[0] != "")
    )
    return f"<section><h2>Curves</h2>{shown}</section>" if shown else ""


def _panel(name: str, points: np.ndarray) -> str:
    """One small chart of points `[N, 2]`: the value over steps, with the ends of both axes."""
    finite = points[np.isfinite(points[:, 1])]
    last = _number(float(finite[-1, 1])) if len(finite) else _number(None)
    title = f'<div class="title"><span>{escape(name)}</span><b>{last}</b></div>'
    if not len(finite):
        return f'<div class="panel">{title}<div class="muted">no finite value</div></div>'
    (left, low), (right, high) = finite.min(axis=0), finite.max(axis=0)
    if len(points) > _POINTS:
        points = np.array([np.mean(part, axis=0) for part in np.array_split(points, _POINTS)])
    x = 4 + 232 * (points[:, 0] - left) / (right - left or 1)
    y = 76 - 70 * (points[:, 1] - low) / (high - low or 1)
    pieces = np.split(np.column_stack([x, y]), np.flatnonzero(~np.isfinite(y)))
    paths = []
    for piece in pieces:
        piece = piece[np.isfinite(piece[:, 1])]
        if len(piece) == 1:
            paths.append(f'<circle cx="{piece[0, 0]:.1f}" cy="{piece[0, 1]:.1f}" r="2"/>')
        elif len(piece):
            paths.append(f'<path class="line" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in piece)}"/>')
    return (
        f'<div class="panel">{title}<svg viewBox="0 0 240 92" role="img" aria-label="{escape(name)}">'
        f'<path class="axis" d="M4 80H236"/>{"".join(paths)}'
        f'<text x="4" y="90">{_number(left)}</text>'
        f'<text x="236" y="90" class="end">{_number(right)}</text></svg>'
        f'<div class="muted">{_number(low)} to {_number(high)}</div></div>'
    )


def _environment(summary: Mapping[str, Any]) -> str:
    facts = {key: "n/a" if value is None else str(value) for key, value in summary["environment"].items()}
    rows = [[escape(key), escape(value)] for key, value in facts.items()]
    return f"<section><h2>Environment</h2>{_table(rows)}</section>"


def _config(record: Mapping[str, Any]) -> str:
    flat = _flat(record["config"])
    rows = [[f"<code>{escape(key)}</code>", f"<code>{escape(value)}</code>"] for key, value in flat]
    digest = f'<p class="muted">sha256 {escape(str(record.get("config_sha256", "")))}</p>'
    return f"<section><details><summary><h2>Config</h2></summary>{digest}{_table(rows)}</details></section>"


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    top = f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


_CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1c2430; --muted: #667085;
  --line: #e3e6eb; --accent: #0067b1; --good: #e5f5ec; --holds: #117a45; --fails: #b42318; --open: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --ink: #e6e9ee;
  --muted: #98a2b3; --line: #303845; --accent: #5db2f0; --good: #17392a; --holds: #4cc38a; --fails: #ff8b7e;
  --open: #f0b94a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 28px; margin: 0 0 6px; } h1 small { color: var(--muted); font-weight: 400; font-size: 20px; }
h2 { font-size: 18px; margin: 0 0 12px; } h3 { font-size: 14px; margin: 18px 0 8px; color: var(--muted); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px;
  margin-top: 20px; overflow-x: auto; }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.facts, .muted { color: var(--muted); } .facts { margin: 0; } .muted { font-size: 13px; }
.badge { display: inline-block; padding: 2px 10px; border: 1px solid; border-radius: 999px; font-size: 13px;
  font-weight: 600; white-space: nowrap; vertical-align: middle; }
.holds, .done { color: var(--holds); } .fails { color: var(--fails); } .open { color: var(--open); }
table { border-collapse: collapse; } table.wide { width: 100%; }
th { text-align: left; font-size: 13px; font-weight: 500; color: var(--muted); }
td, th { padding: 5px 20px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .wide td { vertical-align: middle; }
.number, table b, .panel b { white-space: nowrap; font-variant-numeric: tabular-nums; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 20px; }
figure { margin: 0; } figure img { width: 100%; border-radius: 6px; background: #fff; }
figcaption { color: var(--muted); font-size: 13px; margin-top: 4px; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 14px; }
.panel { border: 1px solid var(--line); border-radius: 8px; padding: 8px 10px; }
.title { display: flex; justify-content: space-between; gap: 8px; font-size: 13px; overflow-wrap: anywhere; }
.panel svg { display: block; width: 100%; } svg text { font-size: 9px; fill: var(--muted); }
svg .end { text-anchor: end; } svg circle { fill: var(--accent); }
svg .line { fill: none; stroke: var(--accent); stroke-width: 1.6; stroke-linejoin: round; }
svg .axis, svg .threshold { stroke: var(--line); } svg .threshold { stroke: var(--muted);
  stroke-dasharray: 3 2; } svg .good { fill: var(--good); } svg.claim .line { stroke-width: 3; }
details summary { cursor: pointer; } details summary h2 { display: inline-block; margin: 0; }
@media (max-width: 520px) { .figures { grid-template-columns: 1fr; } }
"""
