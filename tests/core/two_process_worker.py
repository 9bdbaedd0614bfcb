"""One process of tests/core/test_two_processes.py: `python -m tests.core.two_process_worker PORT ID DIR`."""

import json
import shutil
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from core import mesh as meshes
from core.checkpoint import Checkpoints
from core.errors import UserError

STEPS, ROWS = 3, 16
NETWORK = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(1)])
OPTIMIZER = optax.adam(1e-2)


def data():
    """x `[ROWS, 3]`, y `[ROWS, 1]`: the global batch, the same everywhere."""
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def local_rows():
    size = ROWS // jax.process_count()
    return slice(size * jax.process_index(), size * (jax.process_index() + 1))


def init(mesh):
    """Replicated parameters, a batch split over the mesh, and leaves that each process holds on its own."""
    params = NETWORK.init(jax.random.key(0), jnp.zeros((1, 3)))
    batch = meshes.to_global(mesh, tuple(array[local_rows()] for array in data()), P("data"))
    placed = meshes.replicate(mesh, {"params": params, "opt_state": OPTIMIZER.init(params)})
    return {**placed, "batch": batch, "rng": jax.random.key(5), "count": np.int64(0)}


@jax.jit
def train_step(state):
    x, y = state["batch"]
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean((NETWORK.apply(p, x) - y) ** 2))(state["params"])
    updates, opt_state = OPTIMIZER.update(gradient, state["opt_state"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def train(mesh, checkpoints=None):
    """Returns the state after STEPS steps and their losses; saves the last two."""
    state, losses = init(mesh), []
    for step in range(1, STEPS + 1):
        arrays, loss = train_step({key: state[key] for key in ("params", "opt_state", "batch")})
        state = {**state, **arrays, "count": np.int64(step)}
        losses.append(float(loss))
        if checkpoints is not None and step > 1:
            checkpoints.save(step, state, {"step": step})
    return state, losses


def main(port, process_id, directory):
    meshes.start_distributed(f"localhost:{port}", 2, process_id)
    mesh = meshes.make_mesh({"data": -1})
    meshes.check_same_config("ab" * 32)
    result = {"devices": jax.device_count(), "local_devices": jax.local_device_count()}

    checkpoints = Checkpoints(directory / "checkpoints")
    state, result["losses"] = train(mesh, checkpoints)
    checkpoints.close()

    restored = Checkpoints(directory / "checkpoints").restore(init(mesh))
    pairs = zip(jax.tree.leaves(meshes.to_host(restored.state)), jax.tree.leaves(meshes.to_host(state)))
    result["restored"] = restored.step, all(np.array_equal(a, b) for a, b in pairs)

    if process_id == 0:
        shutil.copytree(directory / "checkpoints", directory / "damaged")
        files = [path for path in (directory / "damaged" / "3").rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-1])
    multihost_utils.sync_global_devices("damaged")
    result["after_damage"] = Checkpoints(directory / "damaged").restore(init(mesh)).step

    placed = meshes.shard(mesh, {"rows": np.arange(8.0), "odd": np.arange(3.0)})
    result["gathered"] = {key: value.tolist() for key, value in meshes.to_host(placed).items()}
    try:
        meshes.check_same_config(f"{process_id:02x}" * 32)
    except UserError as error:
        result["refused"] = str(error)
    (directory / f"result_{process_id}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
