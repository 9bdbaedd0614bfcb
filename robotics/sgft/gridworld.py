"""Grid worlds where the simulator gets the directions wrong, and learning in them from few real steps.

`turned_grid` and `compare` are the finite-data comparison: every method acts in the real world, step by step,
and learns only from what it met.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from robotics.sgft import tabular
from robotics.sgft.tabular import World

__all__ = ["Agent", "agents", "compare", "exact_grids", "learn", "transitions", "turned_grid"]

_MOVES = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]], np.int32)  # up, right, down, left: each turns clockwise
_TIE = 1e-6  # actions closer than this count as equal


def transitions(size, *, slip=0.1, turn=0.0, drift=0.0, pits=()):
    """Moves on a square grid with walls around: `[size * size, 4, size * size]` probabilities.

    State = row * size + column; actions up, right, down, left. The last corner is absorbing.

    Args:
      size: cells along one side.
      slip: probability that the direction is replaced by a uniform one.
      turn: probability that the direction is first turned 90 degrees clockwise.
      drift: probability that the move ends one cell further down.
      pits: further absorbing states.
    """
    cells = size * size
    state = jnp.arange(cells)
    position = jnp.stack(jnp.divmod(state, size), axis=-1)[:, None]
    absorbing = jnp.isin(state, jnp.array([cells - 1, *pits]))[:, None]

    def move(displacement):
        row, column = jnp.moveaxis(jnp.clip(position + displacement, 0, size - 1), -1, 0)
        return jax.nn.one_hot(jnp.where(absorbing, state[:, None], row * size + column), cells, dtype=float)

    P = (1 - drift) * move(_MOVES) + drift * move(_MOVES + _MOVES[2])
    P = (1 - turn) * P + turn * jnp.roll(P, -1, axis=1)
    return (1 - slip) * P + slip * P.mean(axis=1, keepdims=True)


def turned_grid():
    """The 10 x 10 `World` (arrays `[100, 4, 100]`) of the finite-data comparison, gamma 0.97.

    Start in state 0, reward 1 on entering the last corner. In reality a direction turns by 90 degrees with
    probability 0.8, so the simulator's policy walks into walls while its values still point to the goal.
    """
    goal = jnp.arange(100) == 99
    reward = (goal[None, None, :] & ~goal[:, None, None]).astype(float)
    return World(transitions(10), transitions(10, turn=0.8), reward, 0.97)


def exact_grids():
    """The two small `World`s of the exact comparison by name, arrays `[25, 4, 25]` and `[49, 4, 49]`.

    Both pay 1 for each step in the last corner and have pits, absorbing without reward. In reality directions
    turn with probability 0.8, or with 0.6 and the move drifts down with probability 0.3.
    """

    def grid(size, pits, gamma, **gap):
        reward = jnp.zeros((size * size, 4, 1)).at[-1].set(1.0)
        return World(transitions(size, pits=pits), transitions(size, pits=pits, **gap), reward, gamma)

    return {
        "turned": grid(5, (13, 22), 0.95, turn=0.8),
        "turned and drifting": grid(7, (3, 35, 36), 0.98, turn=0.6, drift=0.3),
    }


class Agent(NamedTuple):
    """A way to learn action values `Q [S, A]` from a stream of real steps.

    plan: (counts `[S, A, S']`, Q) -> Q, between blocks of steps.
    observe: (Q, s, a, s') -> Q, after every step.
    """

    plan: Callable
    observe: Callable


def agents(world, *, horizons=(1, 4), lr=0.3):
    """The methods of the finite-data comparison, {name: Agent}, for a `World` (arrays `[S, A, S']`).

    The model-based ones know the reward and estimate the dynamics as (counts + prior) / (n + 1); the prior is
    the simulator's. From scratch there is none, and pairs never tried lead anywhere with equal chance.

    Args:
      horizons: window lengths of SGFT, ints >= 1.
      lr: step size of Q-learning in (0, 1].
    """
    P_sim, _, reward, gamma = world
    states = P_sim.shape[0]
    v_sim = tabular.value_iteration(P_sim, tabular.expected_reward(P_sim, reward), gamma)

    def model_based(solve, prior):
        def plan(counts, q):
            n = counts.sum(axis=-1, keepdims=True)
            if prior is None:
                P = jnp.where(n > 0, counts / jnp.maximum(n, 1), 1 / states)
            else:
                P = (counts + prior) / (n + 1)
            return solve(P, tabular.expected_reward(P, reward), q)

        return Agent(plan, lambda q, s, a, s_next: q)

    def window(horizon):
        return lambda P, r, q: tabular.sgft_vi(P, r, v_sim, gamma=gamma, horizon=horizon)[1]

    def optimum(P, r, q):
        value = tabular.value_iteration(P, r, gamma, start=q.max(axis=-1), tolerance=_TIE)
        return tabular.q_values(P, r, value, gamma=gamma)

    def q_learning(potential):
        def observe(q, s, a, s_next):
            shaped = reward[s, a % reward.shape[1], s_next] + gamma * potential[s_next] - potential[s]
            return q.at[s, a].add(lr * (shaped + gamma * q[s_next].max() - q[s, a]))

        return Agent(lambda counts, q: q, observe)

    return {f"SGFT H={h}": model_based(window(h), P_sim) for h in horizons} | {
        "VI from scratch": model_based(optimum, None),
        "Q-learning from scratch": q_learning(jnp.zeros_like(v_sim)),
        "Q-learning + PBRS": q_learning(v_sim),
        "VI with the sim prior": model_based(optimum, P_sim),
    }


def learn(key, agent, P_real, *, blocks, block=10, episode=60, epsilon=0.1):
    """Runs an agent for blocks * block steps of one stream that restarts in state 0.

    Acts epsilon-greedily, ties at random. Episodes end on entering the last state or after `episode` steps.

    Args:
      key: RNG key.
      agent: an `Agent`, planning before each block.
      P_real: `[S, A, S']` dynamics; the agent only meets samples.

    Returns:
      `[blocks, S, A]` action values after 10, 20, ... steps (for block = 10).
    """
    states, actions, _ = P_real.shape

    def step(carry, key):
        s, t, counts, q = carry
        explore_key, random_key, greedy_key, next_key = jax.random.split(key, 4)
        choice = jax.random.categorical(greedy_key, jnp.log(_best(q[s])))
        explore = jax.random.uniform(explore_key) < epsilon
        a = jnp.where(explore, jax.random.randint(random_key, (), 0, actions), choice)
        s_next = jax.random.categorical(next_key, jnp.log(P_real[s, a]))
        counts, q = counts.at[s, a, s_next].add(1), agent.observe(q, s, a, s_next)
        over = (s_next == states - 1) | (t + 1 >= episode)
        return (jnp.where(over, 0, s_next), jnp.where(over, 0, t + 1), counts, q), None

    def learn_block(carry, key):
        s, t, counts, q = jax.lax.scan(step, carry, jax.random.split(key, block))[0]
        q = agent.plan(counts, q)
        return (s, t, counts, q), q

    counts = jnp.zeros_like(P_real)
    start = (jnp.zeros((), int), jnp.zeros((), int), counts, agent.plan(counts, counts[..., 0]))
    return jax.lax.scan(learn_block, start, jax.random.split(key, blocks))[1]


def compare(key, world, *, steps=(100, 200, 400, 800, 1500, 3000), seeds=5, horizons=(1, 4)):
    """Loss of value at the start after n real steps, relative to zero-shot's, for each of `agents`.

    1 is the simulator's optimal policy (first of tied actions); an agent's policy is greedy, ties at random.

    Args:
      key: RNG key; every method sees the same one.
      world: a `World`, arrays `[S, A, S']`.
      steps: values of n, multiples of 10.
      seeds: independent runs, vmapped.

    Returns:
      {name: `[seeds, len(steps)]`}.
    """
    P_sim, P_real, reward, gamma = world
    r_sim, r_real = tabular.expected_reward(P_sim, reward), tabular.expected_reward(P_real, reward)
    v_sim = tabular.value_iteration(P_sim, r_sim, gamma)
    best = tabular.value_iteration(P_real, r_real, gamma)[0]

    def loss(policy):
        return best - tabular.policy_evaluation(P_real, r_real, policy, gamma)[0]

    zero_shot = loss(tabular.greedy(tabular.q_values(P_sim, r_sim, v_sim, gamma=gamma), tolerance=_TIE))
    blocks = np.array(steps) // 10

    def relative_loss(agent, key):
        q = learn(key, agent, P_real, blocks=int(blocks.max()))[blocks - 1]
        return jax.vmap(loss)(_best(q)) / zero_shot

    keys = jax.random.split(key, seeds)
    return {
        name: jax.vmap(partial(relative_loss, agent))(keys)
        for name, agent in agents(world, horizons=horizons).items()
    }


def _best(q):
    """`q [..., A]` -> `[..., A]` probabilities, uniform over the best actions."""
    best = (q >= q.max(axis=-1, keepdims=True) - _TIE).astype(q.dtype)
    return best / best.sum(axis=-1, keepdims=True)
