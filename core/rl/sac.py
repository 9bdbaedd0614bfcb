"""Soft actor-critic as pure functions: ensemble critic, optional window index, many updates in one scan.

Everything is for one lane (seed); state, batch, key and every scalar in `Hyper` may be `vmap`ped over more.
Soft actor-critic: Haarnoja et al. (2018). Random target subsets: Chen et al. (2021, REDQ). The window index
`steps_to_go` and the switch `bootstrap` serve SGFT (Yin et al., 2025).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from core.errors import UserError
from core.nn import split_members, stack_members
from core.rl import distributions
from core.rl.networks import Actor, Critic, apply_critic, forward

__all__ = [
    "Batch",
    "Config",
    "Hyper",
    "SACState",
    "act",
    "actor_loss",
    "bellman_target",
    "critic_loss",
    "critic_target",
    "draw",
    "init",
    "temperature_loss",
    "update",
    "update_block",
]

Array = jax.Array
Params = Any
_adam = optax.scale_by_adam()


@dataclasses.dataclass(frozen=True)
class Config:
    """What shapes the program, hashable, static under jit.

    Attributes:
      actor, critic: the modules; equal `horizon`.
      subset: how many random target members the critic target takes the minimum of.
      policy_objective: the actor ascends the "mean" or the "min" of the online ensemble.
      unroll: `update_block` runs the ensemble's members one by one, not batched: the same numbers, faster
        on CPU, slower to compile. None: on CPU only.
    """

    actor: Actor
    critic: Critic
    subset: int = 2
    policy_objective: Literal["mean", "min"] = "mean"
    unroll: bool | None = None

    def __post_init__(self):
        if not 1 <= self.subset <= self.critic.ensemble:
            raise UserError(f"subset={self.subset} must lie in 1..{self.critic.ensemble}, critic.ensemble")
        if self.actor.horizon != self.critic.horizon:
            raise UserError(f"actor.horizon={self.actor.horizon} but critic.horizon={self.critic.horizon}")


class Hyper(flax.struct.PyTreeNode):
    """Scalars `[]` that may change or be swept without a new compile; switches are 0 or 1.

    Attributes:
      gamma: discount. tau: share of the online critic mixed into the target after each critic update.
      actor_lr, critic_lr, alpha_lr: Adam step sizes; alpha_lr 0 fixes the temperature.
      target_entropy: entropy in nats of tanh(u) the temperature steers to.
      bootstrap: 0 makes the critic regress on the given reward alone (SGFT with a window of 1).
      backup_entropy: 1 puts -alpha * log prob of the next action into the target.
      actor_enabled: 0 freezes actor and temperature (critic warm-up).
    """

    gamma: Any = 0.99
    tau: Any = 0.005
    actor_lr: Any = 3e-4
    critic_lr: Any = 3e-4
    alpha_lr: Any = 3e-4
    target_entropy: Any = -1.0
    bootstrap: Any = 1.0
    backup_entropy: Any = 1.0
    actor_enabled: Any = 1.0

    @classmethod
    def arrays(cls, **values: float | Array) -> Hyper:
        """Hyper with float32 arrays in it, ready to stack and `vmap`; unnamed fields take the defaults."""
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), cls(**values))


class Batch(flax.struct.PyTreeNode):
    """Transitions `[B, ...]`; `reward` is final (shaping is the caller's), `terminated` means true ends only.

    `steps_to_go` (int, 1..H) only with networks of horizon H > 1; `weight` scales each sample's critic loss.
    """

    observation: Array
    action: Array
    reward: Array
    next_observation: Array
    terminated: Array
    steps_to_go: Array | None = None
    weight: Array | None = None


class SACState(flax.struct.PyTreeNode):
    """Everything that training changes; `step` `[]` counts critic updates, critics are `[ensemble, ...]`."""

    step: Array
    actor: Params
    critic: Params
    target: Params
    log_alpha: Array
    actor_opt: optax.OptState
    critic_opt: optax.OptState
    alpha_opt: optax.OptState


class Draws(NamedTuple):
    """Random numbers of one update: noise `[B, A]` of both policy samples, target members `[subset]`."""

    noise: Array
    next_noise: Array
    members: Array | None


def init(
    key: Array,
    *,
    config: Config,
    observation_size: int,
    alpha: float = 0.1,
    actor: Params | None = None,
    critic: Params | None = None,
) -> SACState:
    """Fresh state, or one that starts from pretrained variables `actor`, `critic`; target = critic."""
    actor_key, critic_key = jax.random.split(key)
    observation = jnp.zeros((1, observation_size))
    action = jnp.zeros((1, config.actor.action_size))
    steps_to_go = jnp.ones((1,), jnp.int32)
    if actor is None:
        actor = config.actor.init(actor_key, observation, steps_to_go)
    if critic is None:
        critic = config.critic.init(critic_key, observation, action, steps_to_go)
    log_alpha = jnp.log(jnp.float32(alpha))
    return SACState(
        step=jnp.int32(0),
        actor=actor,
        critic=critic,
        target=jax.tree.map(jnp.array, critic),
        log_alpha=log_alpha,
        actor_opt=_adam.init(actor),
        critic_opt=_adam.init(critic),
        alpha_opt=_adam.init(log_alpha),
    )


def act(
    actor: Params, observation: Array, key: Array | None, *, config: Config, steps_to_go: Array | None = None
) -> Array:
    """Action `[..., A]` in [-1, 1] for observation `[..., D]`: a sample, or tanh(mean) with `key=None`.

    With a horizon H > 1 and no `steps_to_go`, acts as at the start of a window, h = H (receding horizon).
    """
    if steps_to_go is None:
        steps_to_go = jnp.full(observation.shape[:-1], config.actor.horizon)
    mean, log_std = forward(config.actor, actor, observation, steps_to_go)
    return distributions.mode(mean) if key is None else distributions.sample(key, mean, log_std)[0]


def bellman_target(
    reward: Array,
    terminated: Array,
    next_value: Array,
    *,
    gamma: Array | float,
    bootstrap: Array | float = 1.0,
    steps_to_go: Array | None = None,
) -> Array:
    """y = r + gamma * (1 - terminated) * bootstrap * [steps_to_go > 1] * next_value, all `[B]`.

    Where a factor is 0, `next_value` is not read: neither its value (NaN included) nor its gradient leaks.
    Sec. 2.4 of the SGFT specification; `steps_to_go=None` is the infinite horizon.
    """
    continues = ~terminated & (jnp.asarray(bootstrap) > 0)
    if steps_to_go is not None:
        continues &= steps_to_go > 1
    return reward + jnp.where(continues, gamma * next_value, 0)


def _subset(target: Params, members: Array, size: int) -> Params:
    if isinstance(target, tuple):
        return split_members(_subset(stack_members(target), members, size), size)
    return jax.tree.map(lambda leaf: leaf[members], target)


def critic_target(
    target: Params,
    actor: Params,
    log_alpha: Array,
    batch: Batch,
    draws: Draws,
    hyper: Hyper,
    *,
    config: Config,
) -> Array:
    """`bellman_target` `[B]` of the minimum over a target subset at (s', a' ~ actor, steps_to_go - 1)."""
    next_steps = None if batch.steps_to_go is None else batch.steps_to_go - 1
    mean, log_std = forward(config.actor, actor, batch.next_observation, next_steps)
    action, pre_tanh = distributions.squash(draws.next_noise, mean, log_std)
    if draws.members is not None:
        target = _subset(target, draws.members, config.subset)
    critic = config.critic.clone(ensemble=config.subset)
    next_value = jnp.min(apply_critic(critic, target, batch.next_observation, action, next_steps), axis=0)
    entropy = -jnp.exp(log_alpha) * distributions.log_prob(pre_tanh, mean, log_std)
    next_value += jnp.where(hyper.backup_entropy > 0, entropy, 0)
    return bellman_target(
        batch.reward,
        batch.terminated,
        next_value,
        gamma=hyper.gamma,
        bootstrap=hyper.bootstrap,
        steps_to_go=batch.steps_to_go,
    )


def critic_loss(critic: Params, target: Array, batch: Batch, *, config: Config) -> tuple[Array, Array]:
    """L_Q = mean_e mean_b (Q_e(s, a) - y)^2 for y = `target` `[B]`; `weight` makes mean_b a weighted mean.

    Returns (loss `[]`, Q `[E, B]`). No gradient flows into `target`.
    """
    q = apply_critic(config.critic, critic, batch.observation, batch.action, batch.steps_to_go)
    squared = jnp.mean((q - jax.lax.stop_gradient(target)) ** 2, axis=0)
    if batch.weight is None:
        return jnp.mean(squared), q
    return jnp.sum(batch.weight * squared) / jnp.maximum(jnp.sum(batch.weight), 1e-8), q


def actor_loss(
    actor: Params, critic: Params, log_alpha: Array, batch: Batch, noise: Array, *, config: Config
) -> tuple[Array, Array]:
    """L_pi = E[alpha * log pi(a|s) - mean_e Q_e(s, a)] (or min_e), a reparameterised by `noise` `[B, A]`.

    Returns (loss `[]`, log prob `[B]`).
    """
    mean, log_std = forward(config.actor, actor, batch.observation, batch.steps_to_go)
    action, pre_tanh = distributions.squash(noise, mean, log_std)
    log_prob = distributions.log_prob(pre_tanh, mean, log_std)
    q = apply_critic(config.critic, critic, batch.observation, action, batch.steps_to_go)
    q = jnp.mean(q, axis=0) if config.policy_objective == "mean" else jnp.min(q, axis=0)
    return jnp.mean(jnp.exp(jax.lax.stop_gradient(log_alpha)) * log_prob - q), log_prob


def temperature_loss(log_alpha: Array, log_prob: Array, target_entropy: Array | float) -> Array:
    """L_alpha = -log_alpha * mean(log pi + target_entropy), `[]`; no gradient flows into `log_prob` `[B]`."""
    return -log_alpha * jnp.mean(jax.lax.stop_gradient(log_prob) + target_entropy)


def draw(key: Array, lead: tuple[int, ...], batch_size: int, config: Config) -> Draws:
    """Random numbers of `lead` updates at once, which is cheaper than one generator call per scan step.

    Returns Draws of `[*lead, B, A]` noise and, where `subset` is smaller than the ensemble, `[*lead, subset]`
    members.
    """
    noise_key, member_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, (*lead, 2, batch_size, config.actor.action_size))
    members = None
    if config.subset < config.critic.ensemble:
        scores = jax.random.uniform(member_key, (*lead, config.critic.ensemble))
        members = jax.lax.top_k(scores, config.subset)[1]
    return Draws(noise[..., 0, :, :], noise[..., 1, :, :], members)


def _adam_step(gradient, opt, params, lr):
    direction, opt = _adam.update(gradient, opt)
    return jax.tree.map(lambda p, d: p - (lr * d).astype(p.dtype), params, direction), opt


def _critic_step(state: SACState, batch: Batch, draws: Draws, hyper: Hyper, config: Config):
    y = critic_target(state.target, state.actor, state.log_alpha, batch, draws, hyper, config=config)
    (loss, q), gradient = jax.value_and_grad(critic_loss, has_aux=True)(state.critic, y, batch, config=config)
    critic, critic_opt = _adam_step(gradient, state.critic_opt, state.critic, hyper.critic_lr)
    target = jax.tree.map(lambda t, c: t + hyper.tau * (c - t), state.target, critic)
    metrics = {"critic_loss": loss, "q": jnp.mean(q), "target": jnp.mean(y)}
    return state.replace(step=state.step + 1, critic=critic, target=target, critic_opt=critic_opt), metrics


def _policy_step(state: SACState, batch: Batch, noise: Array, hyper: Hyper, config: Config):
    (loss, log_prob), gradient = jax.value_and_grad(actor_loss, has_aux=True)(
        state.actor, state.critic, state.log_alpha, batch, noise, config=config
    )
    alpha_loss, alpha_gradient = jax.value_and_grad(temperature_loss)(
        state.log_alpha, log_prob, hyper.target_entropy
    )
    actor, actor_opt = _adam_step(gradient, state.actor_opt, state.actor, hyper.actor_lr)
    log_alpha, alpha_opt = _adam_step(alpha_gradient, state.alpha_opt, state.log_alpha, hyper.alpha_lr)
    new = state.replace(actor=actor, actor_opt=actor_opt, log_alpha=log_alpha, alpha_opt=alpha_opt)
    enabled = hyper.actor_enabled > 0
    state = jax.tree.map(lambda a, b: jnp.where(enabled, a, b), new, state)
    metrics = {
        "actor_loss": loss,
        "alpha_loss": alpha_loss,
        "alpha": jnp.exp(state.log_alpha),
        "entropy": -jnp.mean(log_prob),
    }
    return state, metrics


def _map_critic(state: SACState, f: Callable[[Params], Params]) -> SACState:
    opt = state.critic_opt
    return state.replace(
        critic=f(state.critic), target=f(state.target), critic_opt=opt._replace(mu=f(opt.mu), nu=f(opt.nu))
    )


def update(
    state: SACState, batch: Batch, key: Array, hyper: Hyper, *, config: Config
) -> tuple[SACState, dict[str, Array]]:
    """One critic update, then one actor and temperature update, on `batch` `[B]`; metrics are `[]`."""
    draws = draw(key, (), batch.reward.shape[0], config)
    state, critic_metrics = _critic_step(state, batch, draws, hyper, config)
    state, policy_metrics = _policy_step(state, batch, draws.noise, hyper, config)
    return state, critic_metrics | policy_metrics


def update_block(
    state: SACState,
    key: Array,
    sample: Callable[[Array], Batch],
    hyper: Hyper,
    *,
    config: Config,
    n: int,
    policy_delay: int = 1,
) -> tuple[SACState, dict[str, Array]]:
    """`n` critic updates in one scan; actor and temperature follow after every `policy_delay` of them.

    Args:
      sample: key -> Batch `[B]`; called once under `vmap` for all `n` batches, so that they (and any network
        it runs) are computed in one piece before the scan.
      n: number of critic updates, a multiple of `policy_delay`.
      policy_delay: 0 trains the critic alone.

    Returns:
      state and metrics averaged over the block.
    """
    delay = policy_delay or n
    if n < 1 or n % delay:
        raise UserError(f"a block of {n} critic updates is not a multiple of policy_delay={policy_delay}")
    sample_key, draw_key = jax.random.split(key)
    batches = jax.vmap(sample)(jax.random.split(sample_key, n))
    draws = draw(draw_key, (n,), batches.reward.shape[1], config)
    xs = jax.tree.map(lambda x: x.reshape(n // delay, delay, *x.shape[1:]), (batches, draws))

    def critic_step(state, x):
        batch, draws = x
        return _critic_step(state, batch, draws, hyper, config)

    def step(state, x):
        state, metrics = jax.lax.scan(critic_step, state, x)
        if policy_delay:
            batch, draw = jax.tree.map(lambda leaf: leaf[-1], x)
            state, policy_metrics = _policy_step(state, batch, draw.noise, hyper, config)
            metrics |= policy_metrics
        return state, metrics

    unroll = config.unroll if config.unroll is not None else jax.default_backend() == "cpu"
    if unroll:
        state = _map_critic(state, lambda stacked: split_members(stacked, config.critic.ensemble))
    state, metrics = jax.lax.scan(step, state, xs)
    if unroll:
        state = _map_critic(state, stack_members)
    return state, jax.tree.map(jnp.mean, metrics)
