import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.errors import UserError
from robotics.sgft import shaping

GOLDEN = Path(__file__).parents[2] / "golden" / "sgft"
RNG = np.random.default_rng(0)
hstep_return = jax.jit(shaping.hstep_return, static_argnames="horizon")


@pytest.fixture(params=["a", "b"])
def golden(request):
    return np.load(GOLDEN / f"{request.param}_losses.npz")


@pytest.fixture(params=["float64", "float32"])
def precision(request):
    """(dtype, tolerances of the golden README), with JAX's 64-bit mode on for float64."""
    tolerance = {"float64": {"rtol": 1e-6}, "float32": {"rtol": 1e-4, "atol": 1e-6}}
    with jax.enable_x64(request.param == "float64"):
        yield request.param, tolerance[request.param]


def shaped(golden, dtype, terminal_potential):
    value = golden["v"].astype(dtype)
    return shaping.shaped_reward(
        golden["rew"].astype(dtype),
        value[:, :-1],
        value[:, 1:],
        golden["terminated"],
        gamma=float(golden["gamma"]),
        terminal_potential=terminal_potential,
    )


@pytest.mark.parametrize("key, potential", [("shaped_terminal_zero", "zero"), ("shaped_plain", "keep")])
def test_shaped_reward_matches_golden(golden, precision, key, potential):
    dtype, tolerance = precision
    result = shaped(golden, dtype, potential)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, golden[key], **tolerance)


@pytest.mark.parametrize("horizon", [1, 2, 4])
def test_hstep_return_matches_golden(golden, precision, horizon):
    dtype, tolerance = precision
    returns, valid = hstep_return(
        shaped(golden, dtype, "zero").T,
        golden["terminated"].T,
        golden["truncated"].T,
        gamma=golden["gamma"],
        horizon=horizon,
    )
    expected = golden[f"hstep_return_{horizon}"].T
    assert returns.dtype == dtype
    np.testing.assert_array_equal(valid, ~np.isnan(expected))
    np.testing.assert_allclose(np.where(valid, returns, np.nan), expected, **tolerance)


def random_stream(steps, batch, *, ends=0.15):
    return (
        RNG.normal(size=(steps, batch)),
        RNG.random((steps, batch)) < ends,
        RNG.random((steps, batch)) < ends,
    )


def naive_hstep_return(rbar, terminated, truncated, gamma, horizon):
    steps, batch = rbar.shape
    returns, valid = np.zeros_like(rbar), np.zeros_like(terminated)
    for start in range(steps):
        for b in range(batch):
            for k in range(horizon):
                t = start + k
                if t == steps:
                    break
                returns[start, b] += gamma**k * rbar[t, b]
                if terminated[t, b] or truncated[t, b] or k == horizon - 1:
                    valid[start, b] = True
                    break
    return returns, valid


@pytest.mark.parametrize("horizon, steps", [(1, 6), (3, 8), (4, 5), (5, 5), (12, 7)])
def test_hstep_return_equals_a_naive_loop_on_200_streams(horizon, steps):
    rbar, terminated, truncated = random_stream(steps, 40)
    with jax.enable_x64(True):
        result = hstep_return(rbar, terminated, truncated, gamma=0.9, horizon=horizon)
    chex.assert_trees_all_close(
        result, naive_hstep_return(rbar, terminated, truncated, 0.9, horizon), rtol=1e-12, atol=1e-14
    )


def test_window_of_one_returns_the_shaped_rewards():
    rbar, terminated, truncated = random_stream(6, 3)
    returns, valid = hstep_return(rbar, terminated, truncated, gamma=0.9, horizon=1)
    np.testing.assert_array_equal(returns, rbar.astype(np.float32))
    assert valid.all()


def test_any_horizon_beyond_the_array_gives_the_same():
    stream = random_stream(5, 20)
    just_over, far_over = (hstep_return(*stream, gamma=0.9, horizon=horizon) for horizon in (6, 10**9))
    chex.assert_trees_all_equal(just_over, far_over)
    assert far_over[1].any() and not far_over[1].all()


@pytest.mark.parametrize("ends_at", [None, 2])
def test_shaped_rewards_telescope(ends_at, precision):
    dtype, _ = precision
    horizon, gamma = 5, 0.93
    reward = RNG.normal(size=(horizon, 8)).astype(dtype)
    value = (30 + 10 * RNG.normal(size=(horizon + 1, 8))).astype(dtype)
    terminated, truncated = np.zeros((2, horizon, 8), bool)
    if ends_at is not None:
        terminated[ends_at] = True
    rbar = shaping.shaped_reward(reward, value[:-1], value[1:], terminated, gamma=gamma)
    window, valid = hstep_return(rbar, terminated, truncated, gamma=gamma, horizon=horizon)
    counted = horizon if ends_at is None else ends_at + 1
    expected = gamma ** np.arange(counted) @ reward[:counted] - value[0]
    if ends_at is None:
        expected += gamma**horizon * value[-1]
    assert valid[0].all()
    np.testing.assert_allclose(window[0], expected, rtol=1e-6, atol=1e-6 * np.abs(value).max())


def test_zero_potential_leaves_the_reward_untouched():
    reward = RNG.normal(size=100).astype(np.float32)
    zero = np.zeros(100, np.float32)
    for potential in ("zero", "keep"):
        rbar = shaping.shaped_reward(reward, zero, zero, zero > 0, gamma=0.97, terminal_potential=potential)
        np.testing.assert_array_equal(rbar, reward)


def test_gamma_zero_ignores_the_next_state_and_the_horizon():
    reward, value, next_value = RNG.normal(size=(3, 6, 4)).astype(np.float32)
    alive = np.zeros((6, 4), bool)
    rbar = shaping.shaped_reward(reward, value, next_value, alive, gamma=0.0)
    np.testing.assert_array_equal(rbar, reward - value)
    for horizon in (1, 3):
        returns, _ = hstep_return(rbar, alive, alive, gamma=0.0, horizon=horizon)
        np.testing.assert_array_equal(returns, rbar)


def test_terminal_value_can_not_leak_in_even_if_not_finite():
    rbar = shaping.shaped_reward(
        jnp.ones(2), jnp.ones(2), jnp.array([jnp.nan, 3.0]), jnp.array([True, False]), gamma=0.5
    )
    np.testing.assert_array_equal(rbar, [0.0, 1.5])


def test_no_gradient_reaches_the_parameters_of_the_value():
    states = jnp.asarray(RNG.normal(size=(2, 5, 3)), jnp.float32)

    def total(weight, reward_scale):
        value, next_value = jnp.tanh(states @ weight)
        rbar = shaping.shaped_reward(reward_scale * jnp.ones(5), value, next_value, False, gamma=0.9)
        return jnp.sum(rbar**2)

    weight_gradient, reward_gradient = jax.grad(total, (0, 1))(jnp.ones(3), 1.0)
    np.testing.assert_array_equal(weight_gradient, jnp.zeros(3))
    assert reward_gradient != 0


def test_half_precision_inputs_are_computed_in_float32():
    half = jnp.full(3, 1.0, jnp.bfloat16)
    rbar = shaping.shaped_reward(half, half, half, False, gamma=0.999)
    assert rbar.dtype == jnp.float32
    np.testing.assert_allclose(rbar, 0.999, rtol=1e-6)


def test_improvability_is_the_share_of_states_with_a_raising_action():
    q1 = jnp.array([[-1.0, 0.0], [-1.0, -2.0], [3.0, -1.0], [-1e-9, -1.0]])
    assert shaping.improvability(q1) == 0.5
    assert shaping.improvability(q1, tolerance=1e-6) == 0.75


def test_bad_options_say_what_to_do():
    one = jnp.ones(1)
    with pytest.raises(UserError, match=r"\"zero\" or \"keep\", not 'zeros'; did you mean 'zero'"):
        shaping.shaped_reward(one, one, one, False, gamma=0.9, terminal_potential="zeros")
    with pytest.raises(UserError, match="at least 1, not 0"):
        shaping.hstep_return(one, one > 0, one > 0, gamma=0.9, horizon=0)


def both(reward, value, next_value, terminated, truncated):
    rbar = shaping.shaped_reward(reward, value, next_value, terminated, gamma=0.95)
    return shaping.hstep_return(rbar, terminated, truncated, gamma=0.95, horizon=3)


@functools.cache
def stream_of_lanes():
    lanes = [(*RNG.normal(size=(3, 7, 16)), *random_stream(7, 16)[1:]) for _ in range(4)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)


def test_jit_and_vmap_over_lanes_equal_single_calls():
    lanes = stream_of_lanes()
    single = [jax.jit(both)(*jax.tree.map(lambda leaf, i=i: leaf[i], lanes)) for i in range(4)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *single)
    chex.assert_trees_all_close(jax.jit(jax.vmap(both))(*lanes), expected, rtol=1e-6)


@pytest.mark.parametrize("spec", [PartitionSpec(None, "data"), PartitionSpec(None, None, "data")])
def test_sharded_over_eight_devices_equals_one(spec):
    lanes = jax.tree.map(lambda leaf: jnp.tile(leaf, (1, 8, 1))[:, :8], stream_of_lanes())
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.device_put(lanes, NamedSharding(mesh, spec))
    assert len(sharded[0].sharding.device_set) == 8
    run = jax.jit(jax.vmap(both))
    chex.assert_trees_all_close(run(*sharded), run(*lanes), rtol=1e-5)


def test_pmap_equals_jit():
    lanes = stream_of_lanes()
    chex.assert_trees_all_close(jax.pmap(both)(*lanes), jax.jit(jax.vmap(both))(*lanes), rtol=1e-6)


def test_longer_windows_and_streams_need_no_more_program():
    """The scan keeps the program's size independent of T and H: no unrolled Python loop."""

    def equations(steps, horizon):
        flags = jnp.zeros((steps, 2), bool)
        run = functools.partial(shaping.hstep_return, gamma=0.9, horizon=horizon)
        return len(jax.make_jaxpr(run)(jnp.zeros((steps, 2)), flags, flags).eqns)

    assert equations(200, 50) == equations(5, 2)
