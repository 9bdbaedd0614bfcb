"""Value iteration on simulated alternatives: a world of known value, the lowest member, vmap, mesh, pmap."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from core.rl.networks import ValueEnsemble
from robotics.sgft import value_improvement
from robotics.sgft.value_improvement import Alternatives

GAMMA, STRIDE = 0.8, 0.2
NETWORK = ValueEnsemble(2, (32, 32), nn.tanh, layer_norm=False)


def alternatives(n=512, candidates=9):
    """A line from -1 to 1 on which one walks `STRIDE` either way and pays the distance to 0 one ends at."""
    x = jnp.linspace(-1, 1, n)[:, None]
    reached = jnp.clip(x + STRIDE * jnp.linspace(-1, 1, candidates), -1, 1)
    full = jnp.ones_like(reached)
    return Alternatives(x, reached[..., None], -jnp.abs(reached), GAMMA * full)


def best(x):
    """Walking straight to 0."""
    away = np.abs(np.asarray(x))[..., 0]
    return -sum(GAMMA**k * np.maximum(away - STRIDE * (k + 1), 0) for k in range(10))


def start(key=0):
    return NETWORK.init(jax.random.key(key), jnp.zeros((1, 1)))


improve = functools.partial(
    value_improvement.improve, network=NETWORK, offset=-1.0, scale=1.0, batch=128, lr=3e-3, tau=0.05
)


def test_it_finds_the_best_value():
    params, metrics = jax.jit(functools.partial(improve, updates=1500))(
        jax.random.key(0), start(), alternatives()
    )
    x = jnp.linspace(-0.95, 0.95, 100)[:, None]
    np.testing.assert_allclose(-1.0 + NETWORK.apply(params, x).mean(0), best(x), atol=0.05)
    assert metrics["backup_error"] < 1e-3


def test_a_backup_is_the_best_alternative():
    value, earned = np.random.default_rng(0).normal(size=(2, 5, 3))
    discount = np.array([0.9, 0.0, 0.5])
    expected = (earned + discount * value).max(axis=1)
    np.testing.assert_allclose(value_improvement.backup(value, earned, discount), expected, rtol=1e-6)


def test_past_a_true_end_nothing_counts():
    ended = alternatives()._replace(discount=jnp.zeros((512, 9)))
    params, _ = jax.jit(functools.partial(improve, updates=800))(jax.random.key(0), start(), ended)
    x = ended.observation[::16]
    expected = -np.maximum(np.abs(np.asarray(x))[:, 0] - STRIDE, 0)
    np.testing.assert_allclose(-1.0 + NETWORK.apply(params, x).mean(0), expected, atol=0.1)


def test_what_is_reached_counts_as_the_lowest_member_says():
    """One update from two members of which one is worth 50 more: the target is the other's."""
    once = functools.partial(improve, updates=1, batch=8, lr=0.0)
    raised = jax.tree.map(jnp.array, start())
    raised["params"]["ensemble"]["members"]["Dense_2"]["bias"] = jnp.array([[50.0], [0.0]])
    rows = jax.tree.map(lambda leaf: leaf[:1], alternatives())
    values = -1.0 + NETWORK.apply(raised, rows.reached)
    target = np.max(rows.earned + rows.discount * values.min(axis=0))
    expected = np.mean((-1.0 + NETWORK.apply(raised, rows.observation) - target) ** 2)
    _, metrics = once(jax.random.key(0), raised, rows)
    np.testing.assert_allclose(metrics["backup_error"], expected, rtol=1e-5)


@pytest.fixture(scope="module")
def lanes():
    keys = jax.random.split(jax.random.key(1), 8)
    params = jax.vmap(lambda key: NETWORK.init(key, jnp.zeros((1, 1))))(keys)
    shared = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (8, *leaf.shape)), alternatives(32, 3))
    return keys, params, shared


@pytest.fixture(scope="module")
def alone(lanes):
    run = jax.jit(functools.partial(improve, updates=3))
    each = [run(*jax.tree.map(lambda leaf, i=i: leaf[i], lanes)) for i in range(8)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


def same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def test_lanes_on_a_mesh(lanes, alone):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.device_put(lanes, NamedSharding(mesh, PartitionSpec("data")))
    same(jax.jit(jax.vmap(functools.partial(improve, updates=3)))(*split), alone)


def test_pmap(lanes, alone):
    same(jax.pmap(functools.partial(improve, updates=3))(*lanes), alone)
