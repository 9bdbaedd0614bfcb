"""Simulators that are pure functions throughout: what MJX and closed-form environments share."""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from core.errors import UserError
from core.sim import episode
from core.sim.episode import EnvState
from core.sim.gap import RealGap, command
from core.sim.task import Task

__all__ = ["PureSimulator", "World"]


class World(flax.struct.PyTreeNode):
    """What a task's functions see of N worlds at one moment: qpos, qvel and sensordata, each `[N, ..]`."""

    qpos: jax.Array
    qvel: jax.Array
    sensordata: jax.Array


class PureSimulator:
    """N environments whose methods are pure, under jit, vmap, pmap, lax.scan and a mesh sharded over `[N]`.

    Args:
      task, num_envs: the environment and N.
      gap, model: the dynamics `[N]` to begin with and their rows in the model pool `[N]`.
      draw: `(key, gap, model) -> (gap, model)` for one world, at every reset.
      place: `(qpos, qvel) -> physics`, all `[N, ..]`, for a new episode.
      sense: `(physics, gap, model) -> World` without moving.
      integrate: `(physics, ctrl, gap, model) -> (physics, World)` over one control step.
    """

    def __init__(
        self,
        task: Task,
        num_envs: int,
        *,
        gap: RealGap,
        model: jax.Array,
        draw: Callable,
        place: Callable,
        sense: Callable,
        integrate: Callable,
    ):
        self.task = task
        self.num_envs = num_envs
        self._gap = gap
        self._model = model
        self._draw = draw
        self._place = place
        self._sense = sense
        self._integrate = integrate

    def reset(self, key: jax.Array) -> EnvState:
        """New episodes in all N environments, from one typed key."""
        n = self.num_envs
        physics = self._place(jnp.zeros((n, self.task.nominal.nq)), jnp.zeros((n, self.task.nominal.nv)))
        keys = jax.random.split(key, n)
        state = episode.blank(self.task, physics=physics, model=self._model, gap=self._gap, key=keys)
        state = self.restart(state, jnp.ones(n, bool))
        return state.replace(final_observation=state.observation)

    def step(self, state: EnvState, action: jax.Array) -> EnvState:
        """One control step; action `[N, A]`, clipped to [-1, 1]. UserError for a wrong shape.

        Episodes that have ended just go on; see `auto_reset_step`.
        """
        wanted = (len(state.step_count), self.task.action_size)
        if action.shape != wanted:
            raise UserError(f"action has shape {action.shape}, but {self.task.name} here takes {wanted}")
        ctrl, action_buffer = command(action, state.action_buffer, state.gap)
        physics, world = self._integrate(state.physics, ctrl, state.gap, state.model)
        state = state.replace(physics=physics, action_buffer=action_buffer, step_count=state.step_count + 1)
        told = self._tell(state, ctrl, world)
        return state.replace(**vars(told), final_observation=told.observation)

    def auto_reset_step(self, state: EnvState, action: jax.Array) -> EnvState:
        """`step`, then a new episode (and gap draw) wherever one ended.

        reward, terminated, truncated, success and final_observation are those of the step; observation is the
        first of the new episode. Steps in which no episode ended skip the reset, except under an outer vmap.
        """
        state = self.step(state, action)
        ended = state.terminated | state.truncated
        return jax.lax.cond(ended.any(), self.restart, lambda state, _: state, state, ended)

    def restart(self, state: EnvState, mask: jax.Array) -> EnvState:
        """New episodes where `mask` `[N]`; of the last step's outputs only the observation changes."""
        key, gap, model, qpos, qvel = episode.begin_episode(
            self.task, state.key, state.gap, state.model, self._draw
        )
        begun = state.replace(
            physics=self._place(qpos, qvel),
            model=model,
            gap=gap,
            action_buffer=jnp.zeros_like(state.action_buffer),
            step_count=jnp.zeros_like(state.step_count),
            key=key,
        )
        ctrl = jnp.zeros((len(mask), self.task.action_size), jnp.float32)
        told = self._tell(begun, ctrl, self._sense(begun.physics, gap, model))
        return episode.where(mask, begun.replace(observation=told.observation), state)

    def _tell(self, state: EnvState, ctrl, world: World) -> episode.Report:
        return episode.report(
            self.task,
            world.qpos,
            world.qvel,
            ctrl,
            world.sensordata,
            obs_noise=state.gap.obs_noise,
            obs_bias=state.gap.obs_bias,
            key=state.key,
            step_count=state.step_count,
        )
