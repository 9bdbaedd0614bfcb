"""The mesh: what fits the eight fake devices, what is refused, and arrays to and from it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from core import mesh as meshes
from core.errors import UserError


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh({"data": -1})


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": -1, "fsdp": 1, "tensor": 1}, (8, 1, 1)),
        ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 2)),
        ({"data": 4, "fsdp": 2}, (4, 2, 1)),
        ({"tensor": 8}, (1, 1, 8)),
    ],
)
def test_one_axis_is_inferred(sizes, expected):
    made = meshes.make_mesh(ConfigDict(sizes))
    assert made.axis_names == ("data", "fsdp", "tensor") and made.devices.shape == expected
    assert sorted(d.id for d in made.devices.flat) == list(range(8))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, r"\(data=3, fsdp=1, tensor=1\) wants 3 devices and there are 8"),
        ({"data": 1}, r"wants 1 devices and there are 8; .*--config.mesh.data=-1"),
        ({"data": 16}, "wants 16 devices and there are 8"),
        ({"data": -1, "tensor": 3}, "wants a multiple of 3 devices and there are 8"),
        ({"data": -1, "tensor": 16}, "wants a multiple of 16 devices and there are 8"),
        ({"data": -1, "fsdp": -1}, "one of them may be -1"),
        ({"data": 0}, "positive integers"),
        ({"data": 8.0}, "positive integers"),
        ({"dat": 8}, r"config.mesh.dat: unknown axis; did you mean 'data'\?; use data, fsdp, tensor"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        meshes.make_mesh(sizes)


def test_shard_splits_leading_axes_and_says_once_what_it_keeps_whole(mesh, caplog):
    tree = {"batch": np.arange(32.0).reshape(16, 2), "odd": np.ones((7, 3)), "scalar": 2.0}
    tree["keys"] = jax.random.split(jax.random.key(0), 8)
    with caplog.at_level(logging.INFO, "core.mesh"):
        placed = meshes.shard(mesh, tree)
        meshes.shard(mesh, tree)
    assert placed["batch"].sharding.spec == P("data") and placed["batch"].addressable_shards[
        0
    ].data.shape == (2, 2)
    assert placed["keys"].sharding.spec == P("data")
    assert placed["odd"].sharding.is_fully_replicated and placed["scalar"].sharding.is_fully_replicated
    assert [r.getMessage() for r in caplog.records] == [
        "data=8 does not divide a leading dimension of 7: kept whole everywhere"
    ]
    np.testing.assert_array_equal(meshes.to_host(placed)["batch"], tree["batch"])


def test_shard_over_another_axis():
    placed = meshes.shard(meshes.make_mesh({"data": 2, "fsdp": 4}), jnp.ones((4, 2)), axis="fsdp")
    assert placed.addressable_shards[0].data.shape == (1, 2)


def test_a_step_over_the_mesh_equals_one_device(mesh):
    """The mean of a sharded batch is the global mean, and its gradient too."""
    w = jax.random.normal(jax.random.key(0), (3,))
    x = jax.random.normal(jax.random.key(1), (16, 3))
    gradient = jax.jit(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)))
    actual = gradient(meshes.replicate(mesh, w), meshes.shard(mesh, x))
    assert actual.sharding.is_fully_replicated
    np.testing.assert_allclose(actual, gradient(w, x), rtol=1e-5)


def test_to_global_and_back(mesh):
    tree = {"x": np.arange(24).reshape(8, 3)}
    placed = meshes.to_global(mesh, tree, P("data"))
    assert placed["x"].addressable_shards[0].data.shape == (1, 3)
    back = meshes.to_host({**placed, "key": jax.random.key(3), "number": 4})
    np.testing.assert_array_equal(back["x"], tree["x"])
    np.testing.assert_array_equal(back["key"], jax.random.key_data(jax.random.key(3)))
    assert all(isinstance(leaf, np.ndarray) for leaf in back.values())


def test_one_process_always_agrees_with_itself():
    meshes.check_same_config("ab" * 32)


def test_distributed_without_a_cluster_says_what_to_give(monkeypatch):
    def fail(*_):
        raise ValueError("coordinator_address should be defined.\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(UserError, match=r"should be defined\.\); .*--coordinator=HOST:PORT"):
        meshes.start_distributed()
