"""The refit of V_sim: disturbances, returns against a plain loop, a regression that finds its function."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.rl.networks import Value
from robotics.sgft import value_refit

KEY = jax.random.key(11)


@pytest.mark.parametrize("seed", range(5))
def test_targets_equal_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    steps, n, keep, gamma = 12, 7, 4, 0.9
    observation = rng.normal(size=(steps, n, 3)).astype(np.float32)
    reward = rng.normal(size=(steps, n)).astype(np.float32)
    ended, tail = rng.random((steps, n)) < 0.15, rng.normal(size=n).astype(np.float32)
    start = rng.integers(0, steps - keep + 1, n)
    targets = value_refit.monte_carlo_targets(
        *map(jnp.asarray, (observation, reward, ended, tail, start)), gamma=gamma, keep=keep
    )
    expected = np.zeros((keep, n))
    for i in range(n):
        for k in range(keep):
            total, discount = 0.0, 1.0
            for t in range(start[i] + k, steps):
                total += discount * reward[t, i]
                discount *= gamma
                if ended[t, i]:
                    break
            else:
                total += discount * tail[i]
            expected[k, i] = total
            np.testing.assert_array_equal(
                targets.observation.reshape(keep, n, 3)[k, i], observation[start[i] + k, i]
            )
    np.testing.assert_allclose(targets.value.reshape(keep, n), expected, rtol=1e-5, atol=1e-6)


def test_disturbances_are_as_strong_long_and_frequent_as_they_say():
    n, longest = 20_000, 9
    start = value_refit.init_disturbance(KEY, n, 2, longest=longest, largest=1.2, calm=0.4)
    np.testing.assert_allclose(jnp.mean(start.scale == 0), 0.4, atol=0.02)
    restless = start.scale[start.scale > 0]
    np.testing.assert_allclose([restless.mean(), restless.max()], [0.6, 1.2], atol=0.02)
    assert set(np.unique(start.remaining)) == set(range(longest + 1))
    spread = np.asarray(start.offset)[np.asarray(start.scale) > 0] / restless[:, None]
    np.testing.assert_allclose([spread.mean(), spread.std()], [0, 1], atol=0.03)

    after, action = value_refit.disturbed_action(start, jnp.zeros((n, 2)), KEY, redraw=0.2)
    kept = (after.offset == start.offset).all(axis=1)[start.scale > 0]
    np.testing.assert_allclose(kept.mean(), 0.8, atol=0.02)
    np.testing.assert_array_equal(after.remaining, start.remaining - 1)
    acted, disturbed = np.asarray(action), np.asarray(start.remaining > 0)
    np.testing.assert_array_equal(acted[~disturbed], 0)
    np.testing.assert_array_equal(acted[disturbed], np.clip(after.offset, -1, 1)[disturbed])


def test_the_disturbing_policy_counts_down_and_keeps_to_the_box():
    policy = value_refit.make_policy(lambda source, observation: source * jnp.ones((5, 2)))
    carry = (jnp.float32(0.5), value_refit.init_disturbance(KEY, 5, 2, longest=3, largest=5.0, calm=0.0))
    before = carry[1].remaining
    for step in range(4):
        carry, action = policy(carry, jnp.zeros((5, 3)), jax.random.key(step))
        assert (jnp.abs(action) <= 1).all()
        np.testing.assert_array_equal(action[before <= step], 0.5)
    assert carry[0] == 0.5


def known(observation):
    return 5.0 + 3.0 * observation[..., 0] - observation[..., 1] ** 2


@functools.partial(jax.jit, static_argnames=("epochs",))
def fit(key, observation, target, *, epochs=30):
    network = Value((32,), nn.relu, layer_norm=True)
    return value_refit.fit(key, observation, target, network=network, epochs=epochs, batch=64, lr=1e-2)


def test_finds_a_known_function():
    network = Value((32,), nn.relu, layer_norm=True)
    observation = jax.random.uniform(KEY, (1024, 3), minval=-1, maxval=1)
    variables, offset, scale, metrics = fit(KEY, observation, known(observation))
    fresh = jax.random.uniform(jax.random.key(12), (512, 3), minval=-1, maxval=1)
    error = offset + scale * network.apply(variables, fresh) - known(fresh)
    assert jnp.mean(error**2) < 0.01 * jnp.var(known(fresh))
    assert metrics["value_loss"] < 0.01 * metrics["target_variance"]
    np.testing.assert_allclose(metrics["target_variance"], jnp.var(known(observation)), rtol=1e-4)


def test_a_constant_target():
    variables, offset, _, metrics = fit(KEY, jnp.ones((64, 3)), jnp.full(64, 4.0), epochs=2)
    assert offset == 4.0 and np.isfinite(metrics["value_loss"])
    chex.assert_tree_all_finite(variables)


def test_vmap_on_a_mesh_gives_the_same():
    observation = jax.random.normal(KEY, (8, 64, 3))
    args = (jax.random.split(KEY, 8), observation, known(observation))
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "data"), PartitionSpec("data"))
    sharded = jax.jit(jax.vmap(functools.partial(fit, epochs=2)))(*jax.device_put(args, sharding))
    for lane in (0, 3, 7):
        single = fit(*(x[lane] for x in args), epochs=2)
        chex.assert_trees_all_close(
            jax.device_get(jax.tree.map(lambda x, i=lane: x[i], sharded)), single, rtol=1e-5, atol=1e-6
        )
