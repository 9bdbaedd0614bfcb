"""From a config to the parts of a run: the task, the networks, and one agent per method."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from core import ranges
from core.config import flatten
from core.errors import UserError, nearest
from core.rl import sac
from core.rl.networks import Actor, Critic
from core.sim.task import Task
from robotics.sgft import model_based, pretrain, sac_agent, source, tasks
from robotics.sgft.agents import Agent
from robotics.sgft.dynamics import Dynamics
from robotics.sgft.ranges import CONFIG
from robotics.sgft.source import Networks

__all__ = ["Parts", "agent", "make", "validate"]

KINDS = ("model_based", "model_free")
STARTS = ("simulation", "random")


class Parts(NamedTuple):
    """What every method of a run shares: the task, pi_sim's and V_sim's networks, the seeds."""

    task: Task
    networks: Networks
    seeds: list[int]


def make(config: ConfigDict) -> Parts:
    """The shared parts of a run."""
    task = tasks.get(config.task)
    seeds = [config.seed + i for i in range(config.num_seeds)]
    return Parts(task, pretrain.networks(config.pretrain, task.action_size), seeds)


def agent(settings: ConfigDict, config: ConfigDict, parts: Parts) -> Agent:
    """The agent that `settings`, one entry of `config.agents`, describes."""
    if settings.kind == "model_based":
        return _model_based(settings, config, parts)
    return _model_free(settings, config, parts)


def _model_based(settings, config, parts):
    network = Dynamics(
        scale=parts.task.observation_step,
        hidden=tuple(settings.hidden),
        probabilistic=settings.probabilistic,
        adapter=tuple(settings.adapter),
    )
    names = (
        "members",
        "horizon",
        "candidates",
        "use_value",
        "pretrain_updates",
        "pretrain_batch",
        "updates",
        "real_batch",
        "sim_batch",
        "lr",
        "exploration",
    )
    return model_based.make(
        model_based.ModelBased(network, capacity=settings.steps, **{name: settings[name] for name in names}),
        value=functools.partial(source.sim_value, networks=parts.networks),
        default_action=functools.partial(source.policy_action, networks=parts.networks),
        reward=parts.task.reward_from_observation,
        gamma=config.gamma,
        action_size=parts.task.action_size,
    )


def _model_free(settings, config, parts):
    shared = config.sac
    horizon = max(settings.horizon, 1)
    actor = Actor(
        parts.task.action_size,
        tuple(config.pretrain.actor_features),
        nn.tanh,
        log_std_init=shared.log_std,
        train_log_std=False,
        horizon=horizon,
    )
    critic = Critic(shared.critics, tuple(shared.features), nn.relu, layer_norm=True, horizon=horizon)
    hyper = sac.Hyper.arrays(
        gamma=config.gamma,
        tau=shared.tau,
        actor_lr=settings.actor_lr,
        critic_lr=settings.lr,
        alpha_lr=shared.alpha_lr,
        target_entropy=-parts.task.action_size / 2,
        # A window of one step is plain regression on the shaped reward; 0 stands for the infinite horizon.
        bootstrap=settings.horizon != 1,
        backup_entropy=shared.backup_entropy,
    )
    rules = sac_agent.Rules(
        hyper=hyper,
        shaping=settings.shaping,
        scale=settings.shaping,
        from_simulation=settings.start == "simulation",
        prior_share=settings.prior_share,
        warmup_steps=settings.warmup_steps,
        log_std=shared.log_std,
        alpha=shared.alpha,
    )
    return sac_agent.make(
        sac_agent.ModelFree(
            actor,
            critic,
            batch=shared.batch,
            utd=shared.utd,
            policy_delay=shared.policy_delay,
            capacity=settings.steps,
            prefit_updates=settings.prefit_updates,
            subset=min(2, shared.critics),
            terminal_potential=config.terminal_potential,
        ),
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), rules),
    )


def validate(config: ConfigDict) -> None:
    """Raises UserError for what no run could work with, naming the key and what it may be."""
    task = tasks.get(config.task)
    task.gap(config.gap)
    ranges.check(config, CONFIG)
    source.check_transfer(
        value_gamma=task.gamma,
        gamma=config.gamma,
        value_size=task.observation_size,
        observation_size=task.observation_size,
    )
    _one_of("config.sim.backend", config.sim.backend, ("auto", "native", "mjx"))
    _one_of("config.terminal_potential", config.terminal_potential, ("zero", "keep"))
    refit = config.pretrain.refit
    if refit.keep > refit.horizon:
        raise UserError(
            f"config.pretrain.refit.keep={refit.keep} is more than the {refit.horizon} steps of "
            "config.pretrain.refit.horizon"
        )
    flat = flatten(config)
    _divides("pretrain.minibatches", ("pretrain.num_envs", "pretrain.unroll"), flat)
    _divides("sac.policy_delay", ("sac.utd", "block"), flat)
    _divides("block", ("evaluation.every",), flat)
    _one_of("config.deploy", config.deploy, tuple(config.agents))
    for name, settings in config.agents.items():
        key = f"config.agents.{name}"
        _one_of(f"{key}.kind", settings.kind, KINDS)
        lowest = 1 if settings.kind == "model_based" else 0
        if settings.horizon < lowest:
            means = "" if lowest else " (0 is the infinite horizon, without a window)"
            raise UserError(f"{key}.horizon={settings.horizon}: the window H must be at least 1{means}")
        if settings.kind == "model_free":
            _one_of(f"{key}.start", settings.start, STARTS)
            if settings.horizon > 0 and not settings.shaping:
                raise UserError(f"{key}: a window of H={settings.horizon} steps needs shaping=True")
        if not 1 <= settings.seeds <= config.num_seeds:
            raise UserError(f"{key}.seeds={settings.seeds} is not in 1..config.num_seeds={config.num_seeds}")
        _divides("evaluation.every", (f"agents.{name}.steps",), flat)


def _one_of(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{key}={value!r}{nearest(str(value), choices)}; one of {', '.join(choices)}")


def _divides(divisor: str, factors: tuple[str, ...], flat: dict[str, Any]) -> None:
    number = math.prod(flat[key] for key in factors)
    if number % flat[divisor]:
        product = " * ".join(f"config.{key}" for key in factors)
        raise UserError(f"{product} = {number} is not a multiple of config.{divisor} = {flat[divisor]}")
