"""What a run claims and measured, the environment it ran in, summary.json and its copy in results/."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import operator
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from core.files import plain, write_json

__all__ = ["Claim", "commit", "copy_to_results", "environment", "measured", "render"]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "mujoco", "numpy")


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence of a paper as a number: it holds if `value op threshold`; op is one of >= <= > <.

    `interval` is (lo, hi) at confidence `level`, or None where there is none. A value that is None or not
    finite does not hold.
    """

    name: str
    statement: str
    value: float | None
    interval: tuple[float, float] | None
    level: float
    op: str
    threshold: float
    note: str = ""

    def __post_init__(self) -> None:
        if self.op not in _OPERATORS:
            raise ValueError(f"claim {self.name}: op is one of {' '.join(_OPERATORS)}, not {self.op!r}")

    @property
    def holds(self) -> bool:
        """Whether `value op threshold`."""
        if self.value is None or not math.isfinite(self.value):
            return False
        return bool(_OPERATORS[self.op](self.value, self.threshold))

    def as_dict(self) -> dict[str, Any]:
        """Returns the claim as summary.json holds it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        note = fields.pop("note")
        return plain({**fields, "holds": self.holds, "note": note})


def measured(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metrics as summary.json holds them: `[]` as a number, one value a seed `[S]` as per_seed.

    Raises ValueError for a value of more axes.
    """
    result: dict[str, Any] = {}
    for key, value in metrics.items():
        array = np.asarray(value["per_seed"] if isinstance(value, Mapping) else value, dtype=np.float64)
        if array.ndim > 1:
            raise ValueError(f"metric {key} has shape {array.shape}: a number or one number a seed")
        result[key] = plain({"per_seed": array} if array.ndim else float(array))
    return result


def commit(repository: Path) -> tuple[str | None, bool | None]:
    """Returns (commit, dirty) of the git repository with this root; (None, None) if it is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        # A copy installed inside someone else's repository must not report their commit.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != repository.resolve():
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def environment() -> dict[str, Any]:
    """Returns versions, devices and processes of this run, as summary.json holds them."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **versions,
        "backend": jax.default_backend(),
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "process_count": jax.process_count(),
    }


def copy_to_results(record: Mapping[str, Any], results: Path) -> Path | None:
    """Copies a summary to `results/NAME.json` (variant small) or `results/NAME.VARIANT.json`; its path.

    Smoke and overridden runs measure nothing anyone should quote: they are not copied, and None is returned.
    """
    if record["variant"] == "smoke" or record["overrides"]:
        return None
    suffix = "" if record["variant"] == "small" else f".{record['variant']}"
    path = results / f"{record['name']}{suffix}.json"
    write_json(path, record)
    return path


def render(record: Mapping[str, Any]) -> str:
    """Returns a summary as lines for a terminal: claims with value, interval and verdict, then metrics."""

    def number(value: Any) -> str:
        return "n/a" if value is None else f"{value:.4g}"

    lines = [f"{record['name']} ({record['variant']}): {record['status']} in {record['wall_s']:.0f} s"]
    for claim in record["claims"]:
        interval = claim["interval"]
        band = f" [{number(interval[0])}, {number(interval[1])}]" if interval else ""
        verdict = "holds" if claim["holds"] else "does not hold"
        wanted = f"{claim['op']} {number(claim['threshold'])}"
        lines.append(f"  {claim['name']}: {number(claim['value'])}{band}, wanted {wanted}: {verdict}")
    for key, value in record["metrics"].items():
        seeds: Sequence[Any] = value["per_seed"] if isinstance(value, Mapping) else [value]
        lines.append(f"  {key}: {' '.join(number(seed) for seed in seeds)}")
    return "\n".join(lines)
