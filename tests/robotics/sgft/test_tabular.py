import math
from pathlib import Path

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from core.errors import UserError
from robotics.sgft import gridworld, shaping, tabular, tabular_figures
from robotics.sgft.tabular import World

GOLDEN = Path(__file__).parents[2] / "golden" / "sgft"
HORIZONS = {"a": (1, 2, 4, 16), "b": (1, 3, 8)}
WINDOW = 8  # longest window of the property tests
TINY = 1e-9  # above the rounding of value iteration


def on_random_tasks(test):
    """Runs the test on 25 random tasks."""
    settings = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
    return settings(hypothesis.given(seed=st.integers(0, 2**32 - 1))(test))


value_iteration = jax.jit(tabular.value_iteration)
policy_evaluation = jax.jit(tabular.policy_evaluation)
window_values = jax.jit(tabular.window_values, static_argnames="horizon")
sgft_vi = jax.jit(tabular.sgft_vi, static_argnames="horizon")
exact_gaps = jax.jit(tabular.exact_gaps, static_argnames="horizons")
policy_values = jax.jit(tabular.policy_values, static_argnames="horizon")


@pytest.fixture(autouse=True, scope="module")
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["a", "b"])
def golden(request):
    arrays = dict(np.load(GOLDEN / f"{request.param}_tabular.npz"))
    return request.param, {key: jnp.asarray(value) for key, value in arrays.items()}


def close(actual, expected, rtol=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol)


def test_optimal_values_match_golden(golden):
    _, g = golden
    for P, expected in ((g["P_sim"], g["V_sim"]), (g["P_real"], g["V_real_star"])):
        close(value_iteration(P, g["r"], g["gamma"]), expected)
    close(tabular.q_values(g["P_real"], g["r"], g["V_real_star"], gamma=g["gamma"]), g["Q_real_star"])


def test_simulation_policy_matches_golden(golden):
    _, g = golden
    q = tabular.q_values(g["P_sim"], g["r"], g["V_sim"], gamma=g["gamma"])
    chosen = jnp.take_along_axis(q, g["pi_sim"][:, None], axis=1)[:, 0]
    close(chosen, q.max(axis=1))
    np.testing.assert_array_equal(tabular.greedy(q, tolerance=1e-9), g["pi_sim"])
    close(policy_evaluation(g["P_real"], g["r"], g["pi_sim"], g["gamma"]), g["V_real_of_pi_sim"])


def test_shaped_reward_matches_golden(golden):
    _, g = golden
    close(tabular.expected_shaped_reward(g["P_real"], g["r"], g["V_sim"], gamma=g["gamma"]), g["rbar"])


def test_windows_match_golden(golden):
    name, g = golden
    task = g["P_real"], g["r"]
    w_all, q_all = window_values(*task, g["V_sim"], gamma=g["gamma"], horizon=max(HORIZONS[name]))
    for h in HORIZONS[name]:
        w, q = sgft_vi(*task, g["V_sim"], gamma=g["gamma"], horizon=h)
        chex.assert_trees_all_close((w_all[h - 1], q_all[h - 1]), (w, q), rtol=1e-12)
        close(w, g[f"W_{h}"])
        close(q, g[f"Q_{h}"])
        policy = tabular.greedy(q, tolerance=1e-9)
        close(jnp.take_along_axis(g[f"Q_{h}"], policy[:, None], axis=1)[:, 0], g[f"Q_{h}"].max(axis=1))
        close(policy_evaluation(*task, g[f"pi_{h}"], g["gamma"]), g[f"V_real_of_pi_{h}"])


def test_infinite_window_matches_golden(golden):
    _, g = golden
    w, q = sgft_vi(g["P_real"], g["r"], g["V_sim"], gamma=g["gamma"], horizon=math.inf)
    close(q, g["Q_pbrs_inf"])
    close(q + g["V_sim"][:, None], g["Q_real_star"])
    close(w, q.max(axis=1))


def test_golden_potentials_are_not_improvable_everywhere(golden):
    _, g = golden
    assert shaping.improvability(g["Q_1"], tolerance=1e-9) < 1


def test_exact_gaps_match_golden(golden):
    name, g = golden
    world = World(g["P_sim"], g["P_real"], g["r"][..., None], g["gamma"])
    zero_shot, gaps = exact_gaps(world, horizons=HORIZONS[name])
    close(zero_shot, jnp.mean(g["V_real_star"] - g["V_real_of_pi_sim"]))
    close(gaps, [jnp.mean(g["V_real_star"] - g[f"V_real_of_pi_{h}"]) for h in HORIZONS[name]])


def test_exact_grids_are_the_golden_worlds():
    grids = jax.jit(gridworld.exact_grids)()
    for name, key in (("a", "turned"), ("b", "turned and drifting")):
        g = np.load(GOLDEN / f"{name}_tabular.npz")
        world = grids[key]
        close(world.P_sim, g["P_sim"])
        close(world.P_real, g["P_real"])
        close(tabular.expected_reward(world.P_real, world.reward), g["r"])
        assert world.gamma == g["gamma"]


def random_task(seed, states=7, actions=3):
    """(P, r, gamma, any potential, V of a random policy), the last state absorbing without reward."""
    rng = np.random.default_rng(seed)
    P = rng.dirichlet(np.full(states, 0.3), size=(states, actions))
    P[-1] = np.eye(states)[-1]
    r = rng.normal(size=(states, actions))
    r[-1] = 0
    gamma = rng.uniform(0.5, 0.99)
    policy = rng.dirichlet(np.ones(actions), size=states)
    P_pi, r_pi = np.einsum("sa,sat->st", policy, P), (policy * r).sum(axis=1)
    v_pi = np.linalg.solve(np.eye(states) - gamma * P_pi, r_pi)
    np.testing.assert_allclose(policy_evaluation(P, r, policy, gamma), v_pi, rtol=1e-10, atol=1e-11)
    return P, r, gamma, 3 * rng.normal(size=states), v_pi


@jax.jit
def values_of_windows(P, r, q_windows, gamma):
    policies = tabular.greedy(q_windows, tolerance=1e-9)
    return policies, jax.vmap(lambda policy: tabular.policy_evaluation(P, r, policy, gamma))(policies)


@on_random_tasks
def test_improvable_potential_never_loses(seed):
    P, r, gamma, _, v_pi = random_task(seed)
    w, q = window_values(P, r, v_pi, gamma=gamma, horizon=WINDOW)
    assert shaping.improvability(q[0], tolerance=TINY) == 1
    assert (w >= -TINY).all()
    assert (jnp.diff(w, axis=0) >= -TINY).all()
    _, values = values_of_windows(P, r, q, gamma)
    assert (values >= v_pi + w - TINY).all()


@on_random_tasks
def test_infinite_window_is_potential_based_shaping(seed):
    P, r, gamma, value, _ = random_task(seed)
    _, q = sgft_vi(P, r, value, gamma=gamma, horizon=math.inf)
    v_star = value_iteration(P, r, gamma)
    np.testing.assert_allclose(
        q + value[:, None], tabular.q_values(P, r, v_star, gamma=gamma), rtol=1e-8, atol=1e-10
    )


@on_random_tasks
def test_loss_stays_within_the_mpc_bound(seed):
    P, r, gamma, value, _ = random_task(seed)
    v_star = value_iteration(P, r, gamma)
    _, q = window_values(P, r, value, gamma=gamma, horizon=WINDOW)
    _, values = values_of_windows(P, r, q, gamma)
    bound = tabular.mpc_bound(value, v_star, gamma=gamma, horizon=jnp.arange(1, WINDOW + 1))
    assert ((v_star - values).max(axis=1) <= bound + TINY).all()
    assert bound[0] == pytest.approx(2 * gamma * np.abs(value - v_star).max() / (1 - gamma))


@on_random_tasks
def test_constants_shift_the_window_value_and_no_policy(seed):
    P, r, gamma, value, _ = random_task(seed)
    constant, h = 5.0, np.arange(1, WINDOW + 1)[:, None, None]
    _, q = window_values(P, r, value, gamma=gamma, horizon=WINDOW)
    _, q_value = window_values(P, r, value + constant, gamma=gamma, horizon=WINDOW)
    _, q_reward = window_values(P, r + constant, value, gamma=gamma, horizon=WINDOW)
    close(q_value, q + (gamma**h - 1) * constant)
    close(q_reward, q + constant * (1 - gamma**h) / (1 - gamma))
    policies, _ = values_of_windows(P, r, q, gamma)
    for shifted in (q_value, q_reward):
        np.testing.assert_array_equal(values_of_windows(P, r, shifted, gamma)[0], policies)


@on_random_tasks
def test_optimal_potential_makes_every_window_optimal(seed):
    P, r, gamma, _, _ = random_task(seed)
    v_star = value_iteration(P, r, gamma)
    w, q = window_values(P, r, v_star, gamma=gamma, horizon=WINDOW)
    np.testing.assert_allclose(w, 0, atol=TINY)
    _, values = values_of_windows(P, r, q, gamma)
    np.testing.assert_allclose(values, jnp.broadcast_to(v_star, values.shape), atol=TINY)


@on_random_tasks
def test_gamma_zero_is_greedy_for_the_reward_in_every_window(seed):
    P, r, _, value, _ = random_task(seed)
    _, q = window_values(P, r, value, gamma=0.0, horizon=WINDOW)
    close(q, jnp.broadcast_to(r - value[:, None], q.shape))


def test_missing_probability_is_an_end_with_zero_potential():
    P, r, gamma, value, _ = random_task(3)
    value = np.append(value[:-1], 0.0)
    ending, alive = P[:-1, :, :-1], r[:-1]
    w, q = window_values(P, r, value, gamma=gamma, horizon=4)
    chex.assert_trees_all_close(
        window_values(ending, alive, value[:-1], gamma=gamma, horizon=4), (w[:, :-1], q[:, :-1]), rtol=1e-12
    )
    close(value_iteration(ending, alive, gamma), value_iteration(P, r, gamma)[:-1])
    policy = np.arange(7) % 3
    close(policy_evaluation(ending, alive, policy[:-1], gamma), policy_evaluation(P, r, policy, gamma)[:-1])


def test_counter_example():
    world = jax.jit(tabular.counter_example)()
    P_sim, P_real, reward, gamma = world
    r_sim, r_real = (tabular.expected_reward(P, reward) for P in (P_sim, P_real))
    S, X = 0, 3
    v_sim = value_iteration(P_sim, r_sim, gamma)
    close(v_sim, [0.99, 1.0, 0.5, 0.9, 0.0])
    w, q = window_values(P_real, r_real, v_sim, gamma=gamma, horizon=40)
    close(w[0], [-0.099, 0.0, 0.0, -0.009, 0.0])
    assert shaping.improvability(q[0], tolerance=1e-9) == 3 / 5

    a, b = 0, 1
    simulation_policy = tabular.greedy(tabular.q_values(P_sim, r_sim, v_sim, gamma=gamma))
    assert simulation_policy[S] == a
    first_believer_in_a = next(h for h in range(1, 100) if 0.9 * gamma**h < 0.75 * gamma)
    assert first_believer_in_a == 20
    np.testing.assert_array_equal(tabular.greedy(q)[:, S], [b] * 19 + [a] * 21)

    best, zero_shot, windows = policy_values(world, horizon=40)
    close(zero_shot[S], 0.7425)
    close(best[S], 0.7425)
    close(windows[:, S], [0.0] * 19 + [0.7425] * 21)
    close(windows[:, X], [0.0] * 40)


def test_value_iteration_stops_at_the_precision_of_float32():
    P, r, gamma, _, _ = random_task(1)
    with jax.enable_x64(False):
        value = value_iteration(jnp.asarray(P, jnp.float32), jnp.asarray(r, jnp.float32), gamma)
        assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, value_iteration(P, r, gamma), rtol=1e-4, atol=1e-4)


def test_value_iteration_takes_a_first_guess_and_a_limit():
    P, r, gamma, guess, _ = random_task(2)
    v_star = value_iteration(P, r, gamma)
    close(value_iteration(P, r, gamma, start=guess), v_star)
    np.testing.assert_array_equal(value_iteration(P, r, gamma, start=guess, max_iterations=0), guess)
    close(
        value_iteration(P, r, gamma, start=guess, max_iterations=1),
        tabular.q_values(P, r, guess, gamma=gamma).max(axis=1),
    )


def test_greedy_takes_the_first_of_tied_actions():
    q = jnp.array([[0.0, 1.0, 1.0 + 1e-12], [2.0, 2.0, 1.0]])
    np.testing.assert_array_equal(tabular.greedy(q), [2, 0])
    np.testing.assert_array_equal(tabular.greedy(q, tolerance=1e-9), [1, 0])


def test_window_below_one_is_refused():
    P, r, gamma, value, _ = random_task(0)
    with pytest.raises(UserError, match="at least 1, not 0"):
        tabular.sgft_vi(P, r, value, gamma=gamma, horizon=0)


def solve(P, r, gamma, value, v_pi):
    w, q = tabular.sgft_vi(P, r, value, gamma=gamma, horizon=3)
    policy = tabular.greedy(q)
    return w, q, tabular.value_iteration(P, r, gamma), tabular.policy_evaluation(P, r, policy, gamma)


def test_vmap_mesh_and_pmap_equal_single_tasks():
    tasks = [random_task(seed) for seed in range(8)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[jax.jit(solve)(*task) for task in tasks])
    batch = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *tasks)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    assert len(sharded[0].sharding.device_set) == 8
    batched = jax.jit(jax.vmap(solve))
    for result in (batched(*batch), batched(*sharded), jax.pmap(solve)(*batch)):
        chex.assert_trees_all_close(result, expected, rtol=1e-9, atol=1e-12)


def test_figures_show_the_numbers():
    (axes,) = tabular_figures.figure_counter_example().axes
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.0] * 19 + [0.7425] * 21, atol=1e-9)
    turned, drifting = tabular_figures.figure_exact().axes
    heights = [[bar.get_height() for bar in axes.patches] for axes in (turned, drifting)]
    np.testing.assert_allclose(heights[0], [9.8, 0.065, 0.065, 0.089, 0, 0], rtol=0.01, atol=1e-9)
    np.testing.assert_allclose(heights[1], [7.0, 1.1, 0.18, 0.0067, 0.00066, 0], rtol=0.02, atol=1e-9)
