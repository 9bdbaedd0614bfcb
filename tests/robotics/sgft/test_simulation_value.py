"""What the planner plays in simulation while V_sim is improved: the best action, or a random one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from robotics.sgft import simulation_value
from robotics.sgft.source import sim_value
from robotics.sgft.tasks import puck_push
from robotics.sgft.value_improvement import Alternatives
from tests.robotics.sgft.conftest import LANES

ENVS, CANDIDATES = 500, 4
ALL = LANES * ENVS
KEY = jax.random.key(3)
ACTIONS = jax.random.uniform(KEY, (CANDIDATES, ALL, 2), minval=-1.0)
BEFORE = jnp.full((ALL, 2), 7.0)


def tried():
    rng = np.random.default_rng(0)
    shape = (LANES, ENVS, CANDIDATES)
    reached = rng.uniform(-1, 1, (*shape, 8)).astype(np.float32)
    earned = rng.normal(size=shape).astype(np.float32)
    return Alternatives(reached[:, :, 0], reached, earned, np.full(shape, 0.9, np.float32))


def choose(source, networks, *, exploring, was_random):
    function = jax.jit(simulation_value.choose, static_argnames="modules")
    held = BEFORE, jnp.full(ALL, was_random)
    return function(source, tried(), ACTIONS, held, KEY, modules=networks, exploring=exploring)


def test_without_exploring_each_lane_plays_what_its_own_v_sim_prefers(source, networks):
    rows = tried()
    values = jax.vmap(functools.partial(sim_value, networks=networks))(source, rows.reached)
    best = np.argmax(rows.earned + 0.9 * values, axis=-1).reshape(-1)
    assert len(np.unique(best)) == CANDIDATES
    action, at_random = choose(source, networks, exploring=0.0, was_random=False)
    np.testing.assert_array_equal(action, np.asarray(ACTIONS)[best, np.arange(ALL)])
    assert not at_random.any()


def test_a_random_action_goes_on_for_another_step_half_of_the_time(source, networks):
    action, at_random = choose(source, networks, exploring=0.0, was_random=True)
    goes_on = (np.asarray(action) == 7.0).all(axis=1)
    np.testing.assert_array_equal(at_random, goes_on)
    np.testing.assert_allclose(goes_on.mean(), 0.5, atol=0.03)


def test_random_actions_begin_as_often_as_they_say(source, networks):
    action, at_random = choose(source, networks, exploring=0.25, was_random=False)
    np.testing.assert_allclose(np.mean(at_random), 0.25, atol=0.03)
    np.testing.assert_array_equal(action[at_random], ACTIONS[0][at_random])


def test_environments_of_the_wide_simulator_never_end():
    options = type("Options", (), {"exploring_share": 0.5, "num_envs": 2})
    simulator = simulation_value.wide_simulator(puck_push.TASK, options, 1, backend="native")
    env = simulator.reset(KEY)
    for _ in range(puck_push.TASK.episode_length + 1):
        env = simulator.auto_reset_step(env, np.zeros((2, 2), np.float32))
        assert not (env.terminated | env.truncated).any()
