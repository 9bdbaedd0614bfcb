"""puck_push: the MuJoCo model against its closed form, its gaps, its reward and the scripted expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.sim import NativeSimulator, RealGap, Solver
from robotics.sgft.tasks import closed_form, puck_push
from robotics.sgft.tasks.puck_push import TASK

pusher = jax.jit(jax.vmap(puck_push.scripted_pusher))
closed_step = jax.jit(jax.vmap(closed_form.step, in_axes=(0, 0, None)))


def turn(angle):
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def world(physics, gap):
    """The closed form's state `[N, 8]` of the model's physics: the hand's joints live in the turned frame."""
    qpos, qvel = physics[:, 1:5], physics[:, 5:9]
    frame = turn(float(gap.frame_rotation)).T
    return np.concatenate([qpos[:, :2] @ frame, qvel[:, :2] @ frame, qpos[:, 2:], qvel[:, 2:]], axis=1)


def place(simulator, state8):
    """A state of the simulator in which every world is in the closed form's state `[8]`."""
    state = simulator.reset(jax.random.key(0))
    frame = turn(float(state.gap.frame_rotation[0]))
    hand, hand_velocity, puck, puck_velocity = np.split(np.asarray(state8, float), 4)
    physics = np.concatenate([[0], hand @ frame, puck, hand_velocity @ frame, puck_velocity])
    return state.replace(physics=np.tile(physics, (simulator.num_envs, 1)))


def rollout(simulator, policy):
    """Return per environment and success at the last step."""
    step = simulator.step if isinstance(simulator, NativeSimulator) else jax.jit(simulator.step)
    state = simulator.reset(jax.random.key(0))
    total = np.zeros(simulator.num_envs)
    for _ in range(puck_push.EPISODE_LENGTH):
        state = step(state, policy(state.observation))
        total += np.asarray(state.reward)
    return total, np.asarray(state.success)


def test_episodes_begin_as_specified():
    for level in ("none", "paper"):
        state = NativeSimulator(TASK, 500, gaps=TASK.gap(level)).reset(jax.random.key(0))
        observation = state.observation
        hand, puck = observation[:, 0:2], observation[:, 4:6]
        np.testing.assert_allclose(np.linalg.norm(puck, axis=1), 0.6, rtol=1e-5)
        angle = np.arctan2(puck[:, 1], puck[:, 0])
        assert -0.4 <= angle.min() < -0.37 and 0.37 < angle.max() <= 0.4
        error = hand - 1.5 * puck
        assert -0.05001 <= error.min() < -0.049 and 0.049 < error.max() <= 0.05001
        assert not observation[:, [2, 3, 6, 7]].any()


def test_reward_and_success_are_functions_of_the_observation():
    observation = jnp.zeros((3, 8)).at[:, 4].set(jnp.array([0.0, 0.0999, 0.5]))
    np.testing.assert_allclose(puck_push.reward(observation), np.exp([0.0, -0.3996, -2.0]), rtol=1e-6)
    assert puck_push.success(observation).tolist() == [True, True, False]
    simulator = NativeSimulator(TASK, 8, gaps=TASK.gap("paper"), solver=Solver())
    state = simulator.reset(jax.random.key(0))
    for _ in range(20):
        state = simulator.step(state, pusher(state.observation))
    np.testing.assert_allclose(state.reward, TASK.reward_from_observation(state.observation), rtol=1e-6)
    assert (state.success == np.asarray(TASK.success_from_observation(state.observation))).all()


def test_observation_is_clipped_to_two():
    sensordata = jnp.arange(12.0) - 5.0
    observation = TASK.observe(jnp.zeros(4), jnp.zeros(4), jnp.zeros(2), sensordata)
    np.testing.assert_array_equal(observation, [-2, -2, -2, -1, 1, 2, 2, 2])


def test_model_fields_of_the_paper_gap_are_the_documented_numbers():
    simulator = NativeSimulator(TASK, 1, gaps=TASK.gap("paper"))
    simulator.reset(jax.random.key(0))
    model = simulator._models[0]
    np.testing.assert_allclose(model.actuator_gainprm[:, 0], 500, rtol=1e-6)
    np.testing.assert_allclose(model.actuator_biasprm[:, 2], -2500 / 3, rtol=1e-6)
    np.testing.assert_allclose(model.body_mass[2], 2.5)
    np.testing.assert_allclose(model.dof_damping[2:], 2.5 * 8 / 0.84, rtol=1e-6)
    np.testing.assert_allclose(model.pair_solref[0], [-160, -8])
    np.testing.assert_allclose(model.jnt_axis[:2, :2], turn(0.6).T, rtol=1e-6)
    # mj_setConst has followed: the puck's inertia and the contact's regulariser know the new mass.
    np.testing.assert_allclose(model.dof_M0[2:], 2.5)
    np.testing.assert_allclose(model.body_invweight0[2, 0] * 2.5, TASK.nominal.body_invweight0[2, 0])


@pytest.mark.parametrize("level", ["none", "milder", "paper"])
def test_a_free_puck_decays_exactly_as_in_the_closed_form(level):
    gap = TASK.gap(level)
    simulator = NativeSimulator(TASK, 1, gaps=gap)
    state = place(simulator, [5, 5, 0, 0, 0.3, 0.1, 0.5, -0.3])
    share = (1 - 0.02 * 4 * gap.friction_scale) ** 5
    for k in range(1, 5):
        state = simulator.step(state, np.zeros((1, 2)))
        np.testing.assert_allclose(state.physics[0, 7:9], [0.5 * share**k, -0.3 * share**k], atol=1e-12)


@pytest.mark.parametrize(
    ("level", "speed", "distance"),
    # The bounds of the specification; the push starts from the reset distances, straight along x.
    [("none", 0.01, 0.0125), ("paper", 0.03, 0.028)],
)
def test_model_follows_the_closed_form(level, speed, distance):
    gap = TASK.gap(level)
    simulator = NativeSimulator(TASK, 64, gaps=gap)
    state = simulator.reset(jax.random.key(0))
    closed = jnp.asarray(world(state.physics, gap), jnp.float32)
    for action in np.random.default_rng(0).uniform(-1, 1, (40, 64, 2)).astype(np.float32):
        state, closed = simulator.step(state, action), closed_step(closed, action, gap)
        np.testing.assert_allclose(world(state.physics, gap)[:, 2:4], closed[:, 2:4], atol=speed)

    start = np.array([0.9, 0, 0, 0, 0.6, 0, 0, 0], np.float32)
    state, closed = place(simulator, start), jnp.asarray(start)[None]
    action = (turn(-float(gap.frame_rotation)) @ [-1.0, 0.0]).astype(np.float32)
    for _ in range(20):
        state = simulator.step(state, np.tile(action, (64, 1)))
        closed = closed_step(closed, action[None], gap)
        moved = world(state.physics, gap)[:1]
        np.testing.assert_allclose(moved[:, 2:4], closed[:, 2:4], atol=speed)
        np.testing.assert_allclose(moved[:, 4:6], closed[:, 4:6], atol=distance)
    assert moved[0, 4] < 0.0, "the push went past the target"


@pytest.mark.parametrize(
    ("level", "closed", "model"),
    # (return, success at the last step) as the specification measured them.
    [("none", (29.6, 1.00), (29.4, 1.00)), ("paper", (12.1, 0.96), (14.3, 1.00))],
)
def test_scripted_pusher_scores_as_specified(level, closed, model):
    gap = TASK.gap(level)
    for simulator, (expected_return, expected_success) in (
        (closed_form.ClosedFormPuck(256, gaps=gap), closed),
        (NativeSimulator(TASK, 256, gaps=gap), model),
    ):
        total, success = rollout(simulator, pusher)
        assert total.mean() == pytest.approx(expected_return, abs=0.4)
        assert success.mean() == pytest.approx(expected_success, abs=0.03)


def test_the_finer_solver_leaves_the_outcome_unchanged():
    """The real side differs from the simulator numerically, not in what the task asks."""
    coarse, fine = (
        rollout(NativeSimulator(TASK, 128, gaps=TASK.gap("paper"), solver=solver), pusher)
        for solver in (None, Solver())
    )
    assert 0 < abs(coarse[0].mean() - fine[0].mean()) < 0.3
    assert coarse[1].mean() == fine[1].mean() == 1.0


def final_state(gap):
    """The world after a held push that strikes the puck off its centre line."""
    simulator = NativeSimulator(TASK, 1, gaps=gap)
    state = place(simulator, [0.9, 0.02, 0, 0, 0.6, 0, 0, 0])
    for _ in range(10):
        state = simulator.step(state, np.array([[-0.6, 0.1]]))
    return world(state.physics, gap)[0]


def test_every_dynamics_field_changes_what_it_should():
    nominal = final_state(RealGap())
    hand, puck = slice(0, 2), slice(4, 6)

    heavy = final_state(RealGap(mass_scale=3.0))
    assert np.abs(heavy[hand] - nominal[hand]).max() < 0.01
    assert heavy[4] > nominal[4] + 0.005, "a heavy puck goes less far"
    for stronger_drag in (RealGap(friction_scale=3.0), RealGap(damping_scale=3.0), RealGap(dry_friction=3.0)):
        dragged = final_state(stronger_drag)
        assert np.abs(dragged[hand] - nominal[hand]).max() < 0.05
        assert dragged[4] > nominal[4] + 0.005
    weak = final_state(RealGap(actuator_gain=0.5))
    np.testing.assert_allclose(0.9 - weak[0], 0.5 * (0.9 - nominal[0]), rtol=0.05)
    sluggish = final_state(RealGap(actuator_lag=0.9))
    assert sluggish[0] > nominal[0] + 0.05
    turned = final_state(RealGap(frame_rotation=0.5))
    moved = turn(0.5) @ (nominal[hand] - [0.9, 0.02])
    np.testing.assert_allclose(turned[hand] - [0.9, 0.02], moved, atol=0.05)
    np.testing.assert_array_equal(final_state(RealGap(gravity_comp_error=0.5)), nominal)
    assert nominal[puck][0] < 0.6


def test_dry_friction_stops_a_slow_puck():
    simulator = NativeSimulator(TASK, 1, gaps=RealGap(dry_friction=2.0))
    state = place(simulator, [5, 5, 0, 0, 0.3, 0.1, 0.05, 0])
    for _ in range(3):
        state = simulator.step(state, np.zeros((1, 2)))
    assert abs(state.physics[0, 7]) < 1e-3


def test_gap_levels_are_ordered_and_hard_adds_to_paper():
    assert set(TASK.gaps) == {"none", "mild", "milder", "paper", "hard"}
    assert TASK.gap("hard") == TASK.gap("paper").replace(dry_friction=2.0, action_delay=1)
    mild = TASK.gap("mild")
    for name, (low, high) in TASK.randomisation.items():
        assert low <= getattr(mild, name) <= high, "mild lies inside the randomisation"
    assert any(
        not low <= getattr(TASK.gap("milder"), n) <= high for n, (low, high) in TASK.randomisation.items()
    )
    returns = [
        rollout(NativeSimulator(TASK, 64, gaps=TASK.gap(level), solver=Solver()), pusher)[0].mean()
        for level in ("none", "mild", "milder", "paper", "hard")
    ]
    assert returns == sorted(returns, reverse=True)
