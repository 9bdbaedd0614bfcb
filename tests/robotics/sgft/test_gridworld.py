import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from robotics.sgft import gridworld, tabular, tabular_figures

STEPS = (100, 200, 400, 800, 1500, 3000)
# Medians of five seeds, measured with an independent implementation.
REFERENCE = {
    "SGFT H=1": [0.75, 0.72, 0.70, 0.49, 0.41, 0.18],
    "SGFT H=4": [0.58, 0.41, 0.29, 0.07, 0.05, 0.04],
    "VI from scratch": [1.24, 1.24, 1.24, 0.46, 0.09, 0.09],
    "Q-learning from scratch": [1.24, 1.24, 1.24, 1.24, 1.24, 1.24],
    "Q-learning + PBRS": [0.98, 0.98, 0.55, 0.45, 0.34, 0.46],
    "VI with the sim prior": [0.40, 0.23, 0.16, 0.08, 0.05, 0.04],
}


@pytest.fixture(scope="module")
def world():
    return jax.jit(gridworld.turned_grid)()


@pytest.fixture(scope="module")
def losses(world):
    return jax.jit(functools.partial(gridworld.compare, steps=STEPS))(jax.random.key(0), world)


def test_few_real_steps_suffice_with_the_simulators_value(losses):
    medians = {name: np.median(values, axis=0) for name, values in losses.items()}
    print(f"{'n':24}", *(f"{n:11}" for n in STEPS))
    for name, reference in REFERENCE.items():
        print(f"{name:24}", *(f"{ours:5.2f}/{theirs:.2f} " for ours, theirs in zip(medians[name], reference)))
    at_400 = {name: row[STEPS.index(400)] for name, row in medians.items()}
    assert at_400["SGFT H=4"] < 0.45
    assert at_400["VI from scratch"] > 0.9
    assert at_400["Q-learning from scratch"] > 0.9
    assert at_400["VI with the sim prior"] < at_400["SGFT H=4"] < at_400["SGFT H=1"] < 1
    for name, reference in REFERENCE.items():
        assert at_400[name] == pytest.approx(reference[STEPS.index(400)], abs=0.15), name
    assert losses["SGFT H=4"].shape == (5, len(STEPS))


def test_no_policy_beats_the_best_one(losses):
    assert all((values >= -1e-4).all() for values in losses.values())


def test_figure_shows_the_medians(losses):
    (axes,) = tabular_figures.figure_finite_data(losses, steps=STEPS).axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    for name, values in losses.items():
        np.testing.assert_allclose(lines[name], np.median(values, axis=0))
    np.testing.assert_array_equal(lines["zero-shot"], 1.0)


def test_moves_slip_turn_drift_and_stay_inside():
    plain = np.asarray(jax.jit(lambda: gridworld.transitions(3, slip=0.2))())
    np.testing.assert_allclose(plain.sum(axis=-1), 1, rtol=1e-6)
    center, up, right, down, left = 4, 1, 5, 7, 3
    np.testing.assert_allclose(plain[center, 0, [up, right, down, left]], [0.85, 0.05, 0.05, 0.05], rtol=1e-6)
    np.testing.assert_allclose(plain[0, 0, [0, 1, 3]], [0.85 + 0.05, 0.05, 0.05], rtol=1e-6)
    np.testing.assert_array_equal(plain[8, :, 8], 1)

    turned = gridworld.transitions(3, slip=0.0, turn=0.8)
    np.testing.assert_allclose(turned[center, 0, [up, right]], [0.2, 0.8], rtol=1e-6)
    np.testing.assert_allclose(turned[center, 3, [left, up]], [0.2, 0.8], rtol=1e-6)
    drifting = gridworld.transitions(3, slip=0.0, drift=0.3)
    np.testing.assert_allclose(drifting[up, 1, [2, 5]], [0.7, 0.3], rtol=1e-6)
    pit = gridworld.transitions(3, slip=0.0, drift=0.3, pits=(center,))
    np.testing.assert_array_equal(pit[center, :, center], 1)


def test_simulation_and_reality_differ_only_in_the_turn(world):
    np.testing.assert_allclose(world.P_sim, gridworld.transitions(10), atol=1e-7)
    np.testing.assert_allclose(world.P_real, gridworld.transitions(10, turn=0.8), atol=1e-7)
    assert world.reward[98, 0, 99] == 1 and world.reward[99, 0, 99] == 0 and world.reward.sum() == 99


def test_agents_learn_by_their_formulas(world):
    P_sim, _, reward, gamma = world
    agents = gridworld.agents(world, horizons=(1,), lr=0.3)
    v_sim = tabular.value_iteration(P_sim, tabular.expected_reward(P_sim, reward), gamma)
    q = jnp.asarray(np.random.default_rng(0).normal(size=(100, 4)), jnp.float32)
    counts = jnp.zeros((100, 4, 100)).at[0, 1, 10].set(3.0)

    sgft = agents["SGFT H=1"].plan(counts, q)
    P_hat = P_sim.at[0, 1].set((P_sim[0, 1] + counts[0, 1]) / 4)
    expected = P_hat[..., 99] * (jnp.arange(100) != 99)[:, None] + gamma * P_hat @ v_sim - v_sim[:, None]
    np.testing.assert_allclose(sgft, expected, atol=1e-6)

    scratch = agents["VI from scratch"].plan(counts, q * 0)
    assert jnp.ptp(jnp.delete(scratch[0], 1)) < 1e-5 and scratch[0, 1] < scratch[0, 0]

    move = (5, 2, 15)
    for name, potential in (("Q-learning from scratch", 0 * v_sim), ("Q-learning + PBRS", v_sim)):
        updated = agents[name].observe(q, *move)
        target = gamma * potential[15] - potential[5] + gamma * q[15].max()
        np.testing.assert_allclose(updated[5, 2], 0.7 * q[5, 2] + 0.3 * target, rtol=1e-5)
        np.testing.assert_array_equal(updated == q, jnp.ones_like(q, bool).at[5, 2].set(False))
        np.testing.assert_array_equal(agents[name].plan(counts, q), q)


VISITS = gridworld.Agent(lambda counts, q: q, lambda q, s, a, s_next: q.at[s, a].add(1.0))


def chain(length):
    """One action, which leads to the next state."""
    return jnp.eye(length, k=1).at[-1, -1].set(1.0)[:, None]


@pytest.mark.parametrize(
    "length, episode, visits", [(9, 3, [4, 4, 4, 0, 0, 0, 0, 0, 0]), (4, 60, [4, 4, 4, 0])]
)
def test_streams_restart_after_an_episode_or_at_the_goal(length, episode, visits):
    q = gridworld.learn(jax.random.key(0), VISITS, chain(length), blocks=3, block=4, episode=episode)
    np.testing.assert_array_equal(q.sum(axis=(1, 2)), [4, 8, 12])
    np.testing.assert_array_equal(q[-1, :, 0], visits)


def test_actions_are_greedy_with_ties_at_random_and_some_exploration():
    q = jnp.array([[1.0, 1.0, 0.0]])
    agent = gridworld.Agent(
        lambda counts, _: jnp.where(counts.sum() < 4000, q, counts[..., 0]), lambda q, s, a, s_next: q
    )
    stay = jnp.ones((1, 3, 1))
    counts = gridworld.learn(
        jax.random.key(1), agent, stay, blocks=10, block=400, episode=10**6, epsilon=0.3
    )[-1, 0]
    np.testing.assert_allclose(counts / 4000, [0.45, 0.45, 0.1], atol=0.03)


def test_streams_are_the_same_under_vmap_mesh_and_pmap(world):
    agent = gridworld.agents(world)["Q-learning + PBRS"]

    def run(key):
        return gridworld.learn(key, agent, world.P_real, blocks=3)

    keys = jax.random.split(jax.random.key(0), 8)
    expected = jnp.stack([jax.jit(run)(key) for key in keys])
    sharded = jax.device_put(
        keys, NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    )
    batched = jax.jit(jax.vmap(run))
    for result in (batched(keys), batched(sharded), jax.pmap(run)(keys)):
        chex.assert_trees_all_close(result, expected, rtol=1e-5, atol=1e-7)
