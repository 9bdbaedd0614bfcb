"""SAC and PPO solve a point mass on a line: reach 0, x' = clip(x + 0.3 a), reward -|x'|."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from core.rl import normalize, ppo, replay, sac
from core.rl.networks import Actor, Critic, Value

LIMIT = 8  # steps of an episode


def move(x, action):
    return jnp.clip(x + 0.3 * action, -1.0, 1.0)


def distance_after(policy, steps=LIMIT):
    """|x| after an episode from a grid of starts."""
    x = jnp.linspace(-1, 1, 21)[:, None]
    for _ in range(steps):
        x = move(x, policy(x))
    return np.abs(x).mean()


def random_transitions(key, n):
    keys = jax.random.split(key)
    x, action = (jax.random.uniform(k, (n, 1), minval=-1, maxval=1) for k in keys)
    after, no = move(x, action), jnp.zeros(n, bool)
    t = jnp.arange(n, dtype=jnp.int32)
    return replay.Transition(x, action, -jnp.abs(after)[:, 0], after, no, no, 0 * t, t)


def potential(x):
    return -2.0 * jnp.abs(x[:, 0])


def train_sac(hyper, shaped):
    config = sac.Config(
        Actor(1, (32,), activation=nn.relu, log_std="head", log_std_init=-1.0), Critic(2, (32, 32))
    )

    @jax.jit
    def train(hyper):
        rows = random_transitions(jax.random.key(0), 1000)
        buffer = replay.add(replay.init(jax.tree.map(lambda x: x[0], rows), 1000), rows)

        def sample(key):
            row = replay.sample(buffer, key, 64)
            reward = row.reward
            if shaped:
                reward += hyper.gamma * potential(row.next_observation) - potential(row.observation)
            return sac.Batch(row.observation, row.action, reward, row.next_observation, row.terminated)

        state = sac.init(jax.random.key(1), config=config, observation_size=1, alpha=0.02)
        return sac.update_block(state, jax.random.key(2), sample, hyper, config=config, n=400)

    state, metrics = train(hyper)
    return config, state, metrics


def test_sac_reaches_the_target_from_random_data():
    hyper = sac.Hyper.arrays(gamma=0.9, tau=0.05, actor_lr=3e-3, critic_lr=3e-3, alpha_lr=0.0)
    config, state, _ = train_sac(hyper, shaped=False)
    assert distance_after(lambda x: jnp.zeros_like(x)) > 0.5
    assert distance_after(lambda x: sac.act(state.actor, x, None, config=config)) < 0.08


def test_a_window_of_one_suffices_with_a_good_potential():
    hyper = sac.Hyper.arrays(gamma=0.9, bootstrap=0.0, actor_lr=3e-3, critic_lr=3e-3, alpha_lr=0.0)
    config, state, metrics = train_sac(hyper, shaped=True)
    assert distance_after(lambda x: sac.act(state.actor, x, None, config=config)) < 0.08
    assert metrics["critic_loss"] < 0.1


class Line(flax.struct.PyTreeNode):
    observation: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_observation: jax.Array
    key: jax.Array
    t: jax.Array


def start(key, n):
    x, no = jax.random.uniform(key, (n, 1), minval=-1, maxval=1), jnp.zeros(n, bool)
    return Line(x, jnp.zeros(n), no, no, x, key, jnp.int32(0))


def line_step(env, action):
    after = move(env.observation, action)
    key, reset_key = jax.random.split(env.key)
    over = env.t + 1 == LIMIT
    first = jax.random.uniform(reset_key, after.shape, minval=-1, maxval=1)
    truncated = jnp.full(after.shape[:1], over)
    return Line(
        jnp.where(over, first, after),
        -jnp.abs(after)[:, 0],
        jnp.zeros_like(truncated),
        truncated,
        after,
        key,
        jnp.where(over, 0, env.t + 1),
    )


def test_ppo_reaches_the_target():
    config = ppo.Config(Actor(1, (32,)), Value((32,)), epochs=4, minibatches=4)
    hyper = ppo.Hyper.arrays(gamma=0.9, lr=3e-3)

    @jax.jit
    def train(key):
        state = ppo.init(key, config=config, observation_size=1)

        def iteration(carry, key):
            state, env = carry
            collect_key, update_key = jax.random.split(key)
            env, rollout = ppo.collect(state, env, collect_key, line_step, config=config, length=LIMIT)
            state, metrics = ppo.update(state, rollout, update_key, hyper, config=config)
            return (state, env), metrics["reward"]

        return jax.lax.scan(iteration, (state, start(key, 64)), jax.random.split(key, 40))

    (state, _), reward = train(jax.random.key(0))

    def policy(x):
        return jnp.tanh(config.actor.apply(state.actor, normalize.apply(state.stats, x))[0])

    assert reward[-5:].mean() > reward[:5].mean() + 0.15
    assert distance_after(policy) < 0.1
