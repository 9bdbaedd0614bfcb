"""SGFT-SAC and its model-free baselines: one agent, told apart by a few traced switches.

| method           | start  | reward | horizon        | simulated data          |
|------------------|--------|--------|----------------|-------------------------|
| SGFT-SAC         | pi_sim | shaped | H (a window)   | to pre-fit the critic   |
| PBRS-SAC         | pi_sim | shaped | infinite       | to pre-fit the critic   |
| SAC fine-tuning  | pi_sim | raw    | infinite       | to pre-fit the critic   |
| SAC from scratch | random | raw    | infinite       | none                    |
| RLPD             | random | raw    | infinite       | half of every batch     |
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from core.errors import UserError
from core.rl import normalize, replay, sac
from core.rl.networks import Actor, Critic, add_steps_to_go, reset_log_std
from core.rl.normalize import RunningStats
from core.rl.replay import Replay
from robotics.sgft.agents import Agent
from robotics.sgft.shaping import shaped_reward
from robotics.sgft.source import Experience

__all__ = ["ModelFree", "ModelFreeState", "Rules", "make"]

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ModelFree:
    """What shapes the program, static under jit; methods that share it share one compile.

    Attributes:
      actor, critic: the modules; a window of H > 1 steps gives both `horizon` H.
      batch: transitions of one critic update. utd: critic updates for each real step.
      policy_delay: critic updates for each actor update.
      capacity: of the real replay.
      prefit_updates: of the critic on simulated transitions before the first real step, actor frozen.
      subset: members of the target ensemble that a target takes the minimum of.
      terminal_potential: "zero" or "keep", see `shaped_reward`.
    """

    actor: Actor
    critic: Critic
    batch: int = 128
    utd: int = 4
    policy_delay: int = 1
    capacity: int = 10_000
    prefit_updates: int = 0
    subset: int = 2
    terminal_potential: str = "zero"


class Rules(flax.struct.PyTreeNode):
    """Scalars `[]` that tell the methods apart; switches are 0 or 1.

    Attributes:
      hyper: of core.rl.sac; `bootstrap` 0 is the window of one step.
      shaping: 1 trains on r + gamma V_sim(s') - V_sim(s), 0 on r.
      scale: 1 divides the reward by its running standard deviation (shaped rewards are tiny).
      from_simulation: 1 starts the actor as pi_sim, 0 at random.
      prior_share: share of each batch that comes from D_sim.
      warmup_steps: real steps before the actor moves. log_std: where the actor's starts. alpha: temperature.
    """

    hyper: sac.Hyper
    shaping: Any = 1.0
    scale: Any = 1.0
    from_simulation: Any = 1.0
    prior_share: Any = 0.0
    warmup_steps: Any = 200.0
    log_std: Any = -1.2
    alpha: Any = 0.002


class ModelFreeState(flax.struct.PyTreeNode):
    """SAC, the real replay, statistics `[1]` of the (shaped) reward, real steps so far, and the rules."""

    sac: sac.SACState
    real: Replay
    reward_stats: RunningStats
    steps: Array
    rules: Rules

    def deployed(self) -> ModelFreeState:
        """The actor alone: what `explore` and `exploit` read."""
        rest = dict.fromkeys(("critic", "target", "actor_opt", "critic_opt", "alpha_opt"))
        return ModelFreeState(self.sac.replace(**rest), None, None, self.steps, self.rules)


def make(settings: ModelFree, rules: Rules) -> Agent:
    """The agent; `settings` and the networks of `source` must agree in the actor's layout."""
    if settings.actor.horizon < 1:
        raise UserError(f"the window H must be at least 1, not {settings.actor.horizon}")
    explore, exploit, learn = _functions(dataclasses.replace(settings, prefit_updates=0))
    return Agent(functools.partial(_init, settings=settings), explore, exploit, learn, rules)


def training_reward(experience: Experience, rules: Rules, settings: ModelFree) -> Array:
    """What the critic learns, unscaled, `[...]`: Eq. 1 where `rules.shaping` is 1, else the raw reward."""
    transition = experience.transition
    shaped = shaped_reward(
        transition.reward,
        experience.value,
        experience.next_value,
        transition.terminated,
        gamma=rules.hyper.gamma,
        terminal_potential=settings.terminal_potential,
    )
    return jnp.where(rules.shaping > 0, shaped, transition.reward)


def _sac_config(settings):
    return sac.Config(settings.actor, settings.critic, subset=settings.subset)


def _batch(experience, source, rules, reward_stats, key, settings):
    transition = experience.transition
    variance = reward_stats.m2[0] / jnp.maximum(reward_stats.count, 1.0)
    scale = jnp.where((rules.scale > 0) & (reward_stats.count > 1), jnp.sqrt(variance + 1e-8), 1.0)
    horizon = settings.actor.horizon
    steps_to_go = None
    if horizon > 1:
        steps_to_go = jax.random.randint(key, transition.reward.shape, 1, horizon + 1)
    return sac.Batch(
        observation=normalize.apply(source.stats, transition.observation),
        action=transition.action,
        reward=training_reward(experience, rules, settings) / scale,
        next_observation=normalize.apply(source.stats, transition.next_observation),
        terminated=transition.terminated,
        steps_to_go=steps_to_go,
    )


def _observe_reward(stats, experience, rules, settings):
    return normalize.update(stats, training_reward(experience, rules, settings)[:, None])


def _init(key, source, rules, *, settings):
    config = _sac_config(settings)
    sac_key, prefit_key = jax.random.split(key)
    size = source.simulated.transition.observation.shape[-1]
    state = sac.init(sac_key, config=config, observation_size=size, alpha=1.0)
    simulated = add_steps_to_go(source.actor, settings.actor.horizon)
    actor = jax.tree.map(lambda a, b: jnp.where(rules.from_simulation > 0, a, b), simulated, state.actor)
    actor = reset_log_std(actor, rules.log_std)
    state = state.replace(actor=actor, log_alpha=jnp.log(jnp.asarray(rules.alpha, jnp.float32)))
    stats = normalize.init(1)
    if settings.prefit_updates:
        stats = _observe_reward(stats, source.simulated, rules, settings)
        frozen = rules.hyper.replace(actor_enabled=0.0)

        def sample(key):
            row_key, window_key = jax.random.split(key)
            rows = _draw(source.simulated, row_key, settings.batch)
            return _batch(rows, source, rules, stats, window_key, settings)

        state, _ = sac.update_block(
            state, prefit_key, sample, frozen, config=config, n=settings.prefit_updates, policy_delay=0
        )
    example = jax.tree.map(lambda leaf: leaf[0], source.simulated)
    return ModelFreeState(state, replay.init(example, settings.capacity), stats, jnp.int32(0), rules)


def _draw(experience, key, n):
    index = jax.random.randint(key, (n,), 0, experience.value.shape[0])
    return jax.tree.map(lambda leaf: leaf[index], experience)


@functools.lru_cache(maxsize=32)
def _functions(settings):
    config = _sac_config(settings)

    def explore(state, source, observation, key):
        return sac.act(state.sac.actor, normalize.apply(source.stats, observation), key, config=config)

    def exploit(state, source, observation, key):
        del key
        return sac.act(state.sac.actor, normalize.apply(source.stats, observation), None, config=config)

    def learn(state, source, experience, key):
        rules = state.rules
        real = replay.add(state.real, experience)
        stats = _observe_reward(state.reward_stats, experience, rules, settings)
        added = experience.value.shape[0]
        steps = state.steps + added
        moving = (steps > rules.warmup_steps).astype(jnp.float32)
        hyper = rules.hyper.replace(actor_enabled=rules.hyper.actor_enabled * moving)
        prior = jnp.arange(settings.batch) < jnp.round(rules.prior_share * settings.batch)

        def sample(key):
            real_key, prior_key, window_key = jax.random.split(key, 3)
            rows = replay.sample(real, real_key, settings.batch)
            other = _draw(source.simulated, prior_key, settings.batch)
            rows = jax.tree.map(
                lambda a, b: jnp.where(prior.reshape(-1, *[1] * (a.ndim - 1)), b, a), rows, other
            )
            return _batch(rows, source, rules, stats, window_key, settings)

        new, metrics = sac.update_block(
            state.sac,
            key,
            sample,
            hyper,
            config=config,
            n=settings.utd * added,
            policy_delay=settings.policy_delay,
        )
        return ModelFreeState(new, real, stats, steps, rules), metrics

    return explore, exploit, learn
