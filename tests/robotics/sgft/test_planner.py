"""The planner against worlds whose best action is known."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from robotics.sgft import planner

KEY = jax.random.key(3)
GOAL = jnp.array([0.3, -0.6])


def move(state, action):
    """Linear dynamics of 2 members `[2, N, 2]`: a step covers a tenth of the action."""
    return state + 0.1 * action


def nearness(state):
    return -jnp.sum((state - GOAL) ** 2, axis=-1)


def no_reward(state):
    return jnp.zeros(state.shape[:-1])


def plan(key=KEY, start=(0.0, 0.0), default=(0.0, 0.0), *, gamma=0.9, horizon=1, **changes):
    world = {"step": move, "reward": no_reward, "value": nearness, "members": 2, **changes}
    return planner.plan(key, jnp.array(start), jnp.array(default), gamma=gamma, horizon=horizon, **world)


@pytest.mark.parametrize("horizon", [1, 3])
def test_finds_the_best_action_of_a_linear_world(horizon):
    # From here H steps of 0.1 times the best action reach the goal.
    start = GOAL - 0.1 * horizon * jnp.array([0.5, -0.25])
    action = plan(start=start, candidates=4096, horizon=horizon)
    np.testing.assert_allclose(action, [0.5, -0.25], atol=0.05)


def test_more_candidates_come_closer():
    best, keys = np.array([0.5, -0.25]), jax.random.split(KEY, 8)
    start = GOAL - 0.1 * best
    few, many = (jax.vmap(lambda key, n=n: plan(key, start, candidates=n))(keys) for n in (8, 512))
    assert np.abs(many - best).mean() < np.abs(few - best).mean() / 3


def test_the_default_action_is_a_candidate():
    best = (0.5, -0.25)
    start = GOAL - 0.1 * jnp.array(best)
    np.testing.assert_array_equal(plan(start=start, default=best, candidates=16), np.float32(best))
    # Alone it is the answer whatever it is worth, clipped to what an action may be.
    np.testing.assert_array_equal(plan(start=start, default=(-3.0, 0.5), candidates=1), [-1.0, 0.5])


def test_actions_lie_in_the_box_and_depend_on_the_key_alone():
    actions = jax.vmap(lambda key: plan(key, (0.0, 0.0), candidates=8))(jax.random.split(KEY, 200))
    assert (jnp.abs(actions) <= 1).all() and len(np.unique(actions, axis=0)) > 100
    np.testing.assert_array_equal(plan(), plan())


@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_the_score_is_the_windows_return_under_each_member(horizon):
    rng = np.random.default_rng(0)
    speeds, actions = np.array([0.1, 0.3]), rng.uniform(-1, 1, (7, 2)).astype(np.float32)

    def step(state, action):
        return state + jnp.asarray(speeds)[:, None, None] * action

    def reward(state):
        return jnp.sum(state, axis=-1)

    world = {"step": step, "reward": reward, "value": nearness, "members": 2}
    scores = planner.score_actions(jnp.asarray(actions), GOAL, gamma=0.9, horizon=horizon, **world)
    expected = np.zeros((2, 7))
    for member in range(2):
        for i, action in enumerate(actions):
            state = np.asarray(GOAL)
            for k in range(horizon):
                state = state + speeds[member] * action
                expected[member, i] += 0.9**k * reward(state)
            expected[member, i] += 0.9**horizon * nearness(state)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_members_are_averaged():
    def step(state, action):  # the second member goes the other way, three times as far
        return state + jnp.array([0.1, -0.3])[:, None, None] * action

    action = plan(step=step, reward=lambda state: state[..., 0], value=None, candidates=256)
    assert action[0] < -0.9


def test_without_a_value_only_rewards_count():
    without = plan(value=None, reward=lambda state: state[..., 0], candidates=256)
    assert without[0] > 0.9
    assert plan(reward=lambda state: state[..., 0], value=lambda s: -10 * s[..., 0], candidates=256)[0] < -0.9


def test_a_horizon_below_one_is_refused():
    with pytest.raises(UserError, match="planning horizon H must be at least 1, not 0"):
        plan(horizon=0)


def test_jit_vmap_and_export():
    keys, starts = jax.random.split(KEY, 3), jnp.linspace(-1, 1, 6).reshape(3, 2)
    batched = jax.jit(jax.vmap(plan))(keys, starts)
    chex.assert_trees_all_close(batched, jnp.stack([plan(*x) for x in zip(keys, starts)]), rtol=1e-6)
    exported = jax.export.export(jax.jit(plan), platforms=("cuda", "tpu"))(KEY, GOAL)
    assert exported.platforms == ("cuda", "tpu")
