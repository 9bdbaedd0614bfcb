"""The host backend: episodes, restoring, gaps and sensors, on native MuJoCo."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from core.sim import NativeSimulator, RealGap, Solver, make
from robotics.sgft.tasks.puck_push import TASK

N = 4
POSITIONS, VELOCITIES = [0, 1, 4, 5], [2, 3, 6, 7]


def actions(steps, n=N, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, n, 2)).astype(np.float32)


def equal(a, b):
    """Bitwise equality of two states, typed keys included."""
    raw = [jax.tree.leaves(state.replace(key=jax.random.key_data(state.key))) for state in (a, b)]
    return all(np.array_equal(x, y) for x, y in zip(*raw, strict=True))


def last(simulator, given, key=0):
    state = simulator.reset(jax.random.key(key))
    for action in given:
        state = simulator.step(state, action)
    return state


def test_step_is_a_function_of_its_arguments_alone():
    simulator = NativeSimulator(TASK, N, gaps=TASK.randomisation)
    given = actions(6)
    begun = simulator.step(simulator.reset(jax.random.key(0)), given[0])
    first = simulator.step(begun, given[1])
    # Another episode puts other gaps into the pool of models.
    for action in given:
        simulator.step(simulator.reset(jax.random.key(9)), action)
    assert equal(simulator.step(begun, given[1]), first)


def test_a_saved_state_resumes_exactly_in_another_process_pool():
    noisy = TASK.randomisation | {"obs_noise": (0.01, 0.02), "action_delay": (0, 3)}
    simulator = NativeSimulator(TASK, N, gaps=noisy, threads=1)
    given = actions(60)
    state = simulator.reset(jax.random.key(0))
    for action in given[:37]:
        state = simulator.auto_reset_step(state, action)
    saved = state.replace(key=jax.random.key_data(state.key))
    saved = jax.tree.map(lambda leaf: np.array(leaf), saved)
    restored = saved.replace(key=jax.random.wrap_key_data(saved.key))
    other = NativeSimulator(TASK, N, gaps=noisy, threads=2)
    for action in given[37:]:
        state = simulator.auto_reset_step(state, action)
        restored = other.auto_reset_step(restored, action)
    assert equal(state, restored)


def test_outputs_have_their_shapes_and_types():
    state = last(NativeSimulator(TASK, N), actions(1))
    assert state.physics.dtype == np.float64 and state.physics.shape == (N, 9)
    assert state.observation.dtype == np.float32 and state.observation.shape == (N, 8)
    assert state.reward.dtype == np.float32 and state.reward.shape == (N,)
    assert state.success.dtype == state.terminated.dtype == state.truncated.dtype == bool
    assert (TASK.observation_size, TASK.action_size) == (8, 2)
    assert TASK.control_dt == pytest.approx(0.1)


def test_time_limit_truncates_and_auto_reset_keeps_the_final_observation():
    simulator = NativeSimulator(TASK, N, gaps=TASK.randomisation)
    plain = resetting = simulator.reset(jax.random.key(0))
    for action in actions(TASK.episode_length):
        assert not resetting.truncated.any()
        plain, resetting = simulator.step(plain, action), simulator.auto_reset_step(resetting, action)
    assert resetting.truncated.all() and not resetting.terminated.any()
    np.testing.assert_array_equal(resetting.final_observation, plain.observation)
    np.testing.assert_array_equal(resetting.reward, plain.reward)
    assert (resetting.step_count == 0).all() and not resetting.action_buffer.any()
    np.testing.assert_allclose(np.linalg.norm(resetting.observation[:, 4:6], axis=1), 0.6, rtol=1e-5)
    assert (resetting.gap.mass_scale != plain.gap.mass_scale).all()
    following = simulator.auto_reset_step(resetting, actions(1)[0])
    np.testing.assert_array_equal(following.final_observation, following.observation)


def test_only_ended_episodes_are_reset():
    def hand_is_left(qpos, qvel, ctrl, sensordata):
        return sensordata[0] < 0.8

    task = dataclasses.replace(TASK, terminated=hand_is_left)
    simulator = NativeSimulator(task, N, gaps=TASK.randomisation)
    state = simulator.reset(jax.random.key(0))
    go_left = np.array([[-1, 0], [0, 0], [-1, 0], [1, 0]], np.float32)
    for _ in range(4):
        before, state = state, simulator.auto_reset_step(state, go_left)
        if state.terminated.any():
            break
    ended = state.terminated
    assert ended.any() and not ended.all() and not state.truncated.any()
    assert (state.final_observation[ended, 0] < 0.8).all()
    assert (state.observation[ended, 0] > 0.8).all()
    np.testing.assert_array_equal(state.observation[~ended], state.final_observation[~ended])
    np.testing.assert_array_equal(state.gap.mass_scale[~ended], before.gap.mass_scale[~ended])
    assert (state.step_count == np.where(ended, 0, before.step_count + 1)).all()


def test_sensors_lag_one_nominal_substep_and_show_the_initial_state_after_reset():
    simulator = NativeSimulator(TASK, N)
    state = simulator.reset(jax.random.key(0))
    np.testing.assert_allclose(state.observation[:, POSITIONS], state.physics[:, 1:5], atol=1e-7)
    action = np.tile(np.float32([[0.0, 1.0]]), (N, 1))
    state = simulator.step(state, action)
    # The hand's velocity closes half the distance to the command in each of the five substeps.
    np.testing.assert_allclose(state.physics[:, 6], 1 - 0.5**5, rtol=1e-6)
    np.testing.assert_allclose(state.observation[:, 3], 1 - 0.5**4, rtol=1e-6)
    moved = state.physics[:, 2] - state.observation[:, 1]
    np.testing.assert_allclose(moved, 0.02 * (1 - 0.5**5), rtol=1e-4)


def test_the_finer_solver_of_the_real_side_reads_sensors_at_the_same_moment():
    free = np.tile(np.float32([[0.0, 1.0]]), (N, 1))
    state = last(NativeSimulator(TASK, N, solver=Solver()), [free])
    at_end = last(NativeSimulator(TASK, N), [free])
    assert state.physics[0, 0] == pytest.approx(0.1)
    np.testing.assert_allclose(state.observation[:, 1], at_end.observation[:, 1], atol=0.012)
    behind = (state.physics[:, 2] - state.observation[:, 1]) / state.physics[:, 6]
    np.testing.assert_allclose(behind, 0.02, atol=1e-3)


def test_noise_and_bias_touch_only_the_observation():
    given = actions(3)
    plain = last(NativeSimulator(TASK, N), given)
    noisy = last(NativeSimulator(TASK, N, gaps=RealGap(obs_noise=0.1, obs_bias=0.5)), given)
    np.testing.assert_array_equal(noisy.physics, plain.physics)
    np.testing.assert_array_equal(noisy.reward, plain.reward)
    np.testing.assert_array_equal(noisy.success, plain.success)
    difference = noisy.observation - plain.observation
    assert abs(difference.mean() - 0.5) < 0.08 and 0.05 < difference.std() < 0.16


def test_noise_differs_between_steps_environments_and_keys_but_repeats():
    simulator = NativeSimulator(TASK, N, gaps=RealGap(obs_noise=0.1))
    still = np.zeros((3, N, 2), np.float32)
    clean = NativeSimulator(TASK, N)

    def noise(steps, key):
        return last(simulator, still[:steps], key).observation - last(clean, still[:steps], key).observation

    draws = [noise(0, 0), noise(1, 0), noise(2, 0), noise(0, 1)]
    values = np.concatenate([draw.ravel() for draw in draws])
    assert len(np.unique(values.round(6))) > 0.95 * len(values)
    np.testing.assert_array_equal(noise(2, 0), draws[2])


def test_delay_and_dead_zone_act_on_the_command():
    push = np.tile(np.float32([[-1.0, 0.15]]), (N, 1))
    delayed = last(NativeSimulator(TASK, N, gaps=RealGap(action_delay=2)), [push, push])
    assert (delayed.physics[:, 5] == 0).all()
    dead = last(NativeSimulator(TASK, N, gaps=RealGap(deadzone=0.2)), [push])
    assert (dead.physics[:, 6] == 0).all() and (dead.physics[:, 5] < -0.9).all()


def test_threads_do_not_change_the_outcome():
    given = actions(10)
    assert equal(
        last(NativeSimulator(TASK, N, gaps=TASK.randomisation, threads=1), given),
        last(NativeSimulator(TASK, N, gaps=TASK.randomisation, threads=3), given),
    )


def test_bad_actions_are_refused():
    simulator = NativeSimulator(TASK, N)
    state = simulator.reset(jax.random.key(0))
    with pytest.raises(UserError, match=r"action has shape \(4, 3\), but puck_push here takes \(4, 2\)"):
        simulator.step(state, np.zeros((N, 3)))
    action = np.zeros((N, 2))
    action[2, 1] = np.nan
    with pytest.raises(UserError, match="action of environment 2 is not finite"):
        simulator.step(state, action)


def test_make_chooses_the_backend():
    assert isinstance(make(TASK, 2), NativeSimulator)
    assert isinstance(
        make(TASK, 2, backend="native", gaps=TASK.gap("paper"), solver=Solver()), NativeSimulator
    )
    with pytest.raises(UserError, match="unknown sim backend 'natve'; did you mean 'native'"):
        make(TASK, 2, backend="natve")
    with pytest.raises(UserError, match="no gap level 'papr'; did you mean 'paper'"):
        TASK.gap("papr")


def test_solver_changes_reach_the_model():
    from core.sim.task import compile_model

    nominal, real = compile_model(TASK, None), compile_model(TASK, Solver())
    assert (nominal.opt.timestep, real.opt.timestep) == (0.02, 0.01)
    assert (nominal.opt.cone, real.opt.cone) == (0, 1)
    assert (real.opt.iterations, real.opt.noslip_iterations) == (50, 3)
    with pytest.raises(UserError, match="unknown cone 'eliptic'; did you mean 'elliptic'"):
        compile_model(TASK, Solver(cone="eliptic"))


def test_policy_outputs_of_jax_are_accepted():
    simulator = NativeSimulator(TASK, N)
    state = simulator.reset(jax.random.key(0))
    given = actions(1)[0]
    assert equal(simulator.step(state, jnp.asarray(given)), simulator.step(state, given))
