"""A ring of transitions on the device. Rewards are stored raw: shape them when you sample."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError

__all__ = [
    "Replay",
    "Transition",
    "add",
    "init",
    "num_valid_slices",
    "require",
    "sample",
    "sample_slices",
]

Array = jax.Array


class Transition(flax.struct.PyTreeNode):
    """One step, or `[...]` of them. `reward` is the task's own; `t` counts steps within `episode_id`."""

    observation: Array
    action: Array
    reward: Array
    next_observation: Array
    terminated: Array
    truncated: Array
    episode_id: Array
    t: Array


class Replay(flax.struct.PyTreeNode):
    """`data` leaves `[capacity, ...]`; rows cursor - size .. cursor - 1 (modulo capacity) are filled."""

    data: Any
    cursor: Array
    size: Array


def init(example: Any, capacity: int) -> Replay:
    """Empty replay for rows like `example` (a pytree of one row, without a leading axis).

    Unfilled float rows hold NaN, so that a mistake can not pass for data.
    """
    if capacity < 1:
        raise UserError(f"replay capacity is {capacity}: it must be at least 1")

    def empty(leaf):
        leaf = jnp.asarray(leaf)
        fill = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 0
        return jnp.full((capacity, *leaf.shape), fill, leaf.dtype)

    return Replay(jax.tree.map(empty, example), jnp.int32(0), jnp.int32(0))


def add(replay: Replay, rows: Any) -> Replay:
    """Appends `rows` (leaves `[n, ...]`, in time order); the newest `capacity` rows are kept.

    Under jit with `replay` donated the ring is written in place. For `sample_slices`, the rows of an episode
    must be neighbours: add environment after environment, not step after step.
    """
    capacity = jax.tree.leaves(replay.data)[0].shape[0]
    n = jax.tree.leaves(rows)[0].shape[0]
    kept = min(n, capacity)
    index = (replay.cursor + (n - kept) + jnp.arange(kept)) % capacity
    data = jax.tree.map(
        lambda ring, new: ring.at[index].set(new[n - kept :].astype(ring.dtype), unique_indices=True),
        replay.data,
        rows,
    )
    return Replay(data, (replay.cursor + n) % capacity, jnp.minimum(replay.size + n, capacity))


def _rows(replay: Replay, age_index: Array) -> Any:
    """Rows by age, 0 = oldest filled row."""
    capacity = jax.tree.leaves(replay.data)[0].shape[0]
    index = (replay.cursor - replay.size + age_index) % capacity
    return jax.tree.map(lambda ring: ring[index], replay.data)


def sample(replay: Replay, key: Array, n: int) -> Any:
    """Draws `n` filled rows with replacement; leaves `[n, ...]`. Call `require` on the host first."""
    return _rows(replay, jax.random.randint(key, (n,), 0, jnp.maximum(replay.size, 1)))


def _valid_starts(replay: Replay, length: int) -> Array:
    """`[capacity]` bool by age: rows age .. age + length - 1 are filled and of one episode without a gap."""
    capacity = jax.tree.leaves(replay.data)[0].shape[0]
    index = (replay.cursor - replay.size + jnp.arange(capacity)) % capacity
    episode, t = replay.data.episode_id[index], replay.data.t[index]
    unbroken = (episode == jnp.roll(episode, 1 - length)) & (jnp.roll(t, 1 - length) - t == length - 1)
    return unbroken & (jnp.arange(capacity) + length <= replay.size)


def num_valid_slices(replay: Replay, length: int) -> Array:
    """Number `[]` of positions where a slice of `length` consecutive steps of one episode starts."""
    return jnp.sum(_valid_starts(replay, length), dtype=jnp.int32)


def sample_slices(replay: Replay, key: Array, n: int, length: int) -> Any:
    """Draws `n` slices of `length` steps uniformly among those inside one episode; leaves `[n, length, ...]`.

    Needs `Transition` rows. One call costs a pass over the capacity: draw the slices of a block together.
    """
    counts = jnp.cumsum(_valid_starts(replay, length), dtype=jnp.int32)
    pick = jax.random.randint(key, (n,), 0, jnp.maximum(counts[-1], 1))
    start = jnp.searchsorted(counts, pick, side="right")
    return _rows(replay, start[:, None] + jnp.arange(length))


def require(replay: Replay, *, length: int = 1) -> None:
    """Raises UserError, on the host, unless every lane of `replay` has a row (slice of `length`) to draw."""
    if int(np.min(replay.size)) == 0:
        raise UserError("the replay is empty: add transitions (collect an episode) before sampling from it")
    if length > 1:
        count = num_valid_slices
        for _ in range(np.ndim(replay.size)):
            count = jax.vmap(count, in_axes=(0, None))
        if int(np.min(count(replay, length))) == 0:
            raise UserError(
                f"the replay holds no {length} consecutive steps of one episode: "
                "add longer episodes or ask for shorter slices"
            )
