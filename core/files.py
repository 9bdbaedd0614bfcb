"""Files that are either whole or absent, and JSON that any reader accepts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["plain", "read_json", "write_bytes", "write_json"]


def plain(value: Any) -> Any:
    """Returns `value` as strict-JSON data: None, bool, int, finite float, str, list, dict with str keys.

    Arrays of any shape `[..]` become nested lists, 0-d arrays numbers, paths strings; non-finite numbers
    become None. Raises TypeError for anything else, with its type.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path` so that readers and crashes see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes `plain(value)` as indented strict JSON, atomically; key order is kept."""
    write_bytes(path, (json.dumps(plain(value), indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads one JSON file; OSError if it is not there, ValueError if it is not JSON."""
    return json.loads(path.read_text(encoding="utf-8"))
