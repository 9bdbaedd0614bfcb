"""A run's folder: whose it is, whether it is finished, and moving it aside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from core.config import differences, recorded, sha256
from core.errors import UserError
from core.files import read_json, write_json

__all__ = ["finished", "move_aside", "prepare", "settle"]


def settle(workdir: Path, config: ConfigDict) -> None:
    """Raises UserError unless `workdir` is new, empty, or holds a run of exactly this config."""
    if not (workdir / "config.json").is_file():
        if workdir.exists() and not workdir.is_dir():
            raise UserError(f"{workdir} is a file: --workdir wants a folder")
        # A check may come before the run; a dot file is a write that a crash cut short.
        foreign = [p.name for p in _entries(workdir) if p.name != "check.json" and not p.name.startswith(".")]
        if foreign:
            raise UserError(f"{workdir} is no run's folder (it holds {foreign[0]}): choose another --workdir")
        return
    old = recorded(workdir)
    if old.sha256 != sha256(config):
        changed = differences(old.config, config) or "config.json was edited"
        raise UserError(f"{workdir} is of another config ({changed}): choose another --workdir, or --restart")


def prepare(workdir: Path, config: ConfigDict, *, variant: str, overrides: Mapping[str, Any]) -> None:
    """Makes the folder and its config.json, or checks that they are of this config; processes meet here."""
    settle(workdir, config)
    _meet("workdir checked")
    if jax.process_index() == 0 and not (workdir / "config.json").is_file():
        record = {
            "schema": 1,
            "name": config.name,
            "variant": variant,
            "overrides": overrides,
            "config_sha256": sha256(config),
            "config": config.to_dict(),
        }
        try:
            write_json(workdir / "config.json", record)
        except OSError as error:
            raise UserError(f"{workdir}: {error.strerror}; choose another --workdir") from None
    _meet("workdir ready")


def finished(workdir: Path) -> dict[str, Any] | None:
    """Returns summary.json of a run that ended well, else None."""
    try:
        summary = read_json(workdir / "summary.json")
    except (OSError, ValueError):
        return None
    return summary if summary.get("status") == "done" else None


def move_aside(workdir: Path) -> Path | None:
    """Renames a run's folder to WORKDIR.N, the first free N; returns it, None if there is no run.

    Raises UserError for a folder that is no run's, rather than move what is not ours.
    """
    target = None
    if _entries(workdir):
        recorded(workdir)
        number = 1
        while (target := workdir.with_name(f"{workdir.name}.{number}")).exists():
            number += 1
    _meet("workdir to move")
    if target is not None and jax.process_index() == 0:
        workdir.rename(target)
    _meet("workdir moved")
    return target


def _entries(workdir: Path) -> list[Path]:
    return sorted(workdir.iterdir()) if workdir.is_dir() else []


def _meet(what: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)
