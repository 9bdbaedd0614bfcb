"""Numbered checkpoints: written by Orbax in the background, all or nothing, and read back bit for bit."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from core.errors import UserError

__all__ = ["CheckpointError", "Checkpoints", "Restored", "data_position", "set_data_position"]

PyTree = Any
_JAX = (jax.Array, jax.ShapeDtypeStruct)

_log = logging.getLogger(__name__)
_DIGESTS = "digests.json"
_TEMPORARY = ".orbax-checkpoint-tmp"


class CheckpointError(UserError):
    """A checkpoint could not be written, or none could be read; the message names the path and what to do."""


class Restored(NamedTuple):
    """What `Checkpoints.restore` found: the step, the state like `like`, and the host JSON beside it."""

    step: int
    state: PyTree
    host: dict


class Checkpoints:
    """One directory of numbered checkpoints, `DIRECTORY/STEP/`; each process of a run makes the same calls.

    Leaves may be jax arrays (any sharding; typed PRNG keys), numpy arrays and scalars, Python numbers,
    booleans and strings. In a run of several processes arrays are global, or equal on every process.

    Args:
      directory: made at the first save, so that reading never writes.
      keep: how many of the newest checkpoints stay.
    """

    def __init__(self, directory: Path, *, keep: int = 2):
        if keep < 1:
            raise CheckpointError(f"{directory}: keep must be at least 1, got {keep}")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._pending: int | None = None
        self._complete: set[int] | None = None
        self._unreadable: set[int] = set()
        self._orbax = _Checkpointer()

    def save(self, step: int, state: PyTree, host: dict | None = None) -> None:
        """Starts writing `state` and the JSON `host` as one unit; returns once the arrays are copied.

        The caller may donate or change `state` at once. A step that is already there is not written again.

        Raises:
          CheckpointError: this save, or the one before it in the background, failed; others are untouched.
        """
        self.wait()
        if step in self._known() - self._unreadable:
            return
        names, leaves = _named_leaves(state)
        specs = [_describe(name, leaf) for name, leaf in zip(names, leaves)]
        arrays = {n: _storable(x) for n, x, s in zip(names, leaves, specs) if _is_stored(s)}
        # A copy, as the caller may go on changing `host`; what is not JSON fails here, not in the background.
        meta = json.loads(json.dumps({"step": step, "leaves": specs, "host": host or {}}))
        items: dict[str, Any] = {"meta": ocp.args.JsonSave(meta)}
        if arrays:
            items["state"] = ocp.args.PyTreeSave(arrays)
        try:
            self._clean()
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
            self._orbax.save(self.directory / str(step), args=_Items(**items), force=step in self._unreadable)
        except Exception as error:
            raise self._failed(step, error) from error
        self._pending = step

    def wait(self) -> None:
        """Returns once the save in the background is complete; raises its CheckpointError if it failed."""
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._failed(step, error) from error
        self._known().add(step)
        self._unreadable.discard(step)
        self._prune()

    def close(self) -> None:
        """Waits as `wait` does and ends the writer; raises the CheckpointError of a save that failed."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first, without half-written ones."""
        if not self.directory.is_dir():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit() and p.is_dir())

    def restore(self, like: PyTree, step: int | None = None) -> Restored | None:
        """Reads the newest checkpoint whose files are as they were written, or exactly `step`.

        Args:
          like: gives structure, shapes, dtypes and shardings: arrays or `jax.ShapeDtypeStruct`s, placed on
            any number of devices whatever the number at saving. Jax leaves without a placement stay so.
          step: read this one only; by default a damaged newest one is skipped, with one line in the log.

        Returns:
          Restored, or None where nothing has been saved yet.

        Raises:
          CheckpointError: nothing is readable, or what is there has another structure than `like`.
        """
        self.wait()
        steps = sorted(self._known())
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.directory}: there is no checkpoint of step {step}; it has {steps}")
        if not steps:
            return None
        candidates = steps[::-1] if step is None else [step]
        damage: dict[int, str] = {}
        for candidate in candidates:
            path = self.directory / str(candidate)
            meta, reason = _verified_meta(path)
            if meta is not None:
                if damage:
                    bad = "; ".join(f"{self.directory / str(s)} ({why})" for s, why in damage.items())
                    _log.warning("skipped damaged checkpoint %s: continuing from %s instead", bad, path)
                self._unreadable |= set(damage)
                return Restored(candidate, self._load(path, meta, like), meta["host"])
            damage[candidate] = reason
        raise CheckpointError(
            f"{self.directory}: no readable checkpoint; "
            + "; ".join(f"step {s}: {why}" for s, why in damage.items())
            + ". Put an intact copy back, or begin anew with --restart (which moves the run aside)"
        )

    def _load(self, path: Path, meta: dict, like: PyTree) -> PyTree:
        names, leaves = _named_leaves(like)
        _check_structure(path, meta["leaves"], names, leaves)
        specs = {spec["name"]: spec for spec in meta["leaves"]}
        args = {n: _restore_args(x) for n, x in zip(names, leaves) if _is_stored(specs[n])}
        arrays: dict[str, Any] = {}
        try:
            if args:
                items = _Items(state=ocp.args.PyTreeRestore(restore_args=args))
                arrays = self._orbax.restore(path, args=items)["state"]
            restored = [_rebuild(arrays.get(n), specs[n], x) for n, x in zip(names, leaves)]
        except Exception as error:
            raise CheckpointError(f"{path}: intact, but could not be loaded: {_reason(error)}") from error
        return jax.tree.unflatten(jax.tree.structure(like), restored)

    def _known(self) -> set[int]:
        """The complete steps, as process 0 saw them first: a shared disk may show each process others."""
        if self._complete is None:
            steps = self.steps()
            if jax.process_count() > 1:
                count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
                mine = np.resize(np.array(steps or [0], np.int64), count)
                theirs = multihost_utils.broadcast_one_to_all(mine.view(np.uint8))  # jax would cut an int64
                steps = np.asarray(theirs).view(np.int64).tolist()
            self._complete = set(steps)
        return self._complete

    def _prune(self) -> None:
        good = sorted(self._known() - self._unreadable)
        for step in self._unreadable | set(good[: -self._keep]):
            self._known().discard(step)
            if jax.process_index() == 0:
                shutil.rmtree(self.directory / str(step), ignore_errors=True)
        self._unreadable.clear()

    def _clean(self) -> None:
        """Removes what a killed or failed save left, so that it does not fill the disk."""
        if jax.process_index() == 0 and self.directory.is_dir():
            for path in self.directory.iterdir():
                if _TEMPORARY in path.name:
                    shutil.rmtree(path, ignore_errors=True)

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        with contextlib.suppress(Exception):  # consequences of `error`, which is about to be raised
            self._orbax.close()
        self._orbax = _Checkpointer()
        self._clean()
        good = [s for s in self.steps() if s not in self._unreadable]
        last = (
            f"the last good checkpoint is {self.directory / str(good[-1])}"
            if good
            else "none was saved before"
        )
        return CheckpointError(
            f"could not write checkpoint {self.directory / str(step)}: {_reason(error)}; {last}. "
            "Free disk space or make the folder writable, then run the same command again to go on"
        )


class _Handler(ocp.CompositeCheckpointHandler):
    """Adds a digest of every file, in the temporary directory that one rename then makes the checkpoint."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        root = Path(directory)
        files = [p for p in sorted(root.rglob("*")) if p.is_file() and p.parent != root]
        digests = {p.relative_to(root).as_posix(): _digest(p) for p in files}
        (root / _DIGESTS).write_text(json.dumps(digests))


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """The items of one checkpoint: `meta` (JSON: structure, scalars, host) and `state` (arrays by name)."""


class _Checkpointer(ocp.AsyncCheckpointer):
    def __init__(self) -> None:
        super().__init__(
            _Handler(state=ocp.PyTreeCheckpointHandler(), meta=ocp.JsonCheckpointHandler("meta.json"))
        )


class _DropOrbaxTracebacks(logging.Filter):
    """Orbax logs a failed background write several times with its traceback; it is raised as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in Path(record.pathname).parts)


logging.getLogger("absl").addFilter(_DropOrbaxTracebacks())


def _digest(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _verified_meta(path: Path) -> tuple[dict | None, str]:
    """The checkpoint's meta and "", or None and what is wrong; processes share the reading and agree."""
    meta: dict | None = None
    reason = ""
    try:
        digests = json.loads((path / _DIGESTS).read_text())
        names = sorted({"meta/meta.json": None, **digests})
        share = names[jax.process_index() :: jax.process_count()]
        wrong = [n for n in share if not (path / n).is_file() or _digest(path / n) != digests.get(n)]
        if wrong:
            reason = f"{wrong[0]} is {'damaged' if (path / wrong[0]).is_file() else 'missing'}"
        else:
            meta = json.loads((path / "meta" / "meta.json").read_text())
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"unreadable, {_reason(error)}"
    if jax.process_count() > 1:
        bad = np.flatnonzero(multihost_utils.process_allgather(np.int32(meta is None)))
        if bad.size:
            meta, reason = None, reason or f"damaged, as process {bad[0]} found"
    return meta, reason


def _reason(error: BaseException) -> str:
    """One line; of TensorStore's chain of quoted paths only the end, which says what happened."""
    line = (str(error).strip().splitlines() or [""])[0].rsplit('": ', 1)[-1]
    return f"{type(error).__name__}: {line[:300]}"


def _named_leaves(tree: PyTree) -> tuple[list[str], list]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "state" for path, _ in pairs]
    if len(set(names)) != len(names):  # a dict key that holds a slash
        names = [jax.tree_util.keystr(path) for path, _ in pairs]
    return names, [leaf for _, leaf in pairs]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, _JAX) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(name: str, leaf: Any) -> dict:
    """What is known of a leaf without its data: enough to say how two structures differ."""
    if isinstance(leaf, (bool, int, float, str)) and not isinstance(leaf, np.generic):
        value = leaf.hex() if isinstance(leaf, float) else leaf
        return {"name": name, "kind": type(leaf).__name__, "value": value}
    if not isinstance(leaf, (*_JAX, np.ndarray, np.generic)):
        raise CheckpointError(f"{name}: a checkpoint can not hold a {type(leaf).__name__}; use an array")
    if _is_key(leaf):
        spec = {"name": name, "kind": "array", "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        return {**spec, "impl": str(jax.random.key_impl(leaf))} if isinstance(leaf, jax.Array) else spec
    if not (jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_):
        raise CheckpointError(f"{name}: a checkpoint can not hold an array of {leaf.dtype}; use numbers")
    spec = {"name": name, "kind": "array", "shape": list(leaf.shape), "dtype": leaf.dtype.name}
    return {**spec, "weak": True} if getattr(leaf, "weak_type", False) else spec


def _is_stored(spec: dict) -> bool:
    return spec["kind"] == "array" and 0 not in spec["shape"]


def _storable(leaf: Any) -> Any:
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if isinstance(data, np.generic):
        return np.asarray(data)
    local = isinstance(data, jax.Array) and data.is_fully_addressable and jax.process_count() > 1
    return np.asarray(data) if local else data


def _check_structure(path: Path, saved: list[dict], names: list[str], leaves: list) -> None:
    """Raises CheckpointError with the first leaf, in the order of `names`, that is not as it was saved."""
    theirs = {spec["name"]: spec for spec in saved}
    ours = {name: _describe(name, leaf) for name, leaf in zip(names, leaves)}
    for name in [*ours, *theirs]:
        a, b = (_show(specs.get(name)) for specs in (theirs, ours))
        if a != b:
            raise CheckpointError(
                f"{path}: another structure than this run's: {name} is {a} in the checkpoint and {b} here. "
                "Use the config it was saved with, another --workdir, or --restart"
            )


def _show(spec: dict | None) -> str:
    if spec is None:
        return "absent"
    return f"{spec['dtype']}{spec['shape']}" if spec["kind"] == "array" else spec["kind"]


def _is_placed(leaf: Any) -> bool:
    """Whether the leaf is committed to devices; an unplaced one must stay so, or it can not meet a mesh's."""
    return getattr(leaf, "sharding", None) is not None and getattr(leaf, "committed", True)


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    """Reads straight into the leaf's sharding; through the host if it has none or is one process's own."""
    if not _is_placed(leaf) or (jax.process_count() > 1 and leaf.sharding.is_fully_addressable):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding)


def _rebuild(value: Any, spec: dict, like: Any) -> Any:
    """The leaf that was saved, from what Orbax read (None for scalars and arrays of no elements)."""
    if spec["kind"] == "float":
        return float.fromhex(spec["value"])
    if spec["kind"] != "array":
        return spec["value"]
    if _is_key(like):
        if value is None:
            value = np.zeros(jax.random.key_data(jax.random.key(0, impl=spec["impl"])).shape, np.uint32)
            value = np.broadcast_to(value, (*spec["shape"], *value.shape))
        value = jax.random.wrap_key_data(jnp.asarray(value), impl=spec["impl"])
    elif value is None:
        value = np.zeros(spec["shape"], like.dtype)
    if isinstance(like, np.ndarray):
        return np.array(value)
    if isinstance(like, np.generic):
        return np.asarray(value)[()]
    if spec.get("weak"):
        value = _weaken(value)
    value = jnp.asarray(value)
    return jax.device_put(value, like.sharding) if _is_placed(like) else value


@jax.jit
def _weaken(value: jax.Array) -> jax.Array:
    """`value` with jax's weak type: a scan carry or a bfloat16 product of the resumed run depends on it."""
    return jax.lax.full(value.shape, value.dtype.type(0).item()).at[...].set(value)


def data_position(iterator: Any) -> Any:
    """Returns where a data iterator stands (its `get_state()`) as JSON, for `host`; bytes become base64."""
    state = iterator.get_state()
    return {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else {"json": state}


def set_data_position(iterator: Any, saved: Any) -> None:
    """Puts a data iterator where `data_position` found it."""
    iterator.set_state(base64.b64decode(saved["base64"]) if "base64" in saved else saved["json"])
