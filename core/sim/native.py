"""The host backend: native MuJoCo on all cores, one model per environment; also "the real robot"."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping

import jax
import mujoco
import numpy as np
from mujoco import rollout

from core.errors import UserError
from core.sim import episode
from core.sim.episode import EnvState
from core.sim.gap import RealGap, Solver, command, draw_gap, gap_rows, resolve_gaps
from core.sim.task import Task, compile_model

__all__ = ["NativeSimulator"]


_where = jax.jit(episode.where)


@functools.lru_cache(maxsize=64)
def _functions(task, ranges):
    """`begin_episode` and `report` of a task, compiled once for all simulators of as many environments."""

    def draw(key, gap, model):
        return (gap if ranges is None else draw_gap(key, dict(ranges))), model

    begin = jax.jit(lambda key, gap, model: episode.begin_episode(task, key, gap, model, draw))
    return begin, jax.jit(lambda *world, **rest: episode.report(task, *world, **rest))


class NativeSimulator:
    """N environments of one task on native MuJoCo threads.

    One rollout call and one jitted call per control step. Every environment owns a model of a pool; a model
    is written in place (plus mj_setConst) when its environment's gap changes and never copied again. The
    methods are functions of their arguments: a checkpointed EnvState continues exactly, whatever the pool
    held. Everything runs on the host, also where JAX has an accelerator.

    Args:
      task: the environment.
      num_envs: N.
      gaps: None for the nominal model; a RealGap (leaves `[]` or `[N]`) for fixed dynamics; a dict of
        field -> (low, high) for a new draw per episode.
      solver: Solver() for the real side, None for the simulator.
      threads: of the rollout pool; None takes every core this process may use, at most N.
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
        self._nstate = mujoco.mj_stateSize(template, mujoco.mjtState.mjSTATE_FULLPHYSICS)
        # Sensors are read a nominal substep before the end, however fine the solver's own steps are.
        self._divisor = solver.timestep_divisor if solver else 1
        threads = min(threads or len(os.sched_getaffinity(0)), num_envs)
        self._rollout = rollout.Rollout(nthread=threads if threads > 1 else 0)
        self._data = [mujoco.MjData(template) for _ in range(threads)]

        self._models = [copy.copy(template) for _ in range(num_envs)]
        self._scratch = mujoco.MjData(template)
        self._held: RealGap | None = None
        self._rows: np.ndarray | None = None
        self._noisy = False

        self._gap, ranges = resolve_gaps(gaps, num_envs, np)
        self._draws = ranges is not None
        self._cpu = jax.local_devices(backend="cpu")[0]
        self._begin, self._report = _functions(task, tuple(sorted(ranges.items())) if self._draws else None)

    def reset(self, key: jax.Array) -> EnvState:
        """New episodes in all N environments, from one typed key."""
        n = self.num_envs
        state = episode.blank(
            self.task,
            physics=np.zeros((n, self._nstate)),
            model=np.arange(n, dtype=np.int32),
            gap=self._gap,
            key=jax.random.split(jax.device_put(key, self._cpu), n),
            xp=np,
        )
        state = self.restart(state, np.ones(n, bool))
        return state.replace(final_observation=state.observation)

    def step(self, state: EnvState, action) -> EnvState:
        """One control step; action `[N, A]`, clipped to [-1, 1]. UserError for a wrong shape or a NaN.

        Episodes that have ended just go on; see `auto_reset_step`.
        """
        action = self._checked(action)
        self._write(state.gap)
        ctrl, action_buffer = command(action, np.asarray(state.action_buffer), state.gap, xp=np)
        states, sensordata = self._simulate(
            self._models, state.physics, ctrl, self.task.substeps * self._divisor
        )
        physics = states[:, -1].copy()
        step_count = np.asarray(state.step_count) + np.int32(1)
        told = self._tell(physics, ctrl, sensordata[:, -self._divisor], state.gap, state.key, step_count)
        return state.replace(
            physics=physics,
            action_buffer=action_buffer,
            step_count=step_count,
            final_observation=told["observation"],
            **told,
        )

    def auto_reset_step(self, state: EnvState, action) -> EnvState:
        """`step`, then a new episode (and gap draw) wherever one ended.

        reward, terminated, truncated, success and final_observation are those of the step; observation is the
        first of the new episode.
        """
        state = self.step(state, action)
        ended = state.terminated | state.truncated
        return self.restart(state, ended) if ended.any() else state

    def restart(self, state: EnvState, mask) -> EnvState:
        """New episodes where `mask` `[N]`; of the last step's outputs only the observation changes."""
        mask = np.asarray(mask)
        chosen = np.flatnonzero(mask)
        key, gap, _, qpos, qvel = self._begin(state.key, state.gap, state.model)
        gap = episode.where(mask, jax.device_get(gap), state.gap, np) if self._draws else state.gap
        self._write(gap)
        physics = np.array(state.physics)
        physics[chosen] = 0.0
        nq, nv = qpos.shape[1], qvel.shape[1]
        physics[chosen, 1 : 1 + nq] = np.asarray(qpos)[chosen]
        physics[chosen, 1 + nq : 1 + nq + nv] = np.asarray(qvel)[chosen]
        key = _where(mask, key, state.key)
        step_count = np.where(mask, np.int32(0), state.step_count)
        ctrl = np.zeros((self.num_envs, self.task.action_size), np.float32)
        # One substep, then discarded: its sensors are those of the state before it, the initial one.
        sensordata = np.zeros((self.num_envs, self.task.nominal.nsensordata))
        models = [self._models[i] for i in chosen]
        sensordata[chosen] = self._simulate(models, physics[chosen], ctrl[chosen], 1)[1][:, 0]
        told = self._tell(physics, ctrl, sensordata, gap, key, step_count)
        return state.replace(
            physics=physics,
            gap=gap,
            action_buffer=np.where(mask[:, None, None], np.float32(0), state.action_buffer),
            step_count=step_count,
            key=key,
            observation=np.where(mask[:, None], told["observation"], state.observation),
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
        if gap is self._held:
            return
        rows = gap_rows(gap)
        stale = np.ones(len(rows), bool) if self._rows is None else (rows != self._rows).any(axis=1)
        for i in np.flatnonzero(stale):
            self.task.write_dynamics(self._models[i], self.task.nominal, RealGap(*rows[i].tolist()))
            mujoco.mj_setConst(self._models[i], self._scratch)
        self._held, self._rows, self._noisy = gap, rows, bool(np.any(gap.obs_noise))

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

    def _tell(self, physics, ctrl, sensordata, gap, key, step_count) -> dict[str, np.ndarray]:
        """The outputs of EnvState after a control step."""
        nq, nv = self.task.nominal.nq, self.task.nominal.nv
        told = self._report(
            physics[:, 1 : 1 + nq].astype(np.float32),
            physics[:, 1 + nq : 1 + nq + nv].astype(np.float32),
            ctrl,
            sensordata.astype(np.float32),
            obs_noise=gap.obs_noise if self._noisy else None,
            obs_bias=gap.obs_bias,
            key=key,
            step_count=step_count,
        )
        return {name: np.asarray(value) for name, value in vars(told).items()}
