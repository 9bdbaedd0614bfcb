"""One small agent of each kind, shared by the tests of the training steps."""

import jax
import jax.numpy as jnp
import pytest

from core.rl import ppo, sac
from core.rl.networks import Actor, Critic, Value

OBSERVATION, ACTION, BATCH = 3, 2, 16


@pytest.fixture(scope="session")
def sac_config():
    return sac.Config(Actor(ACTION, (8,)), Critic(3, (8, 8)), subset=2)


@pytest.fixture(scope="session")
def sac_state(sac_config):
    make = jax.jit(lambda key: sac.init(key, config=sac_config, observation_size=OBSERVATION))
    state = make(jax.random.key(0))
    return state.replace(target=jax.tree.map(lambda x: x + 0.1, state.target))


@pytest.fixture(scope="session")
def batch():
    keys = jax.random.split(jax.random.key(1), 4)
    return sac.Batch(
        observation=jax.random.normal(keys[0], (BATCH, OBSERVATION)),
        action=jax.random.uniform(keys[1], (BATCH, ACTION), minval=-1),
        reward=jax.random.normal(keys[2], (BATCH,)),
        next_observation=jax.random.normal(keys[3], (BATCH, OBSERVATION)),
        terminated=jnp.arange(BATCH) % 5 == 0,
    )


@pytest.fixture(scope="session")
def ppo_config():
    return ppo.Config(Actor(ACTION, (8,)), Value((8,)), epochs=2, minibatches=4)


@pytest.fixture(scope="session")
def ppo_state(ppo_config):
    make = jax.jit(lambda key: ppo.init(key, config=ppo_config, observation_size=OBSERVATION))
    return make(jax.random.key(0))


@pytest.fixture(scope="session")
def rollout():
    """`[T=6, N=8]`, one true end and one time limit inside."""
    keys = jax.random.split(jax.random.key(2), 4)
    shape = (6, 8)
    return ppo.Rollout(
        observation=jax.random.normal(keys[0], (*shape, OBSERVATION)),
        pre_tanh=0.5 * jax.random.normal(keys[1], (*shape, ACTION)),
        log_prob=-1.5 + 0.1 * jax.random.normal(keys[3], shape),
        reward=jax.random.normal(keys[2], shape),
        terminated=jnp.zeros(shape, bool).at[2, 3].set(True),
        truncated=jnp.zeros(shape, bool).at[4, 1].set(True).at[-1].set(True),
        final_observation=jax.random.normal(keys[3], (*shape, OBSERVATION)),
    )
