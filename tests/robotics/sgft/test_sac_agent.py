"""SGFT-SAC and its baselines: each switch does what the table of sac_agent says, and nothing else."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from core.rl import replay
from core.rl.networks import reset_log_std
from robotics.sgft import finetune, sac_agent
from robotics.sgft.sac_agent import ModelFree, training_reward
from robotics.sgft.source import sim_value
from tests.robotics.sgft.conftest import jitted, model_free, rules

KEY = jax.random.key(7)


@pytest.fixture(scope="session")
def one(source, experience, lane):
    """Source and a block of experience of lane 0."""
    return lane(source), lane(experience)


def start(agent, source, *, options=None):
    return jitted(agent.init)(KEY, source, agent.options if options is None else options)


def learn(agent, state, source, experience):
    return jitted(agent.learn)(state, source, experience, KEY)


def poisoned(experience):
    """The same with NaN for a reward: whatever reads it shows it."""
    reward = jnp.full_like(experience.transition.reward, jnp.nan)
    return experience.replace(transition=experience.transition.replace(reward=reward))


def test_the_actor_starts_as_pi_sim_or_at_random(one):
    agent = model_free(log_std=-1.5)
    state = start(agent, one[0])
    chex.assert_trees_all_equal(state.sac.actor, reset_log_std(one[0].actor, -1.5))
    scratch = start(agent, one[0], options=agent.options.replace(from_simulation=jnp.float32(0)))
    others = one[0].replace(actor=jax.tree.map(lambda x: x + 1, one[0].actor))
    chex.assert_trees_all_equal(
        scratch.sac.actor,
        start(agent, others, options=agent.options.replace(from_simulation=jnp.float32(0))).sac.actor,
    )
    assert not np.allclose(*(jax.tree.leaves(s.sac.actor)[1] for s in (scratch, state)))


def test_a_window_adds_inputs_but_no_change_of_policy(one):
    plain, window = model_free(), model_free(horizon=3)
    observation = one[1].transition.observation
    actions = [agent.exploit(start(agent, one[0]), one[0], observation, KEY) for agent in (plain, window)]
    np.testing.assert_allclose(*actions, rtol=1e-6)


@pytest.mark.parametrize("potential", ["zero", "keep"])
def test_the_shaped_reward_is_equation_1(one, potential):
    settings = model_free(terminal_potential=potential).init.keywords["settings"]
    _, block = one
    ended = jnp.arange(10) % 3 == 0
    block = block.replace(transition=block.transition.replace(terminated=ended))
    kept = np.where(ended, 0.0, block.next_value) if potential == "zero" else np.asarray(block.next_value)
    expected = block.transition.reward + 0.97 * kept - block.value
    np.testing.assert_allclose(training_reward(block, rules(), settings), expected, rtol=1e-6)
    raw = training_reward(block, rules(shaping=0.0), settings)
    np.testing.assert_array_equal(raw, block.transition.reward)


def test_shaping_with_a_value_of_zero_is_bitwise_the_plain_algorithm(one):
    source, block = one
    block = block.replace(value=jnp.zeros(10), next_value=jnp.zeros(10))
    states = []
    for shaping in (0.0, 1.0):
        agent = model_free(horizon=0, shaping=shaping)
        state, metrics = learn(agent, start(agent, source), source, block)
        states.append((state.replace(rules=None), metrics))
    chex.assert_trees_all_equal(*states)


def test_v_sim_is_frozen(one, networks):
    source, block = one
    before = jax.tree.map(np.array, source)
    agent = model_free()
    learn(agent, start(agent, source), source, block)
    chex.assert_trees_all_equal(source, before)

    def total_reward(value):
        rows = block.transition
        ends = (
            sim_value(source.replace(value=value), x, networks=networks)
            for x in (rows.observation, rows.next_observation)
        )
        shaped = training_reward(block.replace(value=next(ends), next_value=next(ends)), rules(), settings)
        return jnp.sum(shaped)

    settings = agent.init.keywords["settings"]
    gradient = jax.grad(total_reward)(source.value)
    chex.assert_trees_all_equal(gradient, jax.tree.map(jnp.zeros_like, gradient))


@pytest.mark.parametrize(("horizon", "reads"), [(1, False), (3, True), (0, True)])
def test_only_a_window_of_one_ignores_the_target_network(one, horizon, reads):
    source, block = one
    agent = model_free(horizon=horizon)
    state = start(agent, source)
    lost = state.replace(sac=state.sac.replace(target=jax.tree.map(lambda x: x * jnp.nan, state.sac.target)))
    (learned, _), (without, _) = (learn(agent, s, source, block) for s in (state, lost))
    trained = ((s.sac.critic, s.sac.actor, s.sac.critic_opt) for s in (learned, without))
    if reads:
        assert not np.isfinite(jax.tree.leaves(without.sac.critic)[0]).all()
    else:
        chex.assert_trees_all_equal(*trained)


def test_the_window_of_one_has_no_gradient_to_the_target_network(one):
    source, block = one
    agent = model_free()
    state = start(agent, source)

    def critic_after(target):
        new, _ = agent.learn(state.replace(sac=state.sac.replace(target=target)), source, block, KEY)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(new.sac.critic))

    gradient = jax.jit(jax.grad(critic_after))(state.sac.target)
    chex.assert_trees_all_equal(gradient, jax.tree.map(jnp.zeros_like, gradient))


def test_rewards_are_shaped_when_drawn(one):
    source, block = one
    agent = model_free()
    state, _ = learn(agent, start(agent, source), source, block)
    rows = replay.sample(state.real, KEY, 16)
    assert np.isin(rows.transition.reward, block.transition.reward).all()  # stored raw
    settings = agent.init.keywords["settings"]
    assert not np.allclose(*(training_reward(rows, rules(gamma=g), settings) for g in (0.97, 0.5)))
    # Changing V_sim of what is stored changes what is learned next, with no new collection.
    data = state.real.data.replace(value=state.real.data.value + 1.0)
    other = state.replace(real=state.real.replace(data=data))
    targets = [learn(agent, s, source, block)[1]["target"] for s in (state, other)]
    assert targets[1] < targets[0]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_prior_share_is_the_simulated_part_of_every_batch(one, share):
    source, block = one

    def paid(experience, reward):
        rows = experience.transition
        return experience.replace(transition=rows.replace(reward=jnp.full_like(rows.reward, reward)))

    source, block = source.replace(simulated=paid(source.simulated, -1.0)), paid(block, 1.0)
    agent = model_free(shaping=0.0, scale=0.0, prior_share=share)
    _, metrics = learn(agent, start(agent, source), source, block)
    np.testing.assert_allclose(metrics["target"], 1 - 2 * share, rtol=1e-6)


def test_without_a_share_or_prefit_simulated_data_is_not_read(one):
    source, block = one
    source = source.replace(simulated=poisoned(source.simulated))
    for agent, clean in [(model_free(), True), (model_free(prior_share=0.5), False)]:
        state, _ = learn(agent, start(agent, source), source, block)
        assert bool(np.isfinite(jax.tree.leaves(state.sac.critic)[0]).all()) == clean


def test_warm_up_freezes_the_actor_alone(one):
    source, block = one
    agent = model_free(warmup_steps=15.0)  # blocks of 10 steps
    begin = start(agent, source)
    first, _ = learn(agent, begin, source, block)
    chex.assert_trees_all_equal(
        (first.sac.actor, first.sac.actor_opt, first.sac.log_alpha),
        (begin.sac.actor, begin.sac.actor_opt, begin.sac.log_alpha),
    )
    assert not np.array_equal(*(jax.tree.leaves(s.sac.critic)[0] for s in (first, begin)))
    second, _ = learn(agent, first, source, block)
    assert not np.array_equal(*(jax.tree.leaves(s.sac.actor)[1] for s in (second, first)))
    assert int(second.steps) == 20


def test_pre_fitting_moves_the_critic_alone(one):
    source, _ = one
    plain, fitted = (start(model_free(prefit_updates=n), source) for n in (0, 4))
    chex.assert_trees_all_equal(plain.sac.actor, fitted.sac.actor)
    assert not np.array_equal(*(jax.tree.leaves(s.sac.critic)[0] for s in (plain, fitted)))
    assert int(fitted.sac.step) == 4 and int(fitted.reward_stats.count) == 64
    assert int(plain.real.size) == int(fitted.real.size) == 0


def test_scaling_makes_the_reward_one_standard_deviation_wide(one):
    source, block = one
    means, spreads = [], np.std(training_reward(block, rules(), model_free().init.keywords["settings"]))
    for scale in (0.0, 1.0):
        agent = model_free(scale=scale)
        means.append(learn(agent, start(agent, source), source, block)[1]["target"])
    np.testing.assert_allclose(means[1], means[0] / spreads, rtol=1e-4)


@pytest.mark.parametrize("horizon", [1, 3])
def test_what_is_deployed_acts_alike_and_holds_no_data(one, horizon):
    source, block = one
    agent = model_free(horizon=horizon)
    state, _ = learn(agent, start(agent, source), source, block)
    small = finetune.deployed(state)
    observation = block.transition.observation
    for act, seen in ((agent.explore, observation[0]), (agent.exploit, observation)):
        action = act(state, source, seen, KEY)
        np.testing.assert_array_equal(action, act(small, source.replace(simulated=None), seen, KEY))
        assert (np.abs(action) <= 1).all()
    kept = sum(leaf.size for leaf in jax.tree.leaves(small))
    assert kept < sum(leaf.size for leaf in jax.tree.leaves(state.sac.actor)) + 30


def test_exploring_draws_and_exploiting_does_not(one):
    source, block = one
    agent = model_free()
    state, other = start(agent, source), jax.random.key(8)
    seen = block.transition.observation
    assert not np.array_equal(*(agent.explore(state, source, seen[0], k) for k in (KEY, other)))
    np.testing.assert_array_equal(*(agent.exploit(state, source, seen, k) for k in (KEY, other)))


def test_a_window_below_one_is_refused():
    settings = model_free().init.keywords["settings"]
    critic, actor = settings.critic.clone(horizon=0), settings.actor.clone(horizon=0)
    with pytest.raises(UserError, match="the window H must be at least 1, not 0"):
        sac_agent.make(ModelFree(actor, critic), rules())
