"""A row's runs as lanes of one program: tasks x (seeds, rules), spread over the devices of a mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from graphs.gaa import training
from graphs.gaa.training import Method, TrainState

__all__ = ["programs", "stack"]

# All lanes are at the same step, which therefore stays one number: what depends on it alone is not repeated.
_PER_TASK = TrainState(P("tasks", "lanes"), P(), P("tasks", "lanes"))
_PER_LANE = TrainState(0, None, 0)


def stack(domains: Sequence[Any]) -> Any:
    """Domains of equal sizes as one, every leaf `[T, ...]`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *domains)


@functools.lru_cache(maxsize=64)
def programs(
    method: Method, steps: int, n: int, classes: int, tasks: int, mesh: Mesh
) -> tuple[Callable, Callable]:
    """Jitted `init` and `advance` for T `tasks` at once and any number L of lanes in each.

    The devices of the mesh become a grid: along tasks as many as divide both, the rest along lanes, which are
    filled up with copies where that does not divide them.

    Args:
      steps: of the whole run. n: steps of one `advance`.

    Returns:
      `init(keys [T, L], source, target) -> states`, a TrainState with leaves `[T, L, ...]` but one `step []`;
      `advance(states, source, target, labelled [T, L, N_s], hyper) -> (states, (Scores, metrics) [T, L])`,
      which takes over the memory of `states`. `source`, `target`: as `stack` makes them.
    """
    devices = mesh.devices.reshape(-1)
    along = math.gcd(tasks, devices.size)
    grid = Mesh(devices.reshape(along, -1), ("tasks", "lanes"))
    lane, task = P("tasks", "lanes"), P("tasks")

    def begin(keys, source, target):
        def one(key, source, target):
            init_key, run_key = jax.random.split(key)
            return TrainState(method.init(init_key, source, target), jnp.int32(0), run_key)

        def local(keys, source, target):
            each = jax.vmap(one, (0, None, None), _PER_LANE)
            states = jax.lax.map(lambda inputs: each(*inputs), (keys, source, target))
            return states.replace(step=jnp.int32(0))

        shared = jax.shard_map(
            local, mesh=grid, in_specs=(lane, task, task), out_specs=_PER_TASK, check_vma=False
        )
        return _shorten(shared(_fill(keys, grid), source, target), keys.shape[1])

    def advance(states, source, target, labelled, hyper):
        def local(states, source, target, labelled, hyper):
            def one(state, labels, source, target):
                options = {"source": source, "target": target, "hyper": hyper, "labelled": labels}
                return training.advance(state, **options, method=method, steps=steps, n=n, classes=classes)

            each = jax.vmap(one, (_PER_LANE, 0, None, None), (_PER_LANE, 0))

            def one_task(inputs):
                learned, key, *rest = inputs
                state, found = each(TrainState(learned, states.step, key), *rest)
                return (state.method, state.key), found

            inputs = (states.method, states.key, labelled, source, target)
            (learned, key), found = jax.lax.map(one_task, inputs)
            return TrainState(learned, states.step + n, key), found

        shared = jax.shard_map(
            local,
            mesh=grid,
            in_specs=(_PER_TASK, task, task, lane, P()),
            out_specs=(_PER_TASK, lane),
            check_vma=False,
        )
        lanes = labelled.shape[1]
        found = shared(_fill(states, grid), source, target, _fill(labelled, grid), hyper)
        return _shorten(found, lanes)

    return jax.jit(begin), jax.jit(advance, donate_argnums=0)


def _fill(tree, grid):
    """Lanes repeated until the grid divides them."""

    def longer(leaf):
        if not leaf.ndim:
            return leaf
        lanes = leaf.shape[1]
        index = np.arange(-(-lanes // grid.shape["lanes"]) * grid.shape["lanes"]) % lanes
        return leaf if len(index) == lanes else leaf[:, index]

    return jax.tree.map(longer, tree)


def _shorten(tree, lanes):
    return jax.tree.map(lambda leaf: leaf[:, :lanes] if leaf.ndim else leaf, tree)
