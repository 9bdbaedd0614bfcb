"""Every training step under jit, vmap, pmap and a mesh of 8 devices, and lowered for accelerators."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.rl import ppo, sac

STEPS = ["sac", "sac_block", "ppo"]


@pytest.fixture(scope="module")
def steps(sac_config, sac_state, batch, ppo_config, ppo_state, rollout):
    """name -> (step(state, data, key, hyper), state, data, hyper, the axis of the data that is the batch)."""

    def block(state, data, key, hyper):
        def sample(key):
            index = jax.random.randint(key, (8,), 0, data.reward.shape[0])
            return jax.tree.map(lambda x: x[index], data)

        return sac.update_block(state, key, sample, hyper, config=sac_config, n=2, policy_delay=2)

    sac_hyper, ppo_hyper = sac.Hyper.arrays(tau=0.1), ppo.Hyper.arrays()
    return {
        "sac": (functools.partial(sac.update, config=sac_config), sac_state, batch, sac_hyper, 0),
        "sac_block": (block, sac_state, batch, sac_hyper, 0),
        "ppo": (functools.partial(ppo.update, config=ppo_config), ppo_state, rollout, ppo_hyper, 1),
    }


@pytest.fixture(scope="module")
def alone(steps):
    """name -> the jitted step on one device, compiled once for all tests."""
    return {name: jax.jit(step) for name, (step, *_) in steps.items()}


def lanes(tree, n):
    """n different lanes: floats scaled a little, everything else repeated."""

    def spread(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.stack([x] * n)
        return jnp.stack([x * (1 + 0.05 * i) for i in range(n)])

    return jax.tree.map(spread, tree)


@pytest.mark.parametrize("name", STEPS)
def test_devices_of_a_mesh_agree_with_one(steps, alone, name):
    step, state, data, hyper, axis = steps[name]
    key = jax.random.key(7)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))
    sharded = jax.device_put(data, split)
    assert len(sharded.reward.addressable_shards) == 8
    inputs = jax.device_put((state, key, hyper), replicated)
    one, metrics = alone[name](state, data, key, hyper)
    many, sharded_metrics = jax.jit(step)(inputs[0], sharded, *inputs[1:])
    chex.assert_trees_all_close(many, one, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(sharded_metrics, metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_lanes_are_independent_under_vmap_and_pmap(steps, alone, name):
    step, state, data, hyper, _ = steps[name]
    state, data, hyper = lanes(state, 8), lanes(data, 8), lanes(hyper, 8)
    keys = jax.random.split(jax.random.key(7), 8)
    together, metrics = jax.jit(jax.vmap(step))(state, data, keys, hyper)
    for lane in (0, 5):
        pick = jax.tree.map(lambda x, lane=lane: x[lane], (state, data, keys, hyper, together))
        chex.assert_trees_all_close(alone[name](*pick[:4])[0], pick[4], rtol=1e-4, atol=1e-5)
    apart, apart_metrics = jax.pmap(step)(state, data, keys, hyper)
    chex.assert_trees_all_close(apart, together, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(apart_metrics, metrics, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_the_step_lowers_for_accelerators(steps, name):
    step, state, data, hyper, _ = steps[name]
    export = jax.export.export(jax.jit(step), platforms=("tpu", "cuda"))
    exported = export(state, data, jax.random.key(0), hyper)
    assert exported.platforms == ("tpu", "cuda")
    assert len(exported.mlir_module_serialized) > 1000
