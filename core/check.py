"""`--mode=check`: proves that a config's steps lower on its mesh, without its hardware, weights or data."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from core import flops
from core.files import write_json
from core.mesh import make_mesh

__all__ = ["Function", "run"]

_log = logging.getLogger(__name__)


class Function(NamedTuple):
    """A training or evaluation step to lower: its name, the (jitted) function, and abstract arguments.

    `args` are pytrees of jax.ShapeDtypeStruct `[..]` with their shardings; `parameters` is how many the model
    has; `flops` of one call, or None to have them counted (core.flops).
    """

    name: str
    fn: Callable
    args: tuple
    parameters: int
    flops: float | None = None


def run(config: ConfigDict, workdir: Path, experiment: ModuleType, *, variant: str = "small") -> int:
    """Lowers every function of the experiment and writes WORKDIR/check.json; 0 if all lower, else 2.

    The schema is that of docs/architecture.md. Functions are also compiled, for the peak memory, unless
    `config.check.compile` is false. `experiment.data(config)`, if there, lists the files that it needs.
    """
    mesh = make_mesh(config.mesh)
    functions = [_lower(function, config) for function in experiment.functions(config, mesh)]
    paths = experiment.data(config) if hasattr(experiment, "data") else []
    record = {
        "schema": 1,
        "name": config.name,
        "variant": variant,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "functions": functions,
        "data": [{"path": str(path), "found": Path(path).exists()} for path in paths],
        "expected": config.expected.to_dict(),
    }
    if jax.process_index() == 0:
        write_json(workdir / "check.json", record)
        print(_render(record))
    return 0 if all(function["lowered"] for function in functions) else 2


def _lower(function: Function, config: ConfigDict) -> dict[str, Any]:
    jitted = function.fn if hasattr(function.fn, "lower") else jax.jit(function.fn)
    record: dict[str, Any] = {
        "name": function.name,
        "lowered": False,
        "parameters": int(function.parameters),
        "argument_bytes_per_device": sum(_bytes(leaf) for leaf in jax.tree.leaves(function.args)),
        "peak_bytes_per_device": None,
        "flops": function.flops,
    }
    try:
        lowered = jitted.lower(*function.args)
        if function.flops is None:
            record["flops"] = flops.count(function.fn, *function.args)
        if config.check.get("compile", True):
            record["peak_bytes_per_device"] = _peak(lowered.compile().memory_analysis())
        record["lowered"] = True
    except Exception as error:  # whatever a method's code raises here is the finding
        line = " ".join(str(error).split())[:500]
        print(f"error: {function.name} does not lower: {type(error).__name__}: {line}", file=sys.stderr)
        _log.debug("%s", function.name, exc_info=True)
    return record


def _bytes(leaf: Any) -> int:
    """Bytes of one argument on one device; an argument without a sharding is whole on each."""
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _peak(memory: Any) -> int | None:
    if memory is None:
        return None
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(live - memory.alias_size_in_bytes)


def _render(record: dict[str, Any]) -> str:
    lines = [f"{record['name']} ({record['variant']}) on {record['devices']} devices, mesh {record['mesh']}"]
    for f in record["functions"]:
        peak = f["peak_bytes_per_device"]
        memory = f"{f['argument_bytes_per_device'] / 2**20:.1f} MiB of arguments a device"
        memory += "" if peak is None else f", {peak / 2**20:.1f} MiB at the peak"
        state = "lowers" if f["lowered"] else "DOES NOT LOWER"
        work = "" if f["flops"] is None else f", {f['flops']:.3g} FLOPs"
        lines.append(f"  {f['name']}: {state}, {f['parameters']:,} parameters, {memory}{work}")
    lines += [f"  missing: {entry['path']}" for entry in record["data"] if not entry["found"]]
    return "\n".join(lines)
