"""SGFT-MB: learn the dynamics from real and simulated transitions, plan a short window, end it with V_sim."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from core.errors import UserError
from core.rl import replay
from core.rl.replay import Replay, Transition
from robotics.sgft import dynamics, planner
from robotics.sgft.agents import Agent
from robotics.sgft.dynamics import Dynamics, DynamicsState

__all__ = ["ModelBased", "ModelBasedState", "make"]

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ModelBased:
    """Settings of SGFT-MB, static under jit.

    Attributes:
      network: one member of the dynamics ensemble. members: how many.
      horizon: H, model steps of a plan, each with the same action. candidates: actions compared.
      use_value: False plans without V_sim (the ablation).
      pretrain_updates, pretrain_batch: of the model on simulated transitions, before the first real step.
      updates: of the model after each block of real steps, on `real_batch` real and `sim_batch` simulated
        transitions (real ones alone make it forget contact: see docs/methods/sgft.md).
      lr: Adam's. exploration: standard deviation of the Gaussian noise on the planned action.
      capacity: of the real replay.
    """

    network: Dynamics
    members: int = 3
    horizon: int = 3
    candidates: int = 128
    use_value: bool = True
    pretrain_updates: int = 10_000
    pretrain_batch: int = 256
    updates: int = 150
    real_batch: int = 128
    sim_batch: int = 128
    lr: float = 1e-3
    exploration: float = 0.3
    capacity: int = 10_000

    def __post_init__(self):
        if self.horizon < 1:
            raise UserError(f"the planning horizon H must be at least 1, not {self.horizon}")


class ModelBasedState(flax.struct.PyTreeNode):
    """Dynamics and the real transitions seen."""

    model: DynamicsState
    real: Replay

    def deployed(self) -> ModelBasedState:
        """The learned dynamics alone: what `explore` and `exploit` read."""
        return ModelBasedState(self.model.replace(opt_state=None), None)


def make(
    settings: ModelBased,
    *,
    value: Callable[[Any, Array], Array],
    default_action: Callable[[Any, Array], Array],
    reward: Callable[[Array], Array],
    gamma: float,
    action_size: int,
) -> Agent:
    """The agent.

    Args:
      value: `(source, observation [..., O]) -> [...]`, the frozen V_sim.
      default_action: `(source, observation [..., O]) -> [..., A]`, pi_sim.
      reward: `(observation [..., O]) -> [...]`, the known reward of the state entered.
      gamma: discount of V_sim.
      action_size: A.
    """
    network = settings.network

    def marked(transition, real):
        action = _mark(transition.action, real) if network.adapter else transition.action
        return transition.replace(action=action)

    def simulated(source, key, n):
        return marked(_rows(source.simulated.transition, key, n), 0.0)

    def init(key, source, options):
        del options
        init_key, train_key = jax.random.split(key)
        width = action_size + bool(network.adapter)
        model = dynamics.init(init_key, network=network, action_size=width, members=settings.members)
        model, _ = dynamics.train_block(
            model,
            train_key,
            lambda k: simulated(source, k, settings.pretrain_batch),
            settings.lr,
            network=network,
            n=settings.pretrain_updates,
        )
        example = jax.tree.map(lambda leaf: leaf[0], source.simulated.transition)
        return ModelBasedState(model, replay.init(example, settings.capacity))

    def act(state, source, observation, key):
        terminal = functools.partial(value, source) if settings.use_value else None

        def step(observation, action):
            action = _mark(action, 1.0) if network.adapter else action
            return dynamics.rollout_step(state.model.params, observation, action, network=network)

        return planner.plan(
            key,
            observation,
            default_action(source, observation),
            candidates=settings.candidates,
            step=step,
            reward=reward,
            value=terminal,
            members=settings.members,
            gamma=gamma,
            horizon=settings.horizon,
        )

    def explore(state, source, observation, key):
        plan_key, noise_key = jax.random.split(key)
        action = act(state, source, observation, plan_key)
        noise = settings.exploration * jax.random.normal(noise_key, action.shape)
        return jnp.clip(action + noise, -1.0, 1.0)

    def exploit(state, source, observation, key):
        # One state at a time: the candidates of one plan fill the cores, those of fifty leave the cache.
        keys = jax.random.split(key, observation.shape[0])
        return jax.lax.map(lambda x: act(state, source, *x), (observation, keys))

    def learn(state, source, experience, key):
        real = replay.add(state.real, experience.transition)

        def sample(key):
            real_key, sim_key = jax.random.split(key)
            mixed = (
                marked(replay.sample(real, real_key, settings.real_batch), 1.0),
                simulated(source, sim_key, settings.sim_batch),
            )
            return jax.tree.map(lambda *parts: jnp.concatenate(parts), *mixed)

        model, metrics = dynamics.train_block(
            state.model, key, sample, settings.lr, network=network, n=settings.updates
        )
        return ModelBasedState(model, real), metrics

    return Agent(init, explore, exploit, learn)


def _rows(transitions: Transition, key: Array, n: int) -> Transition:
    index = jax.random.randint(key, (n,), 0, transitions.reward.shape[0])
    return jax.tree.map(lambda leaf: leaf[index], transitions)


def _mark(action: Array, real: float) -> Array:
    """Appends to actions `[..., A]` whether they are real (1) or simulated (0)."""
    return jnp.concatenate([action, jnp.full((*action.shape[:-1], 1), real, action.dtype)], axis=-1)
