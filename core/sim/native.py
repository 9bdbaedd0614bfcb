"""The host backend: native MuJoCo on all cores, one model per environment; also "the real robot"."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping

import jax
import mujoco
import numpy as np
from mujoco import rollout

from core.errors import UserError
from core.sim import episode
from core.sim.episode import EnvState
from core.sim.gap import RealGap, Solver, broadcast_gap, check_fields, command, draw_gap, gap_rows
from core.sim.task import Task, compile_model

__all__ = ["NativeSimulator"]


class NativeSimulator:
    """N environments of one task on native MuJoCo threads.

    One rollout call and one jitted call per control step. Every environment owns a model of a pool that is
    written in place (plus mj_setConst) whenever its gap changes and never copied again. The methods are functions
    of their arguments: a checkpointed EnvState continues exactly, whatever the pool held.

    Args:
      task: the environment.
      num_envs: N.
      gaps: None for the nominal model; a RealGap (leaves `[]` or `[N]`) for fixed dynamics; a dict of
        field -> (low, high) for a new draw per episode.
      solver: Solver() for the real side, None for the simulator.
      threads: of the rollout pool; None takes every core this process may use.
    """

    def __init__(
        self,
        task: Task,
        num_envs: int,
        *,
        gaps: RealGap | Mapping[str, tuple[float, float]] | None = None,
        solver: Solver | None = None,
        threads: int | None = None,
    ):
        self.task = task
        self.num_envs = num_envs
        template = compile_model(task, solver)
        self._finer = solver.timestep_divisor if solver else 1
        self._models = [copy.copy(template) for _ in range(num_envs)]
        self._scratch = mujoco.MjData(template)
        self._written = np.full((num_envs, 0), np.nan)
        self._gap: RealGap | None = None
        threads = threads or len(os.sched_getaffinity(0))
        self._rollout = rollout.Rollout(nthread=threads if threads > 1 else 0)
        self._data = [mujoco.MjData(template) for _ in range(threads)]
        self._nstate = mujoco.mj_stateSize(template, mujoco.mjtState.mjSTATE_FULLPHYSICS)

        if isinstance(gaps, Mapping):
            check_fields(gaps)
            ranges = dict(gaps)
            self._first_gap = broadcast_gap(RealGap(), num_envs, np)

            def draw(key, gap, model):
                return draw_gap(key, ranges), model

        else:
            self._first_gap = broadcast_gap(gaps if gaps is not None else RealGap(), num_envs, np)
            draw = episode.keep
        self._redraws = draw is not episode.keep
        self._begin = jax.jit(lambda key, gap, model: episode.begin_episode(task, key, gap, model, draw))
        self._report = jax.jit(
            lambda *world, **rest: episode.report(task, *world, **rest),
        )

    def reset(self, key: jax.Array) -> EnvState:
        """New episodes in all N environments, from one typed key."""
        n = self.num_envs
        size = self.task.observation_size
        blank = EnvState(
            physics=np.zeros((n, self._nstate)),
            model=np.arange(n, dtype=np.int32),
            gap=self._first_gap,
            action_buffer=episode.empty_buffer(self.task, n, np),
            step_count=np.zeros(n, np.int32),
            key=jax.random.split(key, n),
            observation=np.zeros((n, size), np.float32),
            final_observation=np.zeros((n, size), np.float32),
            reward=np.zeros(n, np.float32),
            terminated=np.zeros(n, bool),
            truncated=np.zeros(n, bool),
            success=np.zeros(n, bool),
        )
        state = self.restart(blank, np.ones(n, bool))
        return state.replace(final_observation=state.observation)

    def step(self, state: EnvState, action) -> EnvState:
        """One control step; action `[N, A]`, clipped to [-1, 1]. UserError for a wrong shape or a NaN.

        Episodes that have ended just go on; see `auto_reset_step`.
        """
        action = self._checked(action)
        self._write(state.gap)
        ctrl, action_buffer = command(action, np.asarray(state.action_buffer), state.gap, xp=np)
        nstep = self.task.substeps * self._finer
        physics, sensordata = self._simulate(self._models, state.physics, ctrl, nstep)
        told = self._tell(physics[:, -1], ctrl, sensordata[:, -self._finer], state.gap, state)
        return state.replace(
            physics=physics[:, -1].copy(),
            action_buffer=action_buffer,
            step_count=told.step_count,
            key=told.key,
            observation=told.observation,
            final_observation=told.observation,
            reward=told.reward,
            terminated=told.terminated,
            truncated=told.truncated,
            success=told.success,
        )

    def auto_reset_step(self, state: EnvState, action) -> EnvState:
        """`step`, then a new episode (and gap draw) wherever one ended.

        reward, terminated, truncated, success and final_observation are those of the step; observation is the
        first of the new episode.
        """
        state = self.step(state, action)
        ended = np.asarray(state.terminated) | np.asarray(state.truncated)
        return self.restart(state, ended) if ended.any() else state

    def restart(self, state: EnvState, mask) -> EnvState:
        """New episodes where `mask` `[N]`; the outputs of the last step stay, but for the observation."""
        mask = np.asarray(mask)
        chosen = np.flatnonzero(mask)
        key, gap, _, qpos, qvel = self._begin(state.key, state.gap, state.model)
        gap = (
            episode.where(mask, jax.tree.map(np.asarray, gap), state.gap, np) if self._redraws else state.gap
        )
        self._write(gap)
        physics = np.array(state.physics)
        nq, nv = self.task.nominal.nq, self.task.nominal.nv
        physics[chosen] = 0.0
        physics[chosen, 1 : 1 + nq] = np.asarray(qpos)[chosen]
        physics[chosen, 1 + nq : 1 + nq + nv] = np.asarray(qvel)[chosen]
        ctrl = np.zeros((self.num_envs, self.task.action_size), np.float32)
        # Sensors after one substep are those of the state before it: the initial one. The substep is discarded.
        sensordata = np.zeros((self.num_envs, self.task.nominal.nsensordata))
        models = [self._models[i] for i in chosen]
        sensordata[chosen] = self._simulate(models, physics[chosen], ctrl[chosen], 1)[1][:, 0]
        told = self._tell(physics, ctrl, sensordata, gap, state.replace(key=key))
        return state.replace(
            physics=physics,
            gap=gap,
            action_buffer=np.where(mask[:, None, None], np.float32(0), state.action_buffer),
            step_count=np.where(mask, np.int32(0), state.step_count),
            key=episode.where(mask, told.key, state.key),
            observation=np.where(mask[:, None], told.observation, state.observation),
        )

    def _checked(self, action) -> np.ndarray:
        action = np.asarray(action, np.float32)
        wanted = (self.num_envs, self.task.action_size)
        if action.shape != wanted:
            raise UserError(f"action has shape {action.shape}, but {self.task.name} here takes {wanted}")
        if not np.isfinite(action).all():
            row = int(np.flatnonzero(~np.isfinite(action).all(axis=1))[0])
            raise UserError(f"action of environment {row} is not finite: {action[row]}; check the policy")
        return action

    def _write(self, gap: RealGap) -> None:
        """Makes the pool hold these gaps; free if it already does."""
        if gap is self._gap:
            return
        rows = gap_rows(gap)
        if rows.shape != self._written.shape:
            self._written = np.full(rows.shape, np.nan)
        for i in np.flatnonzero((rows != self._written).any(axis=1)):
            self.task.write_dynamics(self._models[i], self.task.nominal, RealGap(*rows[i].tolist()))
            mujoco.mj_setConst(self._models[i], self._scratch)
        self._written, self._gap = rows, gap

    def _simulate(self, models, physics, ctrl, nstep):
        """Physics `[n, nstep, nstate]` and sensordata `[n, nstep, nsensordata]` under a held command."""
        n = len(models)
        states = np.empty((n, nstep, self._nstate))
        sensordata = np.empty((n, nstep, self.task.nominal.nsensordata))
        self._rollout.rollout(
            models,
            self._data,
            np.ascontiguousarray(physics, np.float64),
            np.repeat(np.asarray(ctrl, np.float64)[:, None], nstep, axis=1),
            skip_checks=True,
            nstep=nstep,
            state=states,
            sensordata=sensordata,
        )
        return states, sensordata

    def _tell(self, physics, ctrl, sensordata, gap, state):
        nq, nv = self.task.nominal.nq, self.task.nominal.nv
        return self._report(
            physics[:, 1 : 1 + nq].astype(np.float32),
            physics[:, 1 + nq : 1 + nq + nv].astype(np.float32),
            ctrl,
            sensordata.astype(np.float32),
            obs_noise=gap.obs_noise,
            obs_bias=gap.obs_bias,
            key=state.key,
            step_count=state.step_count,
        )
