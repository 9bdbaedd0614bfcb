"""Stage 1 on the closed-form simulator: one iteration everywhere alike, evaluations of one episode."""

import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from core.rl import ppo
from core.rl.networks import Actor, Value
from core.sim.pure import PureSimulator
from robotics.sgft import pretrain
from robotics.sgft.tasks.closed_form import ClosedFormPuck

LANES, ENVS = 8, 16
SIMULATOR = ClosedFormPuck(ENVS)
CONFIG = ppo.Config(Actor(2, (4,)), Value(()), epochs=1, minibatches=2)
iteration = functools.partial(
    pretrain.ppo_iteration, simulator=SIMULATOR, hyper=ppo.Hyper.arrays(lr=1e-3), config=CONFIG, length=3
)


@pytest.fixture(scope="module")
def started():
    keys = jax.random.split(jax.random.key(0), LANES)
    init = functools.partial(ppo.init, config=CONFIG, observation_size=8)
    env = jax.jit(jax.vmap(SIMULATOR.reset))(keys)
    return jax.jit(jax.vmap(lambda key: init(key)))(keys), env, keys


@pytest.fixture(scope="module")
def reference(started):
    """Lane after lane, by one jitted function of one lane."""
    jitted = jax.jit(iteration)
    lanes = [numbers(jitted(*jax.tree.map(lambda leaf, i=i: leaf[i], started))) for i in range(LANES)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *lanes)


def numbers(results):
    """The network, the metrics and where the environments are: what an iteration is about."""
    state, env, metrics = results
    return state.actor, state.value, state.stats, env.observation, env.step_count, metrics


def same(actual, expected):
    chex.assert_trees_all_close(jax.device_get(actual), expected, rtol=1e-5, atol=1e-5)


def test_an_iteration_collects_and_learns(started, reference):
    actor, _, stats, observation, step_count, metrics = reference
    assert (stats.count == 3 * ENVS).all() and (step_count == 3).all()
    assert not np.allclose(observation, started[1].observation)
    assert not np.allclose(*(a["params"]["body"]["Dense_0"]["kernel"] for a in (actor, started[0].actor)))
    assert all(np.isfinite(value).all() for value in metrics.values())


def test_pmap(started, reference):
    same(numbers(jax.pmap(iteration)(*started)), reference)


def test_vmap_with_environments_split_over_a_mesh(started, reference):
    mesh = jax.make_mesh((8, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    three = functools.partial(jax.tree.map, lambda leaf: leaf[:3])  # 8 devices do not divide 3 lanes

    def put(tree, **options):
        place = functools.partial(pretrain.lane_sharding, mesh, **options)
        return jax.tree.map(lambda leaf: jax.device_put(leaf, place(leaf)), tree)

    state, env, keys = three(started)
    env = put(env, env_axis=1)
    assert env.observation.addressable_shards[0].data.shape == (3, ENVS // 8, 8)
    same(numbers(jax.jit(jax.vmap(iteration))(put(state), env, put(keys))), three(reference))


class Counted(flax.struct.PyTreeNode):
    """Environments that only count."""

    step_count: jax.Array
    observation: jax.Array
    final_observation: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    success: jax.Array


class Counter(PureSimulator):
    """Episodes of other lengths; a step pays its number, success is an even number; 100 an episode after."""

    def __init__(self, lengths):
        self.lengths, self.task = jnp.array(lengths), type("Task", (), {"episode_length": 5})

    def reset(self, key):
        blank = jnp.zeros(len(self.lengths))
        no = blank > 0
        return Counted(blank, blank[:, None], blank[:, None], blank, no, no, no)

    def auto_reset_step(self, state, action):
        count = state.step_count + 1
        ended = count % 100 == self.lengths
        late = (count % 100 >= 5) & ~ended
        following = jnp.where(ended | late, (count // 100 + 1) * 100, count)
        return state.replace(
            step_count=following, reward=count, terminated=ended, truncated=late, success=count % 2 == 0
        )


def test_evaluation_counts_the_first_episode_of_each_environment():
    act = lambda carry, observation, key: (carry, jnp.zeros((4, 1)))  # noqa: E731
    success, returns = pretrain.evaluate_policy(Counter([2, 3, 5, 9]), act, 0, jax.random.key(0), lanes=2)
    # Episodes of 2, 3, 5 and 5 (time limit) steps; the last step of the first alone is even.
    np.testing.assert_allclose(returns, [(1 + 2 + 1 + 2 + 3) / 2, (15 + 15) / 2])
    np.testing.assert_allclose(success, [0.5, 0.0])
