import functools
from pathlib import Path
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from core.errors import UserError
from robotics.sgft import dynamics
from robotics.sgft.dynamics import Dynamics

GOLDEN = Path(__file__).parents[2] / "golden" / "sgft"
SCALE = (0.05, 0.3, 0.5)
PLAIN = Dynamics(scale=SCALE, hidden=(16, 16))
PROBABILISTIC = Dynamics(
    scale=SCALE, hidden=(16,), activation=nn.silu, layer_norm=False, probabilistic=True, learned_bounds=True
)
predict = jax.jit(dynamics.predict, static_argnames="network")
member_losses = jax.jit(dynamics.member_losses, static_argnames="network")


class Batch(NamedTuple):
    observation: jax.Array
    action: jax.Array
    next_observation: jax.Array


def make_batch(seed, *shape):
    """Transitions of a damped system that two actions push; leaves `[*shape, ..]`."""
    rng = np.random.default_rng(seed)
    observation = rng.normal(size=(*shape, 3)).astype(np.float32)
    action = rng.uniform(-1, 1, size=(*shape, 2)).astype(np.float32)
    push = action @ np.array([[1.0, 0.5, 0.0], [0.0, -0.5, 1.0]], np.float32)
    return Batch(*map(jnp.asarray, (observation, action, observation + np.array(SCALE, np.float32) * push)))


@functools.cache
def make_state(network=PLAIN, *, members=3):
    init = functools.partial(dynamics.init, network=network, action_size=2, members=members)
    return jax.jit(init)(jax.random.key(0))


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("dtype, tolerance", [("float64", {"rtol": 1e-6}), ("float32", {"rtol": 1e-4})])
def test_likelihood_matches_golden(name, dtype, tolerance):
    golden = np.load(GOLDEN / f"{name}_losses.npz")
    with jax.enable_x64(dtype == "float64"):
        raw, x, mean = (golden[key].astype(dtype) for key in ("dyn_logvar_raw", "dyn_x", "dyn_mu"))
        log_var = dynamics.soft_clamp(raw, float(golden["dyn_min"]), float(golden["dyn_max"]))
        nll = dynamics.gaussian_nll(x, mean, log_var)
    assert log_var.dtype == nll.dtype == dtype
    np.testing.assert_allclose(log_var, golden["dyn_logvar"], **tolerance)
    np.testing.assert_allclose(nll, golden["dyn_nll"], **tolerance)


@pytest.mark.parametrize("network", [PLAIN, PROBABILISTIC], ids=["squared error", "likelihood"])
def test_gradients_match_finite_differences(network):
    with jax.enable_x64(True):
        double = functools.partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, jnp.float64))
        params, batch = double(make_state(network, members=2).params), double(make_batch(0, 4))
        loss = jax.jit(lambda params: dynamics.loss(params, batch, network=network))
        check_grads(loss, (params,), order=1, modes=["rev"])


def test_gradient_of_the_clamped_likelihood_matches_finite_differences():
    golden = np.load(GOLDEN / "a_losses.npz")
    with jax.enable_x64(True):

        def nll(mean, raw, low, high):
            return dynamics.gaussian_nll(golden["dyn_x"], mean, dynamics.soft_clamp(raw, low, high)).sum()

        # Away from the clamp's floor, where exp(-log_var) is too large for finite differences.
        raw = np.clip(golden["dyn_logvar_raw"], -3, 3)
        check_grads(nll, (golden["dyn_mu"], raw, -10.0, 0.5), order=1, modes=["rev"])


def test_layer_norm_is_flax_layer_norm():
    rng = np.random.default_rng(0)
    x, kernel, bias = 3 + rng.normal(size=(5, 4, 8)), rng.normal(size=(8, 32)), rng.normal(size=32)
    with jax.enable_x64(True):
        expected = nn.LayerNorm(use_bias=False, use_scale=False).apply({}, x @ kernel + bias)
        result = dynamics.layer_norm_affine(*map(jnp.asarray, (x, kernel, bias)))
    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)


def test_prediction_is_the_scaled_change_of_each_member():
    state, batch = make_state(), make_batch(0, 2, 5)
    result = predict(state.params, batch.observation, batch.action, network=PLAIN)
    assert result.shape == (3, 2, 5, 3)
    for member in range(3):
        params = jax.tree.map(lambda leaf, member=member: leaf[member], state.params)
        change, _ = PLAIN.apply(params, batch.observation, batch.action)
        expected = batch.observation + change * np.array(SCALE, np.float32)
        np.testing.assert_allclose(result[member], expected, rtol=1e-5, atol=1e-6)


def test_rollout_keeps_every_member_on_its_own_branch():
    state, batch = make_state(), make_batch(0, 6)
    first = predict(state.params, batch.observation, batch.action, network=PLAIN)
    second = dynamics.rollout_step(state.params, first, batch.action, network=PLAIN)
    for member in range(3):
        own = predict(state.params, first[member], batch.action, network=PLAIN)[member]
        np.testing.assert_allclose(second[member], own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("network", [PLAIN, PROBABILISTIC], ids=["squared error", "likelihood"])
def test_training_learns_the_system(network):
    data, holdout = make_batch(1, 2000), make_batch(2, 200)

    @jax.jit
    def train(state, key):
        def sample(key):
            rows = jax.random.randint(key, (64,), 0, 2000)
            return jax.tree.map(lambda leaf: leaf[rows], data)

        return dynamics.train_block(state, key, sample, 3e-3, network=network, n=400)

    state, metrics = train(make_state(network), jax.random.key(1))
    predicted = predict(state.params, holdout.observation, holdout.action, network=network)
    error = (predicted - holdout.next_observation) / np.array(SCALE)
    change = (holdout.next_observation - holdout.observation) / np.array(SCALE)
    assert jnp.mean(error**2) < 0.1 * jnp.mean(change**2)
    assert metrics["dynamics_loss"].shape == ()


def test_members_do_not_disturb_each_other():
    batch, state = make_batch(0, 16), make_state()
    step = jax.jit(functools.partial(dynamics.train_step, network=PLAIN))
    together, _ = step(state, batch, 1e-3)
    alone, _ = step(jax.tree.map(lambda leaf: leaf[1:2] if leaf.ndim else leaf, state), batch, 1e-3)
    chex.assert_trees_all_close(
        jax.tree.map(lambda leaf: leaf[1:2], together.params), alone.params, rtol=1e-5, atol=1e-7
    )


def test_shared_and_own_batches():
    data = make_batch(0, 500)
    first = jax.tree.map(lambda leaf: leaf[:1], make_state().params)
    twins = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), first)
    state = make_state(members=2).replace(params=twins)

    def sample(key):
        rows = jax.random.randint(key, (8,), 0, 500)
        return jax.tree.map(lambda leaf: leaf[rows], data)

    def difference(state, own_batches):
        train = functools.partial(dynamics.train_block, network=PLAIN, n=3, own_batches=own_batches)
        trained, _ = train(state, jax.random.key(0), sample, 1e-3)
        return sum(jnp.abs(leaf[0] - leaf[1]).sum() for leaf in jax.tree.leaves(trained.params))

    shared, own = jax.jit(lambda state: (difference(state, False), difference(state, True)))(state)
    assert shared == 0 and own > 0


def test_a_batch_for_each_member_gives_each_its_own_loss():
    state, batch = make_state(), make_batch(0, 3, 16)
    losses = member_losses(state.params, batch, network=PLAIN)
    for member in range(3):
        own = jax.tree.map(lambda leaf, member=member: leaf[member], batch)
        expected = member_losses(state.params, own, network=PLAIN)[member]
        np.testing.assert_allclose(losses[member], expected, rtol=1e-5)


def test_elites_are_the_best_on_the_holdout_best_first():
    state, holdout = make_state(members=5), make_batch(0, 64)
    losses = member_losses(state.params, holdout, network=PLAIN)
    best = jax.jit(dynamics.elites, static_argnames=("count", "network"))(
        state.params, holdout, count=2, network=PLAIN
    )
    np.testing.assert_allclose(member_losses(best, holdout, network=PLAIN), np.sort(losses)[:2], rtol=1e-5)


def test_step_is_adam_with_the_given_rate():
    state, batch = make_state(), make_batch(0, 16)
    adam = optax.adam(1e-2)
    gradient = jax.jit(jax.grad(functools.partial(dynamics.loss, network=PLAIN)))(state.params, batch)
    updates, _ = adam.update(gradient, adam.init(state.params))
    expected = optax.apply_updates(state.params, updates)
    step = jax.jit(functools.partial(dynamics.train_step, network=PLAIN))
    chex.assert_trees_all_close(step(state, batch, 1e-2)[0].params, expected, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_equal(step(state, batch, 0.0)[0].params, state.params)
    assert step._cache_size() == 1


def test_learned_bounds_are_pulled_together_by_their_penalty():
    state, batch = make_state(PROBABILISTIC), make_batch(0, 16)
    loss = functools.partial(dynamics.loss, state.params, batch, network=PROBABILISTIC)
    # Three members, three numbers each, (0.5 - -10) apart.
    np.testing.assert_allclose(loss(bound_penalty=1.0) - loss(bound_penalty=0.0), 9 * 10.5, rtol=1e-4)
    gradient = jax.jit(jax.grad(functools.partial(dynamics.loss, network=PROBABILISTIC)))
    gradient = gradient(state.params, batch)["params"]
    assert jnp.abs(gradient["max_log_var"]).min() > 0 and jnp.abs(gradient["min_log_var"]).min() > 0
    fixed = Dynamics(scale=SCALE, hidden=(16,), probabilistic=True)
    assert "max_log_var" not in make_state(fixed).params["params"]


def test_log_variance_stays_within_its_bounds():
    params = make_state(PROBABILISTIC, members=1).params
    single = jax.tree.map(lambda leaf: 1e3 * leaf[0], params)
    single["params"] |= {"min_log_var": jnp.full(3, -10.0), "max_log_var": jnp.full(3, 0.5)}
    batch = make_batch(0, 100)
    _, log_var = PROBABILISTIC.apply(single, batch.observation, batch.action)
    assert log_var.min() >= -10 and log_var.max() <= 0.51
    assert log_var.min() < -9.9 and log_var.max() > 0.4


def test_wrong_observation_size_is_named():
    with pytest.raises(UserError, match="observations have 4 numbers, but the dynamics' scale has 3"):
        dynamics.predict(make_state().params, jnp.zeros(4), jnp.zeros(2), network=PLAIN)


def train_lane(state, batch, lr):
    return dynamics.train_step(state, batch, lr, network=PROBABILISTIC)


@functools.cache
def lanes():
    """(state, batch, lr) of eight lanes, each with its own learning rate."""
    keys = jax.random.split(jax.random.key(0), 8)
    init = functools.partial(dynamics.init, network=PROBABILISTIC, action_size=2, members=2)
    state = jax.jit(jax.vmap(init))(keys)
    return state, make_batch(0, 8, 16), jnp.linspace(1e-4, 1e-2, 8)


def test_train_step_over_lanes_equals_single_lanes():
    single = jax.jit(train_lane)
    each = [single(*jax.tree.map(lambda leaf, i=i: leaf[i], lanes())) for i in range(8)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.device_put(lanes(), NamedSharding(mesh, PartitionSpec("data")))
    batched = jax.jit(jax.vmap(train_lane))
    for result in (batched(*lanes()), batched(*sharded), jax.pmap(train_lane)(*lanes())):
        chex.assert_trees_all_close(result, expected, rtol=1e-5, atol=1e-6)


def test_train_step_with_a_sharded_batch_equals_one_device():
    state, batch = make_state(), make_batch(0, 64)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    state_everywhere = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    step = jax.jit(functools.partial(dynamics.train_step, network=PLAIN))
    chex.assert_trees_all_close(
        step(state_everywhere, sharded, 1e-3), step(state, batch, 1e-3), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_train_step_exports(platform):
    exported = jax.export.export(jax.jit(train_lane), platforms=[platform])(
        *jax.tree.map(lambda leaf: leaf[0], lanes())
    )
    assert exported.platforms == (platform,)
    assert exported.mlir_module_serialized
