"""The task: episodes that start anywhere, for the share of them that asks for it."""

import dataclasses

import jax
import numpy as np
import pytest

from core.errors import UserError
from core.sim.task import with_exploring_starts
from robotics.sgft.tasks import puck_push


def test_exploring_starts_are_as_frequent_as_they_say():
    task = with_exploring_starts(puck_push.TASK, 0.3, episode_length=7)
    gap = puck_push.GAPS["none"]
    qpos, _ = jax.vmap(lambda key: task.reset(key, gap))(jax.random.split(jax.random.key(1), 4000))
    nominal = np.isclose(np.linalg.norm(qpos[:, 2:], axis=1), 0.6, atol=1e-4)
    np.testing.assert_allclose(1 - nominal.mean(), 0.3, atol=0.03)
    assert task.episode_length == 7 and puck_push.TASK.episode_length == 40


def test_a_task_without_exploring_starts_says_so_once_they_are_asked_for():
    plain = dataclasses.replace(puck_push.TASK, exploring_reset=None)
    assert with_exploring_starts(plain, 0.0, episode_length=7).reset is plain.reset
    with pytest.raises(UserError, match=r"puck_push has no exploring_reset: set exploring_share to 0"):
        with_exploring_starts(plain, 0.3)
