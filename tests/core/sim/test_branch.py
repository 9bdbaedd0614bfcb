"""Branching: every action from the same state, on both kinds of simulators, true ends included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.sim import NativeSimulator
from core.sim.branch import branch
from robotics.sgft.tasks.closed_form import ClosedFormPuck
from robotics.sgft.tasks.puck_push import TASK

N, C, GAMMA = 4, 3, 0.9
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (C, N, 2)).astype(np.float32)


def crossing_ends(qpos, qvel, ctrl, sensordata):
    """Ends where the hand is left of x = 0.9: for some actions at once, for some never."""
    return sensordata[0] < 0.9


@pytest.fixture(scope="module")
def native():
    task = dataclasses.replace(TASK, terminated=crossing_ends)
    return NativeSimulator(task, N, gaps=TASK.randomisation)


@functools.cache
def closed_form():
    return ClosedFormPuck(N, gaps=TASK.randomisation)


def by_hand(simulator, state, horizon):
    reached, earned, discount = np.zeros((N, C, 8)), np.zeros((N, C)), np.ones((N, C))
    for c in range(C):
        one = state
        for _ in range(horizon):
            one = simulator.step(one, ACTIONS[c])
            earned[:, c] += discount[:, c] * one.reward
            discount[:, c] *= GAMMA * ~np.asarray(one.terminated)
        reached[:, c] = one.observation
    return reached, earned, discount


@pytest.mark.parametrize("horizon", [1, 3])
def test_native(native, horizon):
    state = native.reset(jax.random.key(1))
    before = jax.tree.map(np.array, state.replace(key=jax.random.key_data(state.key)))
    found = branch(native, state, ACTIONS, horizon=horizon, gamma=GAMMA)
    for actual, expected in zip(found, by_hand(native, state, horizon)):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    if horizon == 3:
        assert (found.discount == 0).any() and (found.discount > 0).any()
    after = state.replace(key=jax.random.key_data(state.key))
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("horizon", [1, 3])
def test_pure(horizon):
    simulator = closed_form()
    state = simulator.reset(jax.random.key(1))
    found = branch(simulator, state, jnp.asarray(ACTIONS), horizon=horizon, gamma=GAMMA)
    for actual, expected in zip(found, by_hand(simulator, state, horizon)):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
