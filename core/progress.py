"""Progress of long work: a bar with rate and time left on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Tracker", "track"]

_log = logging.getLogger(__name__)


def describe(values: Mapping[str, Any]) -> str:
    """Returns "loss=0.123 return=4.56" of host numbers."""
    shown = (f"{k}={v:.4g}" if isinstance(v, int | float) else f"{k}={v}" for k, v in values.items())
    return " ".join(shown)


class Tracker:
    """Counts `total` steps of one piece of work and shows them; made by `track`."""

    def __init__(self, total: int, description: str, *, bar: Progress | None, quiet: bool, interval: float):
        self.total, self.description, self.done = total, description, 0
        self._bar, self._quiet, self._interval = bar, quiet, interval
        self._task = bar.add_task(description, total=total, shown="", rate="") if bar else None
        self._start = self._last = time.monotonic()
        self._first = 0

    def skip(self, n: int) -> None:
        """Counts `n` steps that an earlier run did: they do not enter the rate."""
        self.done = self._first = n
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=n)

    def advance(self, n: int = 1, /, **shown: Any) -> None:
        """Counts `n` more steps; `shown` are the numbers to show beside them."""
        self.done += n
        now = time.monotonic()
        rate = (self.done - self._first) / max(now - self._start, 1e-9)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=n, shown=describe(shown), rate=f"{rate:.3g}/s")
        elif not self._quiet and (now - self._last >= self._interval or self.done >= self.total):
            self._last = now
            left = (self.total - self.done) / rate if rate else float("inf")
            note = f", {left:.0f} s left" if self.done < self.total else f" in {now - self._start:.0f} s"
            text = f"{self.description}: {self.done}/{self.total}, {rate:.3g}/s{note} {describe(shown)}"
            _log.info(text.rstrip())


@contextmanager
def track(total: int, description: str, *, quiet: bool = False, interval: float = 10.0) -> Iterator[Tracker]:
    """Shows progress over `total` steps: a bar if stderr is a terminal, else a log line every `interval` s.

    `quiet` shows nothing. Yields a Tracker.
    """
    if quiet or not sys.stderr.isatty():
        yield Tracker(total, description, bar=None, quiet=quiet, interval=interval)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield Tracker(total, description, bar=bar, quiet=False, interval=interval)
