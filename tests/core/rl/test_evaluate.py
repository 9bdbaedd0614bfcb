import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from core.rl import evaluate

STEPS = np.arange(0, 1001, 200)


def test_a_threshold_counts_once_it_is_held():
    success = [
        [0.0, 0.5, 0.6, 0.7, 0.1, 0.1],  # held from 200
        [0.0, 0.9, 0.4, 0.5, 0.5, 0.5],  # touched at 200, held from 600
        [0.0, 0.0, 0.0, 0.0, 0.9, 0.9],  # too late to be confirmed
        [0.9, 0.9, 0.9, 0.0, 0.0, 0.0],  # held from the start
        [0.49] * 6,
    ]
    steps, censored = evaluate.steps_to_threshold(STEPS, success, budget=1000)
    np.testing.assert_array_equal(steps, [200, 600, 1000, 0, 1000])
    np.testing.assert_array_equal(censored, [False, False, True, False, True])
    assert evaluate.steps_to_threshold(STEPS, success[2], budget=1000, hold=1)[0] == 800
    assert evaluate.steps_to_threshold(STEPS, success[4], budget=1000, tau=0.4)[0] == 0


def test_a_curve_shorter_than_the_hold_is_censored():
    steps, censored = evaluate.steps_to_threshold([0, 200], np.ones((3, 2)), budget=400)
    np.testing.assert_array_equal(steps, 400)
    assert censored.all() and censored.shape == (3,)


def test_unfilled_points_never_reach_the_threshold():
    success = [0.9, 0.9, np.nan, np.nan, np.nan, np.nan]
    assert evaluate.steps_to_threshold(STEPS, success, budget=1000)[1]


def test_curves_of_different_lengths_are_refused():
    with pytest.raises(UserError, match="5 evaluations but steps has 6"):
        evaluate.steps_to_threshold(STEPS, np.ones(5), budget=1000)


def test_auc_is_the_mean_height():
    np.testing.assert_allclose(evaluate.auc(STEPS, [[2.0] * 6, np.linspace(0, 1, 6)]), [2.0, 0.5])
    np.testing.assert_allclose(evaluate.auc([0, 100, 1000], [0.0, 1.0, 1.0]), 0.95)


def test_the_dip_looks_only_at_the_first_fraction():
    returns = [[10.0, 8.0, 12.0, 0.0, 0.0, 0.0], [10.0, 11.0, 12.0, 0.0, 0.0, 0.0]]
    dip = evaluate.initial_dip(STEPS, returns, budget=2000, zero_shot_return=[10.0, 10.0])
    np.testing.assert_allclose(dip, [-0.2, 0.0])
    late = evaluate.initial_dip(STEPS, returns, budget=2000, zero_shot_return=10.0, fraction=0.5)
    np.testing.assert_allclose(late, -1.0)
    negative = evaluate.initial_dip(STEPS, [-5.0, -10.0, 0, 0, 0, 0], budget=1000, zero_shot_return=-5.0)
    np.testing.assert_allclose(negative, -1.0)


@jax.jit
def _two_blocks(ended, success):
    used, curve = evaluate.Interaction.none(), evaluate.init_curve(3)
    for block in ended:
        curve = evaluate.record(curve, used, success=success, returns=10 * success)
        used = evaluate.count(used, block, control_seconds=0.1)
    return used, evaluate.record(curve, used, success=success, returns=10 * success)


def test_a_curve_counts_steps_episodes_and_seconds():
    ended = jnp.zeros((2, 40, 3), bool).at[:, -1].set(True).at[0, 5, 0].set(True)
    used, curve = _two_blocks(ended, 0.25)
    assert (int(used.steps), int(used.episodes)) == (240, 7)
    np.testing.assert_allclose(used.seconds, 24.0, rtol=1e-6)
    np.testing.assert_array_equal(curve.steps, [0, 120, 240])
    np.testing.assert_array_equal(curve.episodes, [0, 4, 7])
    np.testing.assert_allclose(curve.returns, 2.5)
    assert curve.size == 3


def test_curves_of_lanes_and_empty_points():
    curve = jax.vmap(lambda _: evaluate.init_curve(4))(jnp.arange(2))
    used = jax.vmap(lambda _: evaluate.Interaction.none())(jnp.arange(2))
    put = jax.vmap(lambda c, u, s: evaluate.record(c, u, success=s, returns=s))
    curve = put(curve, used, jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(curve.success[:, 0], [0.1, 0.2])
    assert np.isnan(curve.success[:, 1:]).all()
