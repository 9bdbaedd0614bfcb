"""A tiny simulation stage that both stages' tests share: random networks and transitions, 8 lanes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.rl import normalize, sac
from core.rl.networks import Actor, Critic, ValueEnsemble
from core.rl.replay import Transition
from robotics.sgft import model_based, sac_agent
from robotics.sgft.dynamics import Dynamics
from robotics.sgft.sac_agent import ModelFree, Rules
from robotics.sgft.source import Experience, Networks, Source, policy_action, sim_value
from robotics.sgft.tasks import puck_push

LANES, BLOCK = 8, 10
jitted = functools.cache(jax.jit)


@pytest.fixture(autouse=True, scope="package")
def quick_compiles():
    """Most of the time here goes into compiling tiny programs: optimising them would not pay off."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def transitions(seed, *shape):
    """Transitions `[*shape, ...]` of nothing in particular, with the reward of the state entered."""
    rng = np.random.default_rng(seed)
    observation = rng.uniform(-1, 1, (*shape, 8)).astype(np.float32)
    action = rng.uniform(-1, 1, (*shape, 2)).astype(np.float32)
    change = rng.normal(0, 0.05, (*shape, 8)).astype(np.float32)
    change[..., :2] += 0.05 * action
    counts = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    reached = observation + change
    ends = np.zeros(shape, bool), counts % 5 == 4
    rows = Transition(observation, action, puck_push.reward(reached), reached, *ends, counts // 5, counts % 5)
    return jax.tree.map(jnp.asarray, rows)


@pytest.fixture(scope="session")
def networks():
    return Networks(Actor(2, (8,), nn.tanh, final_gain=1.0), ValueEnsemble(2, (8,), nn.tanh))


@pytest.fixture(scope="session")
def source(networks):
    """A Source of 8 lanes."""

    def one(key):
        actor_key, value_key = jax.random.split(key)
        observation = jnp.zeros((1, 8))
        return networks.actor.init(actor_key, observation), networks.value.init(value_key, observation)

    actor, value = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), LANES))
    stats = jax.vmap(lambda x: normalize.update(normalize.init(8), x))(transitions(0, LANES, 50).observation)
    numbers = functools.partial(jnp.full, LANES)
    blank = Source(actor, value, numbers(0.5), numbers(2.0), stats, numbers(0.97), None)
    return blank.replace(simulated=experience_of(blank, networks, 1, 64))


def experience_of(source, networks, seed, n):
    """A block of experience `[lanes, n]` valued by the source's V_sim."""
    rows = transitions(seed, source.gamma.shape[0], n)
    values = jitted(jax.vmap(functools.partial(sim_value, networks=networks)))
    return Experience(rows, values(source, rows.observation), values(source, rows.next_observation))


@pytest.fixture(scope="session")
def experience(source, networks):
    """A block of real steps `[8, 10]`."""
    return experience_of(source, networks, 2, BLOCK)


@pytest.fixture(scope="session")
def lane():
    """Picks one lane, or several, of a tree."""
    return lambda tree, i=0: jax.tree.map(lambda leaf: leaf[i], tree)


def rules(*, horizon=1, **changes):
    """SGFT-SAC's rules by default; `horizon` 0 is the infinite one."""
    hyper = sac.Hyper(
        gamma=changes.pop("gamma", 0.97), bootstrap=horizon != 1, backup_entropy=0, alpha_lr=0, critic_lr=1e-3
    )
    return jax.tree.map(jnp.float32, Rules(hyper, **{"warmup_steps": 0, **changes}))


def model_free(*, horizon=1, prefit_updates=0, terminal_potential="zero", **changes):
    """A tiny SGFT-SAC, or a baseline of it."""
    window = max(horizon, 1)
    settings = ModelFree(
        Actor(2, (8,), nn.tanh, train_log_std=False, horizon=window),
        Critic(2, (8,), horizon=window),
        batch=16,
        utd=2,
        policy_delay=2,
        capacity=32,
        prefit_updates=prefit_updates,
        terminal_potential=terminal_potential,
    )
    return sac_agent.make(settings, rules(horizon=horizon, **changes))


@pytest.fixture(scope="session")
def planning(networks):
    """Makes a tiny SGFT-MB."""

    def make(value=None, **changes):
        sizes = {"candidates": 32, "pretrain_updates": 4, "pretrain_batch": 16, "updates": 4, "capacity": 32}
        batches = {"real_batch": 8, "sim_batch": 8}
        network = Dynamics(puck_push.TASK.observation_step, (16,))
        return model_based.make(
            model_based.ModelBased(network, members=2, **{**sizes, **batches, **changes}),
            value=value or functools.partial(sim_value, networks=networks),
            default_action=functools.partial(policy_action, networks=networks),
            reward=puck_push.reward,
            gamma=0.97,
            action_size=2,
        )

    return make
