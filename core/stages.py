"""The stages of a run, in order, and where each began in metrics.jsonl: so a resumed log equals a whole one.

A resumed run goes through its program from the start. Up to the stage that was cut short everything it logs
is already in the file, so it is *replaying* and writes nothing; there the file is cut back to the checkpoint.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from core.files import read_json, write_json

__all__ = ["Stages"]


class Stages:
    """Keeps `directory/stages.json`, a list of {name, offset}; `writable` on one process only."""

    def __init__(self, directory: Path, *, writable: bool):
        self._directory, self._writable = directory, writable
        self._path = directory / "stages.json"
        self._offsets: dict[str, int] = {}
        if self._path.is_file():
            self._offsets = {stage["name"]: stage["offset"] for stage in read_json(self._path)}
        self._entered: set[str] = set()
        self.replaying = bool(self._offsets)

    def enter(self, name: str, offset: int) -> int | None:
        """Starts or resumes stage `name`, at `offset` bytes of metrics; returns where it began before.

        None means that no earlier run began this stage. Raises ValueError for a bad or repeated name.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise ValueError(f"stage name {name!r}: letters, digits, '_', '.', '-' only")
        if name in self._entered:
            raise ValueError(f"stage {name!r} ran already: each loop of a run has its own name")
        self._entered.add(name)
        if name in self._offsets:
            return self._offsets[name]
        self.replaying = False
        self._offsets[name] = offset
        self._write()
        return None

    @property
    def names(self) -> list[str]:
        """The stages begun so far, in order."""
        return list(self._offsets)

    def is_last(self, name: str) -> bool:
        """Whether no later stage has begun."""
        return self.names[-1] == name

    def forget_after(self, name: str) -> None:
        """Drops the stages after `name` and their checkpoints: they grew from a state now replaced."""
        for later in self.names[self.names.index(name) + 1 :]:
            del self._offsets[later]
            if self._writable:
                shutil.rmtree(self._directory / later, ignore_errors=True)
        self._write()

    def _write(self) -> None:
        if self._writable:
            write_json(self._path, [{"name": name, "offset": at} for name, at in self._offsets.items()])
