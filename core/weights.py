"""Frozen policies and value functions as .npz files that anything with numpy can read or write."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError
from core.files import write_bytes

__all__ = ["load_npz", "save_npz"]

PyTree = Any
_UNREADABLE = (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)


def save_npz(path: Path, tree: PyTree) -> None:
    """Writes each leaf `[...]` under its path in the tree, like `params/Dense_0/kernel`, all or nothing.

    Formats that numpy's files do not know (bfloat16, float8) are kept as float32, without loss.

    Raises:
      UserError: two leaves have the same path (a dict key that holds a slash).
    """
    arrays: dict[str, Any] = {}
    for name, leaf in _named(tree):
        if name in arrays:
            raise UserError(f"{path}: two leaves are named {name}; a key must not hold a slash")
        array = np.asarray(leaf)
        arrays[name] = array if array.dtype.kind in "biufc" else array.astype(np.float32)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_bytes(Path(path), buffer.getvalue())


def load_npz(path: Path, like: PyTree) -> PyTree:
    """Reads a tree that `save_npz` wrote, or that another program wrote under the same names.

    Args:
      path: an .npz file; nothing in it is executed (no pickles).
      like: arrays or `jax.ShapeDtypeStruct`s `[...]` that give structure, shapes and dtypes; floating point
        numbers are converted to the dtype here, other dtypes must be equal.

    Raises:
      UserError: not a readable .npz; names that are missing or unexpected; another shape or dtype.
    """
    wanted = dict(_named(like))
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path}: not a readable .npz of plain arrays ({reason})") from error
    missing, unexpected = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unexpected:
        raise UserError(
            f"{path}: the names differ from this network's; missing: {_list(missing)}; "
            f"unexpected: {_list(unexpected)}"
        )
    for name, leaf in wanted.items():
        array, dtype = stored[name], jnp.dtype(leaf.dtype)
        both_floating = jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
        if array.shape != leaf.shape or not (array.dtype == dtype or both_floating):
            raise UserError(
                f"{path}: {name} is {array.dtype}{list(array.shape)} in the file and "
                f"{dtype}{list(leaf.shape)} in this network"
            )
        stored[name] = jnp.asarray(array, dtype)
    return jax.tree.unflatten(jax.tree.structure(like), [stored[name] for name in wanted])


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/") or "array", leaf) for path, leaf in pairs]


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:8]) or "none"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
