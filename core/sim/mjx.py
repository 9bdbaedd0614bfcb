"""The accelerator backend: MuJoCo XLA, with domain randomisation from a pool of model leaves."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from core.sim.gap import RealGap, Solver, gap_rows, resolve_gaps, sample_gap
from core.sim.pure import PureSimulator, World
from core.sim.task import Task, compile_model

# MJX prints that its optional warp implementation is missing; the jax one is used here.
with contextlib.redirect_stdout(io.StringIO()):
    from mujoco import mjx

__all__ = ["MjxSimulator"]


class MjxSimulator(PureSimulator):
    """N environments of one task on MJX; every method is pure (jit, vmap, lax.scan, sharded over
    environments).

    Randomised models are built on the host, by the same `write_dynamics` and mj_setConst as the native
    backend's, as a pool of stacked leaves; each reset draws a row. Physics is float32 `[N, nstate]`: time,
    qpos, qvel, act; as on the native backend the constraint solver starts every control step from zero.

    Args:
      task: the environment.
      num_envs: N.
      gaps: None for the nominal model; a RealGap (leaves `[]` or `[N]`) for fixed dynamics; a dict of
        field -> (low, high) for a new draw per episode.
      pool_size: how many models to draw from when `gaps` is a dict; None makes N.
      pool_seed: seed of the pool's gaps; the same pool is needed to resume a saved state.
      solver: numerical changes of the real side, of which MJX has no noslip; None for the simulator.
    """

    def __init__(
        self,
        task: Task,
        num_envs: int,
        *,
        gaps: RealGap | Mapping[str, tuple[float, float]] | None = None,
        pool_size: int | None = None,
        pool_seed: int = 0,
        solver: Solver | None = None,
    ):
        gap, ranges = resolve_gaps(gaps, num_envs)
        if ranges is None:
            pool = gap
            rows, model = np.unique(gap_rows(gap), axis=0, return_inverse=True)
        else:
            pool = sample_gap(jax.random.key(pool_seed), ranges, pool_size or num_envs)
            rows, model = gap_rows(pool), np.zeros(num_envs, int)

        template = compile_model(task, solver)
        stacked = _stack_fields(task, template, rows)
        # put_model lays out friction rows only for joints with dry friction: those of any model in the pool.
        if "dof_frictionloss" in stacked:
            template.dof_frictionloss[:] = stacked["dof_frictionloss"].max(axis=0)
        base = mjx.put_model(template, impl="jax")
        data = mjx.make_data(template, impl="jax")
        leaves = {name: jnp.asarray(leaf, getattr(base, name).dtype) for name, leaf in stacked.items()}
        divisor = solver.timestep_divisor if solver else 1
        nq, nv, nstep = template.nq, template.nv, task.substeps * divisor

        def pick(row):
            return base.replace(**{name: leaf[row] for name, leaf in leaves.items()})

        def unpack(physics, ctrl):
            time, qpos, qvel, act = jnp.split(physics, (1, 1 + nq, 1 + nq + nv))
            return data.replace(time=time[0], qpos=qpos, qvel=qvel, act=act, ctrl=ctrl)

        def pack(data):
            return jnp.concatenate([data.time[None], data.qpos, data.qvel, data.act])

        def draw(key, gap, model):
            if ranges is None:
                return gap, model
            row = jax.random.randint(key, (), 0, len(rows), model.dtype)
            return jax.tree.map(lambda leaf: leaf[row], pool), row

        def place(qpos, qvel):
            n = len(qpos)
            return jnp.concatenate([jnp.zeros((n, 1)), qpos, qvel, jnp.zeros((n, template.na))], axis=1)

        def sense(physics, gap, model):
            def one(physics, row):
                data = mjx.forward(pick(row), unpack(physics, jnp.zeros(template.nu)))
                return World(data.qpos, data.qvel, data.sensordata)

            return jax.vmap(one)(physics, model)

        def integrate(physics, ctrl, gap, model):
            def one(physics, ctrl, row):
                world_model = pick(row)

                def substep(data, _):
                    data = mjx.step(world_model, data)
                    return data, data.sensordata

                data, sensordata = jax.lax.scan(substep, unpack(physics, ctrl), length=nstep)
                return pack(data), World(data.qpos, data.qvel, sensordata[-divisor])

            return jax.vmap(one)(physics, ctrl, model)

        super().__init__(
            task,
            num_envs,
            gap=gap,
            model=jnp.asarray(model.reshape(-1), jnp.int32),
            draw=draw,
            place=place,
            sense=sense,
            integrate=integrate,
        )


def _stack_fields(task: Task, template: mujoco.MjModel, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The task's `model_fields` of one model per gap `[P, fields]`, stacked to `[P, ..]`."""
    scratch = mujoco.MjData(template)
    model = copy.copy(template)
    fields = {name: np.empty((len(rows), *getattr(model, name).shape)) for name in task.model_fields}
    for i, row in enumerate(rows):
        task.write_dynamics(model, task.nominal, RealGap(*row.tolist()))
        mujoco.mj_setConst(model, scratch)
        for name, field in fields.items():
            field[i] = getattr(model, name)
    return fields
