"""Where numbers of a run go: metrics.jsonl, TensorBoard, and the time spent compiling."""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

__all__ = ["Timer", "Writer", "compile_seconds"]

_log = logging.getLogger(__name__)


class Writer:
    """Appends numbers to WORKDIR/metrics.jsonl and WORKDIR/tensorboard; only process 0 writes."""

    def __init__(self, workdir: Path):
        self._path = Path(workdir) / "metrics.jsonl"
        self._events = Path(workdir) / "tensorboard"
        self._board: SummaryWriter | None = None
        self._main = jax.process_index() == 0
        if self._main:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, float], *, prefix: str = "") -> None:
        """Adds one strict-JSON line {"step", "PREFIX/KEY": value, .., "time": unix seconds}.

        Values are scalars `[]`; NaN and infinities become null. ValueError if a key is "step" or "time".
        """
        if not self._main:
            return
        named = {f"{prefix}/{key}" if prefix else key: _number(value) for key, value in values.items()}
        if clash := {"step", "time"} & set(named):
            raise ValueError(f"{clash.pop()!r} is taken by the record itself: give a prefix or another name")
        record = {"step": int(step), **named, "time": round(time.time(), 3)}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._show(record)

    def offset(self) -> int:
        """Returns the size of metrics.jsonl in bytes, all written lines counted; 0 on other processes."""
        return self._path.stat().st_size if self._main else 0

    def truncate(self, offset: int) -> None:
        """Cuts metrics.jsonl to its first `offset` bytes and writes the TensorBoard events anew from them."""
        if not self._main or offset == self.offset():
            return
        if offset > self.offset():
            _log.warning("%s has lost lines: %d bytes of %d are left", self._path, self.offset(), offset)
            return
        self._file.truncate(offset)
        self._close_board()
        shutil.rmtree(self._events, ignore_errors=True)
        with self._path.open("rb") as lines:
            for line in lines:
                self._show(json.loads(line))

    def flush(self) -> None:
        """Asks the TensorBoard writer to write out its events; the lines of metrics.jsonl already are."""
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flushes and closes both files."""
        if self._main:
            self._file.close()
            self._close_board()

    def _show(self, record: Mapping[str, Any]) -> None:
        if self._board is None:
            self._board = SummaryWriter(
                str(self._events), flush_secs=10, filename_suffix=f".{time.time_ns()}"
            )
        for key, value in record.items():
            if key not in ("step", "time") and value is not None:
                self._board.add_scalar(key, value, record["step"], walltime=record["time"])

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None


def _number(value: Any) -> float | int | None:
    if isinstance(value, Integral):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


class Timer:
    """Measures wall time: `with Timer() as timer: ...`; `timer.seconds` grows until the block ends."""

    def __enter__(self) -> Timer:
        self._start = time.perf_counter()
        self._end: float | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._end = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the block began, or that it took."""
        return (time.perf_counter() if self._end is None else self._end) - self._start


_COMPILING = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
_compiled = 0.0
_lock = threading.Lock()


def compile_seconds() -> float:
    """Returns the seconds spent tracing, lowering and compiling since this module was imported.

    Threads that compile at once add up; a program from the persistent cache counts what reading it took.
    """
    return _compiled


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    global _compiled
    if event.startswith("/jax/core/compile/") and event.endswith(_COMPILING):
        with _lock:
            _compiled += duration_secs


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
