"""How well V_sim transfers, on a line where true values and raising actions are known."""

import types
from typing import Any, NamedTuple

import jax
import numpy as np

from robotics.sgft import transfer


class At(NamedTuple):
    """Where everybody is; the reward is that place."""

    observation: Any
    reward: Any
    terminated: Any
    final_observation: Any


class Line:
    """20 people on each of two lines, who start between 1 and 2 and walk up to `speed` either way."""

    num_envs = 40
    task = types.SimpleNamespace(episode_length=8, gamma=0.9, action_size=1)

    def __init__(self, speed):
        self.speed = speed

    def at(self, x):
        return At(x, x[:, 0], np.zeros(len(x), bool), x)

    def reset(self, key):
        return self.at(np.asarray(jax.random.uniform(key, (self.num_envs, 1), minval=1.0, maxval=2.0)))

    def step(self, state, action):
        return self.at(state.observation + self.speed * action)

    auto_reset_step = step


def measure(value, *, speed=0.5):
    """On the first line the potential is `value`, on the second its opposite; all walk right."""

    def policy(source, observation):
        return np.full((len(observation), 1), 0.5, np.float32)

    def potential(source, x):
        return source[:, None] * value(x[..., 0])

    signs = np.array([1.0, -1.0])
    return transfer.value_transfer(Line(speed), policy, potential, signs, jax.random.key(0), lanes=2)


def test_a_value_that_orders_states_as_rewards_do_correlates_and_its_opposite_does_not():
    correlation, _ = measure(lambda x: x)
    np.testing.assert_allclose(correlation, [1.0, -1.0], atol=1e-4)


def test_a_value_is_improvable_where_some_action_raises_it_enough():
    np.testing.assert_array_equal(measure(lambda x: 1000.0 * x)[1], [1.0, 1.0])
    # Who can not move has r + gamma V < V where V is large, and the other way round where it is negative.
    np.testing.assert_array_equal(measure(lambda x: 1000.0 * x, speed=0.0)[1], [0.0, 1.0])
    some = measure(lambda x: 1000.0 * x, speed=0.15)[1]
    assert 0.0 < some[0] < 1.0 and some[1] == 1.0


def test_a_constant_value_correlates_with_nothing():
    assert np.isnan(measure(np.zeros_like)[0]).all()
