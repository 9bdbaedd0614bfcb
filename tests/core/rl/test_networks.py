import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.nn import split_members
from core.rl.networks import (
    Actor,
    Critic,
    Value,
    ValueEnsemble,
    add_steps_to_go,
    apply_critic,
    reset_log_std,
)
from tests.core.modules import run, start

OBSERVATION = jax.random.normal(jax.random.key(0), (5, 3))
ACTION = jnp.full((5, 2), 0.1)


def test_shapes_with_any_leading_axes():
    actor, value, critic = Actor(2, (8,)), Value((8,)), Critic(4, (8,))
    wide, action = jnp.ones((6, 5, 3)), jnp.ones((6, 5, 2))
    mean, log_std = run(actor, start(actor, wide), wide)
    assert mean.shape == log_std.shape == (6, 5, 2)
    assert run(value, start(value, wide), wide).shape == (6, 5)
    assert run(critic, start(critic, wide, action), wide, action).shape == (
        4,
        6,
        5,
    )


def test_a_new_policy_acts_near_zero_with_the_chosen_spread():
    actor = Actor(2, (64, 64), log_std_init=-0.7)
    mean, log_std = run(actor, start(actor, OBSERVATION), OBSERVATION)
    assert abs(mean).max() < 0.1
    np.testing.assert_allclose(log_std, -0.7)


def test_log_std_head_depends_on_the_state_and_keeps_its_range():
    actor = Actor(2, (64,), log_std="head", log_std_init=-1.0, log_std_range=(-1.5, -0.5), final_gain=30.0)
    _, log_std = run(actor, start(actor, OBSERVATION), OBSERVATION)
    assert np.std(log_std, axis=0).max() > 0
    assert log_std.min() >= -1.5 and log_std.max() <= -0.5


@pytest.mark.parametrize("train", [True, False])
def test_fixed_log_std_gets_no_gradient(train):
    actor = Actor(2, (8,), train_log_std=train)
    params = reset_log_std(start(actor, OBSERVATION), -1.2)
    np.testing.assert_allclose(run(actor, params, OBSERVATION)[1], -1.2, rtol=1e-6)
    gradient = jax.grad(lambda p: run(actor, p, OBSERVATION)[1].sum())(params)["params"]["log_std"]
    np.testing.assert_array_equal(gradient, 5.0 if train else 0.0)


def test_a_policy_given_steps_to_go_starts_as_the_same_function():
    short, long = Actor(2, (8, 8), activation=nn.relu), Actor(2, (8, 8), activation=nn.relu, horizon=3)
    params = start(short, OBSERVATION)
    wider = add_steps_to_go(params, 3)
    assert add_steps_to_go(params, 1) is params
    for h in (1, 2, 3):
        after = run(long, wider, OBSERVATION, jnp.full(5, h))
        jax.tree.map(np.testing.assert_array_equal, after, run(short, params, OBSERVATION))
    lanes = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), wider)
    jax.tree.map(np.testing.assert_array_equal, add_steps_to_go(lanes, 3), stacked)


def test_steps_to_go_is_a_one_hot_that_zero_leaves_blank():
    critic = Critic(2, (8,), horizon=3)
    params = start(critic, OBSERVATION, ACTION, jnp.ones(5, int))
    kernel = params["params"]["ensemble"]["members"]["Dense_0"]["kernel"]
    assert kernel.shape == (2, 3 + 2 + 3, 8)
    outputs = [run(critic, params, OBSERVATION, ACTION, jnp.full(5, h)) for h in range(4)]
    assert all(not np.allclose(outputs[i], outputs[j]) for i in range(4) for j in range(i))
    with pytest.raises(ValueError, match="horizon=3 needs steps_to_go"):
        run(critic, params, OBSERVATION, ACTION)


def test_members_one_by_one_give_the_numbers_of_the_stacked_critic():
    critic = Critic(3, (16, 16), horizon=2)
    steps_to_go = jnp.array([1, 2, 2, 1, 1])
    params = start(critic, OBSERVATION, ACTION, steps_to_go)
    members = split_members(params, 3)
    np.testing.assert_allclose(
        apply_critic(critic, members, OBSERVATION, ACTION, steps_to_go),
        apply_critic(critic, params, OBSERVATION, ACTION, steps_to_go),
        rtol=1e-5,
        atol=1e-6,
    )


def test_members_of_a_value_ensemble_are_values_of_their_own():
    ensemble = ValueEnsemble(3, (8,))
    params = start(ensemble, OBSERVATION)
    values = run(ensemble, params, jnp.stack([OBSERVATION, OBSERVATION]))
    assert values.shape == (3, 2, 5)
    assert np.std(values[:, 0], axis=0).min() > 0
    gradient = jax.grad(lambda p: run(ensemble, p, OBSERVATION)[1].sum())(params)
    for leaf in jax.tree.leaves(gradient):
        assert (leaf[0] == 0).all() and (leaf[2] == 0).all()
