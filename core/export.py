"""A policy or model that runs without the training code: a jax.export module and its parameters."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from core.errors import UserError
from core.files import read_json

__all__ = ["load", "save"]

PLATFORMS = ("cpu", "cuda", "tpu")


def save(
    directory: str | os.PathLike,
    apply: Callable,
    params: Any,
    example_args: tuple,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Writes `apply(params, *inputs)` to `directory` (module.bin, params.npz, meta.json) for `load`.

    Args:
      directory: made whole or not at all; an export that is there is replaced, anything else is refused.
      apply: pure and jittable; the leading axis of every input `[B, ..]` becomes a batch of any size B >= 1.
      params: pytree of arrays `[..]`; their values are stored once, beside the module.
      example_args: the inputs, as arrays or ShapeDtypeStructs; scalars `[]` (and keys) have no batch.
      platforms: the module is lowered for each; an operation that one of them lacks raises here.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()) and not (directory / "meta.json").is_file():
        raise UserError(f"{directory} holds something that is no export: choose another folder")
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    leaves = [np.asarray(leaf) for _, leaf in paths]
    (batch,) = jax_export.symbolic_shape("batch")

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (batch, *leaf.shape[1:]) if leaf.ndim else ()
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    inputs = jax.tree.map(abstract, example_args)
    stored = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    @jax.jit
    def flat(leaves: list, *inputs: Any) -> Any:
        return apply(jax.tree.unflatten(treedef, leaves), *inputs)

    exported = jax_export.export(flat, platforms=platforms)(stored, *inputs)
    meta = {
        "schema": 1,
        "platforms": list(exported.platforms),
        "inputs": [str(leaf) for leaf in exported.in_avals[len(leaves) :]],
        "outputs": [str(leaf) for leaf in exported.out_avals],
        "parameters": [{"name": n, "dtype": leaf.dtype.name} for n, leaf in zip(names, leaves)],
        "jax": jax.__version__,
    }
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {str(i): _storable(leaf) for i, leaf in enumerate(leaves)}
    np.savez(buffer, **arrays)
    files = {
        "module.bin": bytes(exported.serialize()),
        "params.npz": buffer.getvalue(),
        "meta.json": (json.dumps(meta, indent=2, allow_nan=False) + "\n").encode(),
    }
    _replace_directory(directory, files)


def load(directory: str | os.PathLike) -> Callable:
    """Returns `f(*inputs)` of an export, jitted, for any batch size `[B, ..]`; needs no training code.

    Raises UserError if the folder holds no readable export, or this platform was not among those saved.
    """
    directory = Path(directory)
    try:
        meta = read_json(directory / "meta.json")
        exported = jax_export.deserialize(bytearray((directory / "module.bin").read_bytes()))
        with np.load(directory / "params.npz", allow_pickle=False) as arrays:
            leaves = [arrays[str(i)].view(jnp.dtype(p["dtype"])) for i, p in enumerate(meta["parameters"])]
    except Exception as error:  # each reader has its own exceptions for a damaged file
        raise UserError(f"{directory} holds no readable export ({type(error).__name__}: {error})") from error
    backend = jax.default_backend()
    names = ("cuda", "rocm") if backend == "gpu" else (backend,)
    if not set(names) & set(meta["platforms"]):
        raise UserError(f"{directory} is for {', '.join(meta['platforms'])}, this process runs on {backend}")
    params = [jnp.asarray(leaf) for leaf in leaves]
    call = jax.jit(exported.call)
    return lambda *inputs: call(params, *inputs)


def _storable(leaf: np.ndarray) -> np.ndarray:
    """Numpy's file format has no bfloat16 or float8: their bits are kept as unsigned integers."""
    return leaf if leaf.dtype.kind in "biufc" else leaf.view(f"u{leaf.dtype.itemsize}")


def _replace_directory(directory: Path, files: dict[str, bytes]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    temporary.chmod(0o755)
    try:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        old = None
        if directory.exists():
            old = temporary.with_name(f"{temporary.name}.old")
            directory.rename(old)
        temporary.rename(directory)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
