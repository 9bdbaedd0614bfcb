"""SGFT-MB: a model of both kinds of transitions, and plans through it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from robotics.sgft import dynamics, finetune, planner
from robotics.sgft.dynamics import Dynamics
from robotics.sgft.model_based import ModelBased
from robotics.sgft.source import policy_action, sim_value
from robotics.sgft.tasks import puck_push

KEY = jax.random.key(5)
NETWORK = Dynamics(puck_push.TASK.observation_step, (16,))


@pytest.fixture(scope="module")
def trained(source, experience, lane, planning):
    """(agent, jitted learn, source, block of real steps, state before, state after)."""
    agent, source, block = planning(pretrain_updates=300), lane(source), lane(experience)
    state = jax.jit(agent.init)(KEY, source, None)
    learn = jax.jit(agent.learn)
    return agent, learn, source, block, state, learn(state, source, block, KEY)[0]


def lost(rows):
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, rows)


def test_the_model_begins_with_what_simulation_shows(trained):
    _, _, source, _, state, _ = trained
    loss = functools.partial(dynamics.loss, batch=source.simulated.transition, network=NETWORK)
    fresh = dynamics.init(jax.random.split(KEY)[0], network=NETWORK, action_size=2, members=2)
    assert loss(state.model.params) < 0.5 * loss(fresh.params)
    assert int(state.real.size) == 0


def test_learning_keeps_raw_real_steps_and_mixes_both_kinds(trained):
    _, learn, source, block, state, after = trained
    assert int(after.real.size) == 10
    stored = jax.tree.map(lambda leaf: leaf[:10], after.real.data)
    chex.assert_trees_all_equal(stored, block.transition)
    for changed in (
        (source.replace(simulated=lost(source.simulated)), block),
        (source, block.replace(transition=lost(block.transition))),
    ):
        broken, _ = learn(state, *changed, KEY)
        assert not np.isfinite(jax.tree.leaves(broken.model.params)[0]).all()


def test_an_action_is_the_plan_of_its_parts(trained, networks):
    agent, _, source, block, _, state = trained
    observation = block.transition.observation[:3]

    def plan(key, one):
        return planner.plan(
            key,
            one,
            policy_action(source, one, networks=networks),
            candidates=32,
            step=functools.partial(dynamics.rollout_step, state.model.params, network=NETWORK),
            reward=puck_push.reward,
            value=functools.partial(sim_value, source, networks=networks),
            members=2,
            gamma=0.97,
            horizon=3,
        )

    expected = jax.jit(jax.vmap(plan))(jax.random.split(KEY, 3), observation)
    action = jax.jit(agent.exploit)(state, source, observation, KEY)
    np.testing.assert_allclose(action, expected, rtol=1e-6)
    explored = jax.vmap(functools.partial(agent.explore, state, source, observation[0]))(
        jax.random.split(KEY, 64)
    )
    assert (np.abs(explored) <= 1).all() and len(np.unique(explored, axis=0)) > 32


def test_the_ablation_never_reads_v_sim(planning, trained):
    def forbidden(source, observation):
        raise AssertionError("the ablation asked V_sim")

    _, _, source, block, _, state = trained
    agent = planning(forbidden, use_value=False)
    action = agent.exploit(state, source, block.transition.observation[:2], KEY)
    assert action.shape == (2, 2) and np.isfinite(action).all()
    with pytest.raises(AssertionError, match="asked V_sim"):
        planning(forbidden).exploit(state, source, block.transition.observation[:2], KEY)


def test_what_is_deployed_acts_alike_and_holds_no_data(trained):
    agent, _, source, block, _, state = trained
    small = finetune.deployed(state)
    for act, seen in (
        (agent.explore, block.transition.observation[0]),
        (agent.exploit, block.transition.observation),
    ):
        np.testing.assert_array_equal(
            act(state, source, seen, KEY), act(small, source.replace(simulated=None), seen, KEY)
        )
    chex.assert_trees_all_equal(jax.tree.leaves(small), jax.tree.leaves(state.model.params))


def test_a_horizon_below_one_is_refused():
    with pytest.raises(UserError, match="planning horizon H must be at least 1, not 0"):
        ModelBased(NETWORK, horizon=0)
