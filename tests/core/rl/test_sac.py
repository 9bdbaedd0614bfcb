import dataclasses
import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from core.errors import UserError
from core.rl import sac
from core.rl.networks import Actor, Critic
from tests.core.modules import run
from tests.core.rl.golden import GOLDEN, precision

HYPER = sac.Hyper.arrays(gamma=0.9, actor_lr=1e-2, critic_lr=1e-2, alpha_lr=1e-2, tau=0.1)


class Recorded:
    """Stands for a module: its "parameters" are the outputs, as recorded in the golden file."""

    ensemble, horizon = 10, 1

    def clone(self, ensemble):
        return self

    def apply(self, outputs, *inputs):
        return outputs


def golden_target(golden, hyper, steps_to_go=None):
    config = sac.Config(Recorded(), Recorded(), subset=2)
    batch = sac.Batch(
        observation=None,
        action=None,
        reward=golden["sac_rbar"],
        next_observation=None,
        terminated=golden["sac_terminated"],
        steps_to_go=steps_to_go,
    )
    draws = sac.Draws(noise=None, next_noise=golden["sac_eps"], members=golden["sac_subset"])
    actor = (golden["sac_mu"], golden["sac_log_std"])
    log_alpha = jnp.log(golden["sac_alpha"])
    return sac.critic_target(golden["sac_q_next"], actor, log_alpha, batch, draws, hyper, config=config)


@pytest.mark.parametrize("file", GOLDEN)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_golden_targets(file, dtype):
    with precision(file, dtype) as (golden, tolerance):
        hyper = sac.Hyper(gamma=golden["gamma"], bootstrap=1.0, backup_entropy=0.0)
        steps_to_go = golden["sac_steps_to_go"]
        for name, target in {
            "h1": golden_target(golden, hyper.replace(bootstrap=0.0)),
            "inf": golden_target(golden, hyper.replace(backup_entropy=1.0)),
            "inf_no_backup_entropy": golden_target(golden, hyper),
            "timeindexed": golden_target(golden, hyper, steps_to_go),
        }.items():
            assert target.dtype == dtype
            np.testing.assert_allclose(target, golden[f"sac_target_{name}"], err_msg=name, **tolerance)


@pytest.mark.parametrize("file", GOLDEN)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_golden_temperature_loss(file, dtype):
    with precision(file, dtype) as (golden, tolerance):
        loss = sac.temperature_loss(
            golden["temp_loss_log_alpha"], golden["sac_logp"], golden["temp_loss_target_entropy"]
        )
        np.testing.assert_allclose(loss, golden["temp_loss"], **tolerance)


@functools.partial(jax.jit, static_argnames="config")
def fresh(config):
    return sac.init(jax.random.key(0), config=config, observation_size=3)


def draws_for(batch, members=(0, 2)):
    keys = jax.random.split(jax.random.key(5))
    noise = [jax.random.normal(key, batch.action.shape) for key in keys]
    return sac.Draws(*noise, jnp.array(members))


@functools.partial(jax.jit, static_argnames="config")
def target_of(target_params, state, batch, hyper, config):
    return sac.critic_target(
        target_params, state.actor, state.log_alpha, batch, draws_for(batch), hyper, config=config
    )


def test_window_of_one_ignores_the_target_network(sac_state, batch, sac_config):
    def total(target_params, bootstrap):
        hyper = HYPER.replace(bootstrap=bootstrap)
        return target_of(target_params, sac_state, batch, hyper, sac_config).sum()

    gradient = jax.jit(jax.grad(total))
    none = gradient(sac_state.target, 0.0)
    chex.assert_trees_all_equal(none, jax.tree.map(jnp.zeros_like, none))
    some = gradient(sac_state.target, 1.0)
    assert optax.tree.norm(some) > 0

    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), sac_state.target)
    hyper = HYPER.replace(bootstrap=0.0)
    np.testing.assert_array_equal(target_of(broken, sac_state, batch, hyper, sac_config), batch.reward)


def test_the_last_step_of_a_window_ignores_the_target_network(batch):
    config = sac.Config(Actor(2, (8,), horizon=3), Critic(3, (8,), horizon=3))
    state = fresh(config)
    batch = batch.replace(steps_to_go=jnp.ones(16, jnp.int32).at[:4].set(2))

    @jax.jit
    @jax.grad
    def gradient(target_params, i):
        return target_of(target_params, state, batch, HYPER, config)[i]

    last = gradient(state.target, 7)
    chex.assert_trees_all_equal(last, jax.tree.map(jnp.zeros_like, last))
    assert optax.tree.norm(gradient(state.target, 1)) > 0

    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.target)
    target = target_of(broken, state, batch, HYPER, config)
    np.testing.assert_array_equal(target[4:], batch.reward[4:])
    assert np.isnan(target[1:4]).all()


def test_the_next_value_is_of_the_window_one_shorter(batch):
    config = sac.Config(Actor(2, (8,), horizon=3), Critic(2, (8,), horizon=3))
    state = fresh(config)
    batch = batch.replace(steps_to_go=jnp.full(16, 3, jnp.int32), terminated=jnp.zeros(16, bool))
    draws = draws_for(batch)._replace(members=None)
    hyper = HYPER.replace(backup_entropy=0.0)
    target = jax.jit(functools.partial(sac.critic_target, config=config))(
        state.target, state.actor, state.log_alpha, batch, draws, hyper
    )
    two = jnp.full(16, 2)
    mean, log_std = run(config.actor, state.actor, batch.next_observation, two)
    action = jnp.tanh(mean + jnp.exp(log_std) * draws.next_noise)
    q = run(config.critic, state.target, batch.next_observation, action, two).min(0)
    np.testing.assert_allclose(target, batch.reward + 0.9 * q, rtol=1e-5, atol=1e-6)


def test_losses_take_no_gradient_where_they_should_not(sac_state, batch, sac_config):
    y = jnp.zeros(16)
    no_target = jax.grad(lambda y: sac.critic_loss(sac_state.critic, y, batch, config=sac_config)[0])(y)
    np.testing.assert_array_equal(no_target, 0)
    no_log_prob = jax.grad(lambda lp: sac.temperature_loss(jnp.float32(-1.0), lp, 0.5))(y)
    np.testing.assert_array_equal(no_log_prob, 0)

    def of_alpha(log_alpha):
        noise = draws_for(batch).noise
        return sac.actor_loss(sac_state.actor, sac_state.critic, log_alpha, batch, noise, config=sac_config)[
            0
        ]

    np.testing.assert_array_equal(jax.grad(of_alpha)(jnp.float32(-1.0)), 0)


def test_weights_mask_samples_out(sac_state, batch, sac_config):
    y = jnp.arange(16.0)
    loss = jax.jit(functools.partial(sac.critic_loss, sac_state.critic, config=sac_config))
    first = jax.tree.map(lambda x: x[:6], batch)
    weight = jnp.zeros(16).at[:6].set(2.0)

    def weighted(weight):
        return loss(y, batch.replace(weight=weight))[0]

    np.testing.assert_allclose(weighted(weight), loss(y[:6], first)[0], rtol=1e-5)
    assert weighted(jnp.zeros(16)) == 0


def as_float64(tree):
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def test_gradients_against_finite_differences(sac_state, batch, sac_config):
    leaves = (sac_state.replace(), batch, draws_for(batch))
    host = jax.tree.map(np.asarray, leaves)
    with jax.enable_x64(True):
        state, data, draws = as_float64(host)
        y = jnp.linspace(-1, 1, 16)

        def critic(params):
            return sac.critic_loss(params, y, data, config=sac_config)[0]

        def actor(params):
            return sac.actor_loss(
                params, state.critic, state.log_alpha, data, draws.noise, config=sac_config
            )[0]

        def temperature(log_alpha):
            return sac.temperature_loss(log_alpha, y, -1.0)

        check_grads(jax.jit(critic), (state.critic,), order=1, modes=["rev"], rtol=1e-6)
        check_grads(jax.jit(actor), (state.actor,), order=1, modes=["rev"], rtol=1e-6)
        check_grads(temperature, (state.log_alpha,), order=1, modes=["rev"], rtol=1e-6)


@pytest.fixture(scope="module")
def update(sac_config):
    return jax.jit(functools.partial(sac.update, config=sac_config))


def test_one_update_is_adam_on_the_losses(sac_state, batch, sac_config, update):
    key = jax.random.key(3)
    new, metrics = update(sac_state, batch, key, HYPER)

    @jax.jit
    def by_hand(state):
        draws = sac.draw(key, (), 16, sac_config)
        y = sac.critic_target(
            state.target, state.actor, state.log_alpha, batch, draws, HYPER, config=sac_config
        )

        def loss(params):
            return sac.critic_loss(params, y, batch, config=sac_config)[0]

        value, gradient = jax.value_and_grad(loss)(state.critic)
        adam = optax.adam(1e-2)
        step, _ = adam.update(gradient, adam.init(state.critic))
        return value, optax.apply_updates(state.critic, step)

    value, critic = by_hand(sac_state)
    np.testing.assert_allclose(metrics["critic_loss"], value, rtol=1e-5)
    chex.assert_trees_all_close(new.critic, critic, rtol=1e-4, atol=1e-6)
    average = optax.incremental_update(critic, sac_state.target, 0.1)
    chex.assert_trees_all_close(new.target, average, rtol=1e-4, atol=1e-6)
    assert new.step == 1 and set(map(float, new.log_alpha[None])) != {float(sac_state.log_alpha)}


def test_switches_are_arguments_of_one_compile(sac_state, batch, update):
    key = jax.random.key(3)
    update(sac_state, batch, key, HYPER)
    before = update._cache_size()
    frozen, _ = update(sac_state, batch, key, HYPER.replace(actor_enabled=jnp.float32(0)))
    for name in ("actor", "actor_opt", "log_alpha", "alpha_opt"):
        chex.assert_trees_all_equal(getattr(frozen, name), getattr(sac_state, name))
    assert optax.tree.norm(optax.tree.sub(frozen.critic, sac_state.critic)) > 0

    fixed, _ = update(sac_state, batch, key, HYPER.replace(alpha_lr=jnp.float32(0)))
    assert fixed.log_alpha == sac_state.log_alpha
    still, _ = update(sac_state, batch, key, HYPER.replace(tau=jnp.float32(0)))
    chex.assert_trees_all_equal(still.target, sac_state.target)
    copied, _ = update(sac_state, batch, key, HYPER.replace(tau=jnp.float32(1)))
    chex.assert_trees_all_close(copied.target, copied.critic, rtol=1e-5, atol=1e-6)
    assert update._cache_size() == before


def test_an_actor_with_fixed_log_std_keeps_it(batch):
    config = sac.Config(Actor(2, (8,), train_log_std=False, log_std_init=-1.2), Critic(2, (8,)))
    state = fresh(config)
    new, _ = jax.jit(functools.partial(sac.update, config=config))(state, batch, jax.random.key(1), HYPER)
    np.testing.assert_array_equal(new.actor["params"]["log_std"], state.actor["params"]["log_std"])
    assert optax.tree.norm(optax.tree.sub(new.actor, state.actor)) > 0


def batch_rows(batch, key):
    return jax.tree.map(lambda x: x[jax.random.randint(key, (8,), 0, 16)], batch)


@pytest.fixture(scope="module")
def block(sac_config, batch):
    def make(n=4, policy_delay=2, **changes):
        options = {"config": dataclasses.replace(sac_config, **changes), "n": n, "policy_delay": policy_delay}
        sample = functools.partial(batch_rows, batch)
        return jax.jit(lambda state, key, hyper: sac.update_block(state, key, sample, hyper, **options))

    return make


def test_members_one_by_one_train_to_the_same_numbers(sac_state, block):
    key = jax.random.key(4)
    one_by_one, m1 = block(unroll=True)(sac_state, key, HYPER)
    batched, m2 = block(unroll=False)(sac_state, key, HYPER)
    chex.assert_trees_all_equal_shapes_and_dtypes(one_by_one, sac_state)
    chex.assert_trees_all_close(one_by_one, batched, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(m1, m2, rtol=1e-4, atol=1e-5)
    assert one_by_one.step == 4 and one_by_one.actor_opt.count == 2 and one_by_one.critic_opt.count == 4


def test_a_block_is_its_updates_in_a_row(sac_state, batch, sac_config, block):
    key = jax.random.key(4)
    state, _ = block(n=2, policy_delay=1)(sac_state, key, HYPER)

    @jax.jit
    def in_a_row(state):
        sample_key, draw_key = jax.random.split(key)
        draws = sac.draw(draw_key, (2,), 8, sac_config)
        for i, k in enumerate(jax.random.split(sample_key, 2)):
            rows, draw = batch_rows(batch, k), jax.tree.map(operator.itemgetter(i), draws)
            state, _ = sac._critic_step(state, rows, draw, HYPER, sac_config)
            state, _ = sac._policy_step(state, rows, draw.noise, HYPER, sac_config)
        return state

    chex.assert_trees_all_close(state, in_a_row(sac_state), rtol=1e-4, atol=1e-5)


def test_policy_delay_zero_trains_the_critic_alone(sac_state, block):
    state, metrics = block(n=3, policy_delay=0)(sac_state, jax.random.key(4), HYPER)
    chex.assert_trees_all_equal(state.actor, sac_state.actor)
    assert state.log_alpha == sac_state.log_alpha and state.step == 3
    assert set(metrics) == {"critic_loss", "q", "target"}


def test_mistakes_are_named(sac_state, block, sac_config):
    with pytest.raises(UserError, match="5 critic updates is not a multiple of policy_delay=2"):
        block(n=5)(sac_state, jax.random.key(0), HYPER)
    with pytest.raises(UserError, match=r"subset=4 must lie in 1\.\.3"):
        dataclasses.replace(sac_config, subset=4)
    with pytest.raises(UserError, match=r"actor\.horizon=1 but critic\.horizon=3"):
        sac.Config(Actor(2), Critic(2, horizon=3))
    with pytest.raises(TypeError, match="gama"):
        sac.Hyper.arrays(gama=0.9)


def test_members_of_the_target_subset_are_distinct_and_vary(sac_config):
    members = np.sort(sac.draw(jax.random.key(0), (300,), 4, sac_config).members, axis=1)
    pairs, counts = np.unique(members, axis=0, return_counts=True)
    np.testing.assert_array_equal(pairs, [[0, 1], [0, 2], [1, 2]])
    assert counts.min() > 70


def test_acting_uses_the_start_of_the_window_and_the_mode_without_a_key():
    config = sac.Config(Actor(2, (8,), horizon=3), Critic(2, (8,), horizon=3))
    actor = fresh(config).actor
    x = jnp.ones((5, 3))
    best = sac.act(actor, x, None, config=config)
    mean = run(config.actor, actor, x, jnp.full(5, 3))[0]
    np.testing.assert_allclose(best, jnp.tanh(mean), rtol=1e-6)
    first = sac.act(actor, x, jax.random.key(1), config=config)
    assert not np.allclose(first, sac.act(actor, x, jax.random.key(2), config=config))
    assert abs(first).max() <= 1
