"""An environment: an MJCF model and pure functions of what its sensors say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property

import jax
import jax.numpy as jnp
import mujoco

from core.errors import UserError, nearest
from core.sim.gap import RealGap, Solver

__all__ = ["Task", "compile_model", "with_exploring_starts"]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """An MJCF model plus pure functions for one world; the backends batch them with vmap.

    `observe`, `reward`, `terminated` and `success` take (qpos `[nq]`, qvel `[nv]`, ctrl `[nu]`, sensordata
    `[nsensordata]`). Sensors show the world one substep (`timestep`) before the end of a control step, on
    every backend and for every solver; right after a reset they show the initial state. `reset(key, gap)`
    gives (qpos, qvel). `write_dynamics(model, nominal, gap)` writes the fields of an MjModel in place on the
    host, from the nominal model and one gap of Python floats; `model_fields` names the fields it may change.
    `reward_from_observation(observation [.., obs]) -> [..]` and `success_from_observation` exist where reward
    and success are functions of a noise-free observation alone (what a model-based planner needs), else None.
    """

    name: str
    xml: str
    substeps: int
    episode_length: int
    gamma: float
    reset: Callable
    observe: Callable
    reward: Callable
    terminated: Callable
    success: Callable
    write_dynamics: Callable
    model_fields: tuple[str, ...]
    randomisation: Mapping[str, tuple[float, float]]
    gaps: Mapping[str, RealGap]
    reward_from_observation: Callable | None = None
    success_from_observation: Callable | None = None
    exploring_reset: Callable | None = None
    observation_step: tuple[float, ...] | None = None

    @cached_property
    def nominal(self) -> mujoco.MjModel:
        """The model as its MJCF says; never written to."""
        return mujoco.MjModel.from_xml_string(self.xml)

    @cached_property
    def observation_size(self) -> int:
        """Length of one observation."""
        model = self.nominal
        sizes = (model.nq, model.nv, model.nu, model.nsensordata)
        arguments = [jax.ShapeDtypeStruct((size,), "float32") for size in sizes]
        return jax.eval_shape(self.observe, *arguments).shape[0]

    @property
    def action_size(self) -> int:
        """Length of one action; each entry in [-1, 1]."""
        return self.nominal.nu

    @property
    def control_dt(self) -> float:
        """Seconds between two actions."""
        return self.substeps * self.nominal.opt.timestep

    def gap(self, level: str) -> RealGap:
        """The dynamics gap of a named level; UserError names the nearest level if there is none."""
        if level not in self.gaps:
            known = ", ".join(self.gaps)
            raise UserError(
                f"task {self.name} has no gap level {level!r}{nearest(level, self.gaps)} ({known})"
            )
        return self.gaps[level]


def compile_model(task: Task, solver: Solver | None) -> mujoco.MjModel:
    """A fresh MjModel of the task, with the solver changes of the real side when `solver` is given."""
    model = mujoco.MjModel.from_xml_string(task.xml)
    if solver is not None:
        cones = {"pyramidal": mujoco.mjtCone.mjCONE_PYRAMIDAL, "elliptic": mujoco.mjtCone.mjCONE_ELLIPTIC}
        if solver.cone not in cones:
            raise UserError(f"unknown cone {solver.cone!r}{nearest(solver.cone, cones)} ({', '.join(cones)})")
        model.opt.cone = cones[solver.cone]
        model.opt.timestep /= solver.timestep_divisor
        model.opt.iterations = solver.iterations
        model.opt.noslip_iterations = solver.noslip_iterations
    return model


def with_exploring_starts(task: Task, share: float, *, episode_length: int | None = None) -> Task:
    """The task with a `share` of its episodes starting from its `exploring_reset` instead.

    Raises:
      UserError: the task has no `exploring_reset`, and `share` is above 0.
    """
    nominal, exploring, length = task.reset, task.exploring_reset, episode_length or task.episode_length
    if exploring is None:
        if share > 0:
            raise UserError(f"task {task.name} has no exploring_reset: set exploring_share to 0, not {share}")
        return dataclasses.replace(task, episode_length=length)

    def reset(key, gap):
        choice, key = jax.random.split(key)
        explore = jax.random.uniform(choice) < share
        return jax.tree.map(lambda a, b: jnp.where(explore, a, b), exploring(key, gap), nominal(key, gap))

    return dataclasses.replace(task, reset=reset, episode_length=length)
