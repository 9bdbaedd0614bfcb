"""FLOPs against counts by hand: 2 for each multiply-add, scans multiplied out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from core import flops


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def conv(x, w, groups=1, strides=(1, 1)):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def test_a_product_of_matrices():
    assert flops.count(jnp.dot, shape(3, 5), shape(5, 7)) == 2 * 3 * 5 * 7


def test_a_batched_contraction():
    count = flops.count(
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), shape(2, 6, 4, 8), shape(2, 5, 4, 8)
    )
    assert count == 2 * 2 * 4 * 6 * 5 * 8


def test_elementwise_work_is_not_counted():
    assert flops.count(lambda x: jnp.sin(x) + x, shape(100)) == 0


def test_a_scan_counts_its_length_and_nests():
    def inner(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0]

    assert flops.count(
        lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, length=5)[0], shape(4, 4)
    ) == (5 * 3 * 2 * 4**3)


def test_a_loop_of_known_length_counts_every_trip():
    assert flops.count(lambda x: jax.lax.fori_loop(0, 7, lambda i, c: c @ c, x), shape(4, 4)) == 7 * 2 * 4**3


def test_a_while_loop_counts_once_and_says_so(caplog):
    def run(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, x)

    assert flops.count(run, shape(4, 4)) == 2 * 4**3
    assert "unknown length" in caplog.text


def test_a_cond_counts_its_dearest_branch():
    def run(p, x):
        return jax.lax.cond(p, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert flops.count(run, jax.ShapeDtypeStruct((), jnp.bool_), shape(4, 4)) == 2 * 2 * 4**3


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap])
def test_transformations_are_seen_through(wrap):
    assert flops.count(wrap(lambda x: jnp.sin(x @ x)), shape(2, 4, 4)) == 2 * 2 * 4**3


def test_a_gradient_costs_two_more_products():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    product = 2 * 8 * 5 * 3
    assert flops.count(jax.value_and_grad(loss), shape(5, 3), shape(8, 5)) == 2 * product
    assert flops.count(jax.value_and_grad(loss, argnums=(0, 1)), shape(5, 3), shape(8, 5)) == 3 * product


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_and_its_gradient(groups):
    x, w = shape(2, 8, 8, 4), shape(3, 3, 4 // groups, 6)
    forward = 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4 // groups)
    assert flops.count(lambda x, w: conv(x, w, groups), x, w) == forward
    both = flops.count(jax.value_and_grad(lambda w, x: conv(x, w, groups).sum()), w, x)
    assert both == 2 * forward


def test_a_strided_convolution():
    assert flops.count(lambda x, w: conv(x, w, strides=(2, 2)), shape(1, 8, 8, 3), shape(3, 3, 3, 5)) == (
        2 * 4 * 4 * 5 * 27
    )


def test_a_shard_map_counts_every_shard():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    rows = PartitionSpec("a", None)
    run = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(rows, None), out_specs=rows, axis_names={"a"}
    )
    assert flops.count(jax.jit(run), shape(8, 4), shape(4, 3)) == 2 * 8 * 4 * 3


def test_the_count_agrees_with_xla_where_there_is_no_loop():
    def run(x, w):
        return x @ w @ w

    args = shape(64, 64), shape(64, 64)
    assert flops.count(run, *args) == jax.jit(run).lower(*args).compile().cost_analysis()["flops"]
