import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from core.errors import UserError
from core.rl import distributions, normalize, ppo

HYPER = ppo.Hyper.arrays(lr=1e-2)


def naive_advantages(reward, value, next_value, terminated, truncated, gamma, lam):
    advantage = np.zeros_like(reward)
    for n in range(reward.shape[1]):
        running = 0.0
        for t in reversed(range(reward.shape[0])):
            if terminated[t, n] or truncated[t, n]:
                running = 0.0
            bootstrap = 0.0 if terminated[t, n] else next_value[t, n]
            running = reward[t, n] + gamma * bootstrap - value[t, n] + gamma * lam * running
            advantage[t, n] = running
    return advantage


def test_advantages_equal_a_naive_loop():
    rng = np.random.default_rng(0)
    floats = rng.normal(size=(3, 12, 50)).astype(np.float32)
    ends = rng.random((2, 12, 50)) < 0.15
    advantage = ppo.gae(*floats, *ends, gamma=0.97, lam=0.9)
    np.testing.assert_allclose(advantage, naive_advantages(*floats, *ends, 0.97, 0.9), rtol=1e-4, atol=1e-5)


def test_a_time_limit_bootstraps_and_a_true_end_does_not():
    one, no, yes = jnp.ones((1, 1)), jnp.zeros((1, 1), bool), jnp.ones((1, 1), bool)
    gae = functools.partial(ppo.gae, one, 5 * one, 10 * one, gamma=0.9, lam=0.95)
    np.testing.assert_allclose(gae(no, yes), 1 + 9 - 5)
    np.testing.assert_allclose(gae(yes, no), 1 - 5)


def test_lambda_one_gives_discounted_returns():
    reward = jnp.arange(4.0)[:, None]
    zero, no = jnp.zeros((4, 1)), jnp.zeros((4, 1), bool)
    returns = ppo.gae(reward, zero, zero, no, no, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(returns[:, 0], [0 + 0.5 + 0.5 + 0.375, 1 + 1 + 0.75, 2 + 1.5, 3])


@pytest.fixture(scope="module")
def update(ppo_config):
    return jax.jit(functools.partial(ppo.update, config=ppo_config))


def minibatch(state, rollout, config):
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout)
    mean, log_std = config.actor.apply(state.actor, flat.observation)
    log_prob = distributions.gaussian_log_prob(flat.pre_tanh, mean, log_std)
    return flat.observation, flat.pre_tanh, log_prob, flat.reward, jnp.cos(flat.reward)


def test_at_the_old_policy_the_loss_is_the_policy_gradient(ppo_state, rollout, ppo_config):
    batch = minibatch(ppo_state, rollout, ppo_config)
    params = (ppo_state.actor, ppo_state.value)

    @jax.jit
    def surrogate(actor):
        mean, log_std = ppo_config.actor.apply(actor, batch[0])
        log_prob = distributions.gaussian_log_prob(batch[1], mean, log_std)
        advantage = (batch[3] - batch[3].mean()) / batch[3].std()
        return -(advantage * log_prob).mean() - 0.002 * log_std.sum(-1).mean()

    gradient, metrics = jax.jit(
        lambda params: jax.grad(ppo.loss, has_aux=True)(params, batch, HYPER, config=ppo_config)
    )(params)
    expected = jax.jit(jax.grad(surrogate))(ppo_state.actor)
    chex.assert_trees_all_close(gradient[0], expected, rtol=1e-3, atol=1e-6)
    assert metrics["clip_fraction"] == 0
    np.testing.assert_allclose([metrics["kl"], metrics["policy_loss"]], 0, atol=1e-6)


def test_beyond_the_clip_only_the_harmful_side_keeps_a_gradient(ppo_state, rollout, ppo_config):
    observation, pre_tanh, log_prob, _, returns = minibatch(ppo_state, rollout, ppo_config)
    advantage = jnp.where(jnp.arange(48) < 24, 1.0, -1.0)

    @jax.jit
    @jax.grad
    def gradient(actor, old):
        batch = (observation, pre_tanh, old, advantage, returns)
        hyper = HYPER.replace(value_coef=0.0, std_bonus=0.0)
        return ppo.loss((actor, ppo_state.value), batch, hyper, config=ppo_config)[0]

    # A ratio of 2 where it helped, and of 1/2 where it hurt, is clipped away; the reverse is not.
    done = log_prob - jnp.where(advantage > 0, 1.0, -1.0) * jnp.log(2.0)
    assert optax.tree.norm(gradient(ppo_state.actor, done)) == 0
    undone = log_prob + jnp.where(advantage > 0, 1.0, -1.0) * jnp.log(2.0)
    assert optax.tree.norm(gradient(ppo_state.actor, undone)) > 0


def test_gradients_against_finite_differences(ppo_state, rollout, ppo_config):
    host = jax.tree.map(np.asarray, (ppo_state.actor, ppo_state.value, rollout.replace(log_prob=None)))
    with jax.enable_x64(True):
        actor, value, data = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64) if x.dtype == np.float32 else x, host
        )
        batch = minibatch(ppo_state.replace(actor=actor), data, ppo_config)
        off = jnp.linspace(-0.4, 0.4, 48).at[24].set(0.05)
        batch = (batch[0], batch[1], batch[2] + off, batch[3], batch[4])
        hyper = ppo.Hyper()

        def total(params):
            return ppo.loss(params, batch, hyper, config=ppo_config)[0]

        check_grads(jax.jit(total), ((actor, value),), order=1, modes=["rev"], rtol=1e-6)


def test_statistics_take_the_rollout_in_after_the_update(ppo_state, rollout, update):
    new, metrics = update(ppo_state, rollout, jax.random.key(0), HYPER)
    expected = normalize.update(normalize.init(3), rollout.observation)
    chex.assert_trees_all_close(new.stats, expected, rtol=1e-6)
    assert new.step == 1 and new.opt.count == 2 * 4
    assert all(np.isfinite(x) for x in metrics.values())
    np.testing.assert_allclose(metrics["reward"], rollout.reward.mean(), rtol=1e-5)


def test_every_epoch_shuffles_and_hyper_parameters_do_not_recompile(ppo_state, rollout, update):
    one, _ = update(ppo_state, rollout, jax.random.key(0), HYPER)
    before = update._cache_size()
    other, _ = update(ppo_state, rollout, jax.random.key(1), HYPER)
    assert optax.tree.norm(optax.tree.sub(one.actor, other.actor)) > 0
    still, _ = update(ppo_state, rollout, jax.random.key(0), HYPER.replace(lr=jnp.float32(0)))
    chex.assert_trees_all_equal(still.actor, ppo_state.actor)
    assert update._cache_size() == before


def test_the_gradient_norm_is_cut(ppo_state, rollout, update):
    """Adam divides by the gradient's size, so the cut shows in its first moment."""
    loose = update(ppo_state, rollout, jax.random.key(0), HYPER.replace(lr=jnp.float32(0)))[0]
    tight_hyper = HYPER.replace(lr=jnp.float32(0), max_grad_norm=jnp.float32(1e-3))
    tight = update(ppo_state, rollout, jax.random.key(0), tight_hyper)[0]
    assert optax.tree.norm(tight.opt.mu) <= 1e-3 < optax.tree.norm(loose.opt.mu)


def test_a_rollout_that_does_not_split_is_refused(ppo_state, rollout, update):
    odd = jax.tree.map(lambda x: x[:5, :7], rollout)
    with pytest.raises(UserError, match="35 samples of a rollout do not split into 4 minibatches"):
        update(ppo_state, odd, jax.random.key(0), HYPER)


class Countdown(flax.struct.PyTreeNode):
    """N environments that count steps: odd ones end truly at 3, even ones by their time limit at 2."""

    observation: jax.Array
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_observation: jax.Array

    @classmethod
    def reset(cls, n, xp=jnp):
        zeros = xp.zeros(n, np.float32)
        tag = xp.arange(n, dtype=np.float32)
        observation = xp.stack([tag, zeros, zeros], -1)
        return cls(observation, zeros, xp.zeros(n, bool), xp.zeros(n, bool), observation)

    def step(self, action, xp=jnp):
        after = self.observation + xp.asarray([0.0, 1.0, 0.0], dtype=np.float32)
        even = self.observation[:, 0] % 2 == 0
        terminated, truncated = ~even & (after[:, 1] == 3), even & (after[:, 1] == 2)
        ended = (terminated | truncated)[:, None]
        start = after * xp.asarray([1.0, 0.0, 1.0], dtype=np.float32)
        return Countdown(xp.where(ended, start, after), action[:, 0], terminated, truncated, after)


def test_collecting_records_the_state_before_the_reset(ppo_state, ppo_config):
    collect = jax.jit(
        lambda state, env, key: ppo.collect(state, env, key, Countdown.step, config=ppo_config, length=6)
    )
    env, rollout = collect(ppo_state, Countdown.reset(4), jax.random.key(0))
    np.testing.assert_array_equal(rollout.observation[:, 0, 1], [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(rollout.final_observation[:, 0, 1], [1, 2, 1, 2, 1, 2])
    np.testing.assert_array_equal(rollout.observation[:, 1, 1], [0, 1, 2, 0, 1, 2])
    np.testing.assert_array_equal(rollout.truncated[:, 0], [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(rollout.terminated[:, 1], [0, 0, 1, 0, 0, 1])
    np.testing.assert_allclose(rollout.reward, jnp.tanh(rollout.pre_tanh[..., 0]), rtol=1e-5)
    assert env.observation.shape == (4, 3)


def test_host_and_device_collect_the_same_rollout(ppo_state, ppo_config):
    lanes = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]).astype(x.dtype), ppo_state)
    keys = jax.random.split(jax.random.key(0), 2)
    flat = Countdown.reset(8, xp=np)
    split = jax.tree.map(lambda x: jnp.asarray(x.reshape(2, 4, *x.shape[1:])), flat)
    device = jax.jit(
        jax.vmap(lambda s, e, k: ppo.collect(s, e, k, Countdown.step, config=ppo_config, length=5))
    )
    env, expected = device(lanes, split, keys)
    host_step = functools.partial(Countdown.step, xp=np)
    host_env, rollout = ppo.collect_host(lanes, flat, keys, host_step, config=ppo_config, length=5)
    chex.assert_trees_all_close(rollout, jax.device_get(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(host_env.observation.reshape(2, 4, 3), env.observation)
    fit = jax.jit(jax.vmap(functools.partial(ppo.update, config=ppo_config), in_axes=(0, 0, 0, None)))
    assert fit(lanes, rollout, keys, HYPER)[0].step.tolist() == [1, 1]
