import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from core.rl import replay
from core.rl.replay import Transition

EXAMPLE = Transition(
    observation=jnp.zeros(2),
    action=jnp.zeros(1),
    reward=jnp.float32(0),
    next_observation=jnp.zeros(2),
    terminated=jnp.bool_(False),
    truncated=jnp.bool_(False),
    episode_id=jnp.int32(0),
    t=jnp.int32(0),
)


add = jax.jit(replay.add)
sample = jax.jit(replay.sample, static_argnums=2)
sample_slices = jax.jit(replay.sample_slices, static_argnums=(2, 3))
num_valid_slices = jax.jit(replay.num_valid_slices, static_argnums=1)


def transitions(lengths, first_id=0):
    """Episodes of the given lengths, one after the other; reward = a running number of the row."""
    episode = np.repeat(np.arange(len(lengths)) + first_id, lengths).astype(np.int32)
    t = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    n = len(t)
    last = np.append(np.diff(episode) != 0, True)
    zeros = np.zeros((n, 2), np.float32)
    return Transition(
        zeros, zeros[:, :1], np.arange(n, dtype=np.float32), zeros, np.zeros(n, bool), last, episode, t
    )


def rows(tree, start, stop):
    return jax.tree.map(lambda x: x[start:stop], tree)


def test_sampling_draws_only_filled_rows_and_all_of_them():
    buffer = add(replay.init(EXAMPLE, 100), transitions([7]))
    drawn = sample(buffer, jax.random.key(0), 500)
    assert set(np.unique(drawn.reward)) == set(range(7))
    assert np.isfinite(drawn.observation).all()
    counts = np.bincount(drawn.reward.astype(int))
    assert counts.min() > 40  # 71 expected of each


def test_unfilled_floats_are_nan_so_that_a_mistake_shows():
    buffer = replay.init(EXAMPLE, 4)
    assert np.isnan(buffer.data.observation).all() and np.isnan(buffer.data.reward).all()
    assert np.isnan(sample(buffer, jax.random.key(0), 3).reward).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 5, 9]), min_size=1, max_size=8))
def test_wrap_around_keeps_the_newest(sizes):
    capacity = 6
    data = transitions([sum(sizes)])
    buffer, start = replay.init(EXAMPLE, capacity), 0
    for n in sizes:
        buffer = add(buffer, rows(data, start, start + n))
        start += n
    kept = np.sort(np.asarray(buffer.data.reward)[np.isfinite(buffer.data.reward)])
    np.testing.assert_array_equal(kept, np.arange(max(0, start - capacity), start))
    assert buffer.size == min(start, capacity) and buffer.cursor == start % capacity


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("added", [(4, 7, 2), (4, 7, 2, 5, 9, 3, 8)])
def test_slices_stay_inside_an_episode_and_cover_every_start(length, added):
    capacity, buffer = 20, replay.init(EXAMPLE, 20)
    data = transitions(added)
    start = 0
    for n in added:
        buffer = add(buffer, rows(data, start, start + n))
        start += n
    kept = rows(data, max(0, start - capacity), start)
    starts = {
        int(kept.reward[i])
        for i in range(len(kept.reward) - length + 1)
        if kept.episode_id[i] == kept.episode_id[i + length - 1]
    }
    assert int(num_valid_slices(buffer, length)) == len(starts)
    drawn = sample_slices(buffer, jax.random.key(1), 2000, length)
    assert drawn.reward.shape == (2000, length) and drawn.observation.shape == (2000, length, 2)
    assert (drawn.episode_id == drawn.episode_id[:, :1]).all()
    np.testing.assert_array_equal(np.diff(drawn.t, axis=1), 1)
    np.testing.assert_array_equal(np.diff(drawn.reward, axis=1), 1)
    assert set(np.asarray(drawn.reward)[:, 0].astype(int)) == starts


def test_a_repeated_episode_number_is_still_two_episodes():
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), transitions([3]))
    buffer = add(replay.init(EXAMPLE, 10), twice)
    assert int(num_valid_slices(buffer, 3)) == 2
    assert int(num_valid_slices(buffer, 4)) == 0


def test_an_empty_replay_is_refused_with_what_to_do():
    buffer = replay.init(EXAMPLE, 8)
    with pytest.raises(UserError, match="replay is empty: add transitions"):
        replay.require(buffer)
    buffer = add(buffer, transitions([2, 2]))
    replay.require(buffer)
    replay.require(buffer, length=2)
    with pytest.raises(UserError, match="no 3 consecutive steps of one episode"):
        replay.require(buffer, length=3)
    with pytest.raises(UserError, match="capacity is 0"):
        replay.init(EXAMPLE, 0)


def test_lanes_are_separate_and_one_empty_lane_is_noticed():
    lanes = jax.vmap(lambda _: replay.init(EXAMPLE, 8))(jnp.arange(2))
    data = jax.tree.map(lambda x: np.stack([x, x + x]), transitions([5]))
    lanes = jax.jit(jax.vmap(replay.add), donate_argnums=0)(lanes, data)
    keys = jax.random.split(jax.random.key(0), 2)
    drawn = jax.vmap(functools.partial(replay.sample, n=200))(lanes, keys)
    assert set(np.unique(drawn.reward[0])) == {0, 1, 2, 3, 4}
    assert set(np.unique(drawn.reward[1])) == {0, 2, 4, 6, 8}
    replay.require(lanes, length=1)
    with pytest.raises(UserError, match="empty"):
        replay.require(lanes.replace(size=lanes.size.at[1].set(0)))


def test_adding_writes_in_place():
    buffer = replay.init(EXAMPLE, 64)
    in_place = jax.jit(replay.add, donate_argnums=0)
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (buffer, transitions([4])))
    memory = in_place.lower(*spec).compile().memory_analysis()
    ring = sum(x.nbytes for x in jax.tree.leaves(buffer.data))
    assert memory.alias_size_in_bytes >= ring
    assert memory.temp_size_in_bytes < ring / 2
