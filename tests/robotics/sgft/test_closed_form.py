"""The closed-form puck: its equations, and the simulators' interface under jit, vmap, pmap and a mesh."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.errors import UserError
from core.sim import RealGap
from robotics.sgft.tasks import closed_form
from robotics.sgft.tasks.puck_push import RANDOMISATION, TASK

N = 16


def naive_step(state, action, gap):
    """The specification's equations, one at a time in float64."""
    hand, hand_velocity, puck, puck_velocity = (part.copy() for part in np.split(np.asarray(state, float), 4))
    cos, sin = np.cos(gap.frame_rotation), np.sin(gap.frame_rotation)
    target = np.array([[cos, -sin], [sin, cos]]) @ action * gap.actuator_gain
    m, friction, h = 0.1 * gap.mass_scale, gap.friction_scale, 0.02
    for _ in range(5):
        hand_velocity += 0.5 * (1 - gap.actuator_lag) * (target - hand_velocity)
        d = puck - hand
        n = np.linalg.norm(d) + 1e-6
        hand += h * hand_velocity
        puck_velocity += h * (400 * max(0.12 - n, 0) * d / (n * 10 * m) - 4 * friction * puck_velocity)
        puck += h * puck_velocity
    return np.clip(np.concatenate([hand, hand_velocity, puck, puck_velocity]), -2, 2)


@pytest.mark.parametrize("level", ["none", "mild", "paper"])
def test_step_is_the_specified_equation(level):
    gap = TASK.gap(level)
    rng = np.random.default_rng(0)
    state = jnp.array([0.75, 0.03, 0, 0, 0.6, 0, 0, 0], jnp.float32)
    expected = np.asarray(state, float)
    step = jax.jit(closed_form.step)
    for _ in range(40):
        action = rng.uniform(-1, 1, 2) - [0.5, 0]
        state, expected = step(state, action, gap), naive_step(expected, action, gap)
        np.testing.assert_allclose(state, expected, atol=2e-4)
    assert expected[4] < 0.55, "the hand has moved the puck"


def test_gradient_through_a_push_is_finite_and_correct():
    state = jnp.array([0.71, 0.01, -0.5, 0.1, 0.6, 0, -0.2, 0], jnp.float32)

    def pushed(action):
        return closed_form.step(state, action, RealGap())[4:6].sum()

    gradient = jax.grad(pushed)(jnp.array([-0.5, 0.2]))
    for axis in range(2):
        shift = 1e-2 * np.eye(2)[axis]
        difference = pushed(np.array([-0.5, 0.2]) + shift) - pushed(np.array([-0.5, 0.2]) - shift)
        np.testing.assert_allclose(gradient[axis], difference / 2e-2, rtol=0.02, atol=1e-4)


def test_dry_friction_stops_the_puck_and_drag_slows_it():
    state = jnp.array([5, 5, 0, 0, 0.3, 0, 0.5, -0.02], jnp.float32)
    free = closed_form.step(state, jnp.zeros(2), RealGap())
    np.testing.assert_allclose(free[6:], [0.5 * 0.92**5, -0.02 * 0.92**5], rtol=1e-5)
    dry = closed_form.step(state, jnp.zeros(2), RealGap(dry_friction=2.0))
    assert dry[6] < free[6] - 0.1 and dry[7] == 0
    dragged = closed_form.step(state, jnp.zeros(2), RealGap(damping_scale=2.0))
    np.testing.assert_allclose(dragged[6], 0.5 * 0.84**5, rtol=1e-5)


def unroll(simulator, key, given):
    """50 control steps over a time limit, as one scan: the last state and the rewards `[T, N]`."""

    def body(state, action):
        state = simulator.auto_reset_step(state, action)
        return state, (state.reward, state.observation, state.truncated)

    return jax.lax.scan(body, simulator.reset(key), given)


@pytest.fixture(scope="module")
def simulator():
    return closed_form.ClosedFormPuck(
        N, gaps=RANDOMISATION | {"obs_noise": (0.0, 0.01), "action_delay": (0, 3)}
    )


@pytest.fixture(scope="module")
def given():
    return np.random.default_rng(0).uniform(-1, 1, (50, N, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def single(simulator, given):
    return jax.jit(lambda key, given: unroll(simulator, key, given))(jax.random.key(0), given)


def close(a, b):
    chex.assert_trees_all_close(*(jax.tree.map(raw, tree) for tree in (a, b)), rtol=1e-5, atol=1e-6)


def raw(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def test_episodes_end_at_the_time_limit_and_begin_anew(single):
    state, (_, observation, truncated) = single
    assert truncated[39].all() and truncated.sum() == N
    assert (state.step_count == 10).all()
    distance = np.linalg.norm(observation[39, :, 4:6], axis=1)
    np.testing.assert_allclose(distance, 0.6, atol=0.06)
    assert len(np.unique(state.gap.mass_scale)) == N


def test_vmap_over_seeds_equals_each_seed(simulator, given, single):
    lanes = jax.random.split(jax.random.key(5), 3)
    lanes = jnp.concatenate([jax.random.key(0)[None], lanes])
    batched = jax.jit(jax.vmap(lambda key: unroll(simulator, key, given)))(lanes)
    close(jax.tree.map(lambda leaf: leaf[0], batched), single)


def test_pmap_over_devices_equals_one_device(simulator, given, single):
    keys = jax.random.split(jax.random.key(5), 7)
    keys = jnp.concatenate([jax.random.key(0)[None], keys])
    batched = jax.pmap(lambda key: unroll(simulator, key, given))(keys)
    close(jax.tree.map(lambda leaf: leaf[0], batched), single)


def test_a_sharded_mesh_equals_one_device(simulator, given, single):
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    state = jax.device_put(simulator.reset(jax.random.key(0)), sharding)
    step = jax.jit(simulator.auto_reset_step, out_shardings=sharding)
    rewards = []
    for action in given:
        state = step(state, jax.device_put(action, sharding))
        rewards.append(state.reward)
    assert state.observation.sharding.is_equivalent_to(sharding, 2)
    close((state, np.stack(rewards)), (single[0], single[1][0]))


def test_wrong_action_shape_is_refused(simulator):
    state = simulator.reset(jax.random.key(0))
    with pytest.raises(UserError, match=r"action has shape \(16, 3\), but puck_push here takes \(16, 2\)"):
        simulator.step(state, jnp.zeros((N, 3)))


def test_fixed_gaps_stay_with_their_environment(given):
    fixed = RealGap(mass_scale=np.linspace(0.5, 2.0, N).astype(np.float32))
    state, _ = unroll(closed_form.ClosedFormPuck(N, gaps=fixed), jax.random.key(0), given)
    np.testing.assert_array_equal(state.gap.mass_scale, fixed.mass_scale)
