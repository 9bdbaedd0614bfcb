"""Processes and devices: start-up, the one mesh of a run, and arrays between the host and the mesh."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from core.errors import UserError, nearest

__all__ = [
    "check_same_config",
    "make_mesh",
    "replicate",
    "shard",
    "start_distributed",
    "to_global",
    "to_host",
]

AXES = ("data", "fsdp", "tensor")
PyTree = Any

_log = logging.getLogger(__name__)


def start_distributed(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins this process to the run's others; call it before anything touches a device.

    Without arguments JAX finds them itself (TPU pod, Slurm, Open MPI, GKE); elsewhere give all three, the
    coordinator as "host:port" of process 0. On CPU they talk over Gloo, JAX's default.

    Raises:
      UserError: the cluster was not recognised, or the processes did not find each other.
    """
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--distributed: the processes did not come together ({str(error).splitlines()[0]}); outside of "
            "TPU pods, Slurm, Open MPI and GKE start each process with --coordinator=HOST:PORT "
            "--num_processes=N --process_id=0..N-1"
        ) from error


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Returns the mesh of all devices with axes data, fsdp, tensor, as in `config.mesh`.

    Args:
      sizes: devices along each axis, 1 where left out; one of them may be -1, "what is left".

    Raises:
      UserError: an unknown axis, a bad size, or a product that is not the number of devices.
    """
    for axis in sizes:
        if axis not in AXES:
            raise UserError(f"config.mesh.{axis}: unknown axis{nearest(axis, AXES)}; use {', '.join(AXES)}")
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    shown = ", ".join(f"{axis}={size}" for axis, size in shape.items())
    inferred = [axis for axis, size in shape.items() if size == -1]
    if len(inferred) > 1 or any(type(s) is not int or (s < 1 and s != -1) for s in shape.values()):
        raise UserError(f"config.mesh ({shown}): sizes are positive integers, and one of them may be -1")
    devices = jax.device_count()
    product = math.prod(size for size in shape.values() if size != -1)
    if inferred:
        shape[inferred[0]] = devices // product
    if math.prod(shape.values()) != devices:
        wanted = f"a multiple of {product}" if inferred else str(product)
        raise UserError(
            f"config.mesh ({shown}) wants {wanted} devices and there are {devices}; "
            "change the sizes, or give one axis -1 (--config.mesh.data=-1)"
        )
    return jax.make_mesh(tuple(shape.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shard(mesh: Mesh, tree: PyTree, axis: str = "data") -> PyTree:
    """Splits the leading dimension of each leaf `[N, ...]` over a mesh axis.

    Leaves are global values, the same on every process. A leaf whose N the axis does not divide is
    replicated, and the log says so once; scalars are replicated.
    """
    size = mesh.shape[axis]

    def place(leaf: Any) -> jax.Array:
        shape = np.shape(leaf)
        if shape and shape[0] % size == 0:
            return jax.device_put(leaf, NamedSharding(mesh, P(axis)))
        if shape:
            _say_once(
                f"{axis}={size} does not divide a leading dimension of {shape[0]}: kept whole everywhere"
            )
        return jax.device_put(leaf, NamedSharding(mesh, P()))

    return jax.tree.map(place, tree)


def replicate(mesh: Mesh, tree: PyTree) -> PyTree:
    """Puts each leaf `[...]`, the same on every process, whole on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def to_global(mesh: Mesh, host_local_tree: PyTree, spec: P) -> PyTree:
    """Joins what each process holds into global arrays.

    Args:
      host_local_tree: this process's part of each leaf, `[N / processes, ...]` where `spec` splits N; the
        whole leaf, the same on every process, where it does not.
      spec: how the global arrays lie on the mesh, for example P("data") for a batch.
    """
    join = functools.partial(jax.make_array_from_process_local_data, NamedSharding(mesh, spec))
    return jax.tree.map(join, jax.tree.map(np.asarray, host_local_tree))


def to_host(tree: PyTree) -> PyTree:
    """Returns numpy arrays of the whole global values `[...]`; every process must call it.

    Typed keys come as their uint32 data.
    """

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)


def check_same_config(sha256: str) -> None:
    """Raises UserError, on every process alike, if one holds another config than process 0."""
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(bytes.fromhex(sha256), np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    different = np.flatnonzero((everyone != everyone[0]).any(axis=1))
    if different.size:
        theirs, first = (everyone[i].tobytes().hex()[:8] for i in (different[0], 0))
        raise UserError(
            f"process {different[0]} holds another config ({theirs}) than process 0 ({first}): start every "
            "process from the same files with the same --config flags"
        )


@functools.cache
def _say_once(message: str) -> None:
    _log.info(message)
