"""The gap: its draw, its checks, and what it does to an action on its way to the actuators."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from core.sim import RealGap, sample_gap
from core.sim.gap import broadcast_gap, command, resolve_gaps


def test_draws_stay_in_their_ranges_and_fill_them():
    ranges = {"mass_scale": (0.7, 1.3), "frame_rotation": (-0.1, 0.1), "action_delay": (0, 2)}
    gap = sample_gap(jax.random.key(0), ranges, 500)
    for name, (low, high) in ranges.items():
        values = np.asarray(getattr(gap, name))
        assert values.shape == (500,)
        assert low <= values.min() <= low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) <= values.max() <= high
    assert set(np.asarray(gap.action_delay).tolist()) == {0, 1, 2}
    np.testing.assert_array_equal(gap.friction_scale, np.ones(500))


def test_fields_are_drawn_independently_and_reproducibly():
    ranges = {"mass_scale": (0.0, 1.0), "friction_scale": (0.0, 1.0)}
    gap = sample_gap(jax.random.key(0), ranges, 2000)
    assert abs(np.corrcoef(gap.mass_scale, gap.friction_scale)[0, 1]) < 0.07
    chex.assert_trees_all_equal(gap, jax.jit(lambda key: sample_gap(key, ranges, 2000))(jax.random.key(0)))


@pytest.mark.parametrize("xp", [np, jnp])
def test_delay_returns_the_action_of_that_many_steps_ago(xp):
    gap = broadcast_gap(RealGap(action_delay=xp.array([0, 1, 2, 3])), 4, xp)
    buffer = xp.zeros((4, 3, 1), xp.float32)
    given = [0.1, 0.2, 0.3, 0.4, 0.5]
    held = []
    for value in given:
        ctrl, buffer = command(xp.full((4, 1), value, xp.float32), buffer, gap, xp=xp)
        held.append(np.asarray(ctrl)[:, 0])
    np.testing.assert_allclose(
        np.array(held).T,
        [[0.1, 0.2, 0.3, 0.4, 0.5], [0, 0.1, 0.2, 0.3, 0.4], [0, 0, 0.1, 0.2, 0.3], [0, 0, 0, 0.1, 0.2]],
        rtol=1e-6,
    )


@pytest.mark.parametrize("xp", [np, jnp])
def test_actions_are_clipped_and_small_ones_die_in_the_dead_zone(xp):
    gap = broadcast_gap(RealGap(deadzone=0.2), 1, xp)
    action = xp.array([[3.0, -3.0, 0.19, -0.21]], xp.float32)
    ctrl, buffer = command(action, xp.zeros((1, 3, 4), xp.float32), gap, xp=xp)
    np.testing.assert_allclose(ctrl, [[1.0, -1.0, 0.0, -0.21]], rtol=1e-6)
    np.testing.assert_allclose(buffer[0, 0], [1.0, -1.0, 0.19, -0.21], rtol=1e-6)


@pytest.mark.parametrize(
    ("gaps", "message"),
    [
        ({"mas_scale": (0.7, 1.3)}, "did you mean 'mass_scale'"),
        ({"mass_scale": (1.3, 0.7)}, r"mass_scale: the range \(1.3, 0.7\) is empty"),
        ({"action_delay": (0, 5)}, "outside 0..3"),
        ("paper", "give None, a RealGap"),
        (RealGap(mass_scale=np.ones(3)), r"mass_scale has shape \(3,\), but there are 2 environments"),
        (RealGap(action_delay=4), "action_delay is 4"),
    ],
)
def test_wrong_gaps_are_refused_with_their_name(gaps, message):
    with pytest.raises(UserError, match=message):
        resolve_gaps(gaps, 2)
