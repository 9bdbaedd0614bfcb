"""The learn step of both agents: alone, by vmap on a mesh, by pmap; it lowers for accelerators."""

import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.robotics.sgft.conftest import LANES, jitted, model_free


@pytest.fixture(scope="module", params=["model_free", "model_based"])
def learning(request, source, experience, planning):
    """(learn, its arguments `[8, ...]`, what each lane alone makes of them)."""
    agent = model_free(horizon=3) if request.param == "model_free" else planning()
    keys = jax.random.split(jax.random.key(1), LANES)
    init = jitted(agent.init)
    lane = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)  # noqa: E731
    states = [init(keys[i], lane(source, i), agent.options) for i in range(LANES)]
    alone = [jitted(agent.learn)(states[i], *lane((source, experience, keys), i)) for i in range(LANES)]
    stack = functools.partial(jax.tree.map, lambda *leaves: np.stack(leaves))
    return agent.learn, (stack(*states), source, experience, keys), stack(*alone)


def same(actual, expected):
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-5, atol=1e-6)


def test_vmap_over_lanes_on_eight_devices(learning):
    learn, args, alone = learning
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "data"), PartitionSpec("data"))
    state, metrics = jax.jit(jax.vmap(learn))(*jax.device_put(args, sharding))
    assert len(jax.tree.leaves(state)[0].addressable_shards) == 8
    same((state, metrics), alone)


def test_pmap(learning):
    learn, args, alone = learning
    same(jax.pmap(learn)(*args), alone)


def test_lowers_for_accelerators(learning):
    learn, args, _ = learning
    exported = jax.export.export(jax.jit(jax.vmap(learn)), platforms=("cuda", "tpu"))(*args)
    assert exported.platforms == ("cuda", "tpu")
