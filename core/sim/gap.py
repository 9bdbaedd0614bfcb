"""How a real world differs from a simulator, and the random draw of such gaps in simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError, nearest

__all__ = ["RealGap", "Solver", "command", "sample_gap"]

MAX_ACTION_DELAY = 3


@flax.struct.dataclass
class RealGap:
    """How one world differs from the nominal model; every field `[]`, or `[N]` for a batch of worlds.

    `*_scale` and `actuator_gain` multiply the nominal value, `actuator_lag` is the share of a velocity
    command that is lost per substep (0 none, towards 1 sluggish), `frame_rotation` is a calibration error in
    rad, `dry_friction` a Coulomb force in N, `gravity_comp_error` a share of gravity left uncompensated,
    `deadzone` the size of action that does nothing, `obs_noise` a standard deviation and `obs_bias` an offset
    of every observation, `action_delay` whole control steps 0..3. What each does to a model is its task's to
    say.
    """

    mass_scale: float | jax.Array = 1.0
    friction_scale: float | jax.Array = 1.0
    damping_scale: float | jax.Array = 1.0
    actuator_gain: float | jax.Array = 1.0
    actuator_lag: float | jax.Array = 0.0
    frame_rotation: float | jax.Array = 0.0
    dry_friction: float | jax.Array = 0.0
    gravity_comp_error: float | jax.Array = 0.0
    deadzone: float | jax.Array = 0.0
    obs_noise: float | jax.Array = 0.0
    obs_bias: float | jax.Array = 0.0
    action_delay: int | jax.Array = 0


FIELDS = tuple(field.name for field in dataclasses.fields(RealGap))


@dataclasses.dataclass(frozen=True)
class Solver:
    """Numerical settings of the real side, so that it is never the simulator; the defaults are the robot's.

    The time step is divided by `timestep_divisor` (and so many more of them are taken per control step);
    `cone` is "elliptic" or "pyramidal"; `iterations` and `noslip_iterations` bound the constraint solver.
    """

    timestep_divisor: int = 2
    cone: str = "elliptic"
    iterations: int = 50
    noslip_iterations: int = 3


def draw_gap(key: jax.Array, randomisation: Mapping[str, tuple[float, float]]) -> RealGap:
    """One gap, leaves `[]`, uniform in `randomisation`'s ranges; fields not named stay nominal."""
    names = sorted(randomisation)
    keys = jax.random.split(key, max(len(names), 1))
    low, high = (jnp.array([randomisation[name][i] for name in names], jnp.float32) for i in (0, 1))
    # One draw for all fields: a program with one random generator instead of one a field.
    drawn = dict(
        zip(
            names,
            jax.vmap(lambda one, *ends: jax.random.uniform(one, (), jnp.float32, *ends))(
                keys[: len(names)], low, high
            ),
        )
    )
    if "action_delay" in names:
        shortest, longest = randomisation["action_delay"]
        one = keys[names.index("action_delay")]
        drawn["action_delay"] = jax.random.randint(one, (), int(shortest), int(longest) + 1)
    return RealGap(**drawn)


def sample_gap(key: jax.Array, randomisation: Mapping[str, tuple[float, float]], n: int) -> RealGap:
    """Domain randomisation: `n` independent gaps, leaves `[n]`, uniform in field -> (low, high).

    `action_delay` is drawn from the whole numbers low..high. Fields not named stay nominal. Pure in `key`.
    """
    gaps = jax.vmap(lambda one: draw_gap(one, randomisation))(jax.random.split(key, n))
    return broadcast_gap(gaps, n)


def broadcast_gap(gap: RealGap, n: int, xp=jnp) -> RealGap:
    """Gives every leaf the shape `[n]`, float32 (`action_delay` int32); UserError if that is impossible."""

    def spread(name):
        leaf = xp.asarray(getattr(gap, name), xp.int32 if name == "action_delay" else xp.float32)
        if leaf.shape not in ((), (n,)):
            raise UserError(f"gap field {name} has shape {leaf.shape}, but there are {n} environments")
        return xp.broadcast_to(leaf, (n,))

    return RealGap(**{name: spread(name) for name in FIELDS})


def check_fields(randomisation: Mapping[str, tuple[float, float]]) -> None:
    """Raises UserError for a field RealGap lacks, an empty range, or a delay beyond 3 control steps."""
    for name, (low, high) in randomisation.items():
        if name not in FIELDS:
            raise UserError(
                f"unknown gap field {name!r}{nearest(name, FIELDS)} (fields: {', '.join(FIELDS)})"
            )
        if not low <= high:
            raise UserError(f"gap field {name}: the range ({low}, {high}) is empty; give (low, high)")
        if name == "action_delay" and not 0 <= low <= high <= MAX_ACTION_DELAY:
            raise UserError(f"gap field action_delay: ({low}, {high}) is outside 0..{MAX_ACTION_DELAY}")


def resolve_gaps(gaps, n: int, xp=jnp):
    """Reads a backend's `gaps`: None, a RealGap, or ranges to draw from.

    Returns:
      the gaps `[n]` to begin with, and the ranges, or None if the gaps are fixed.
    """
    if isinstance(gaps, Mapping):
        check_fields(gaps)
        return broadcast_gap(RealGap(), n, xp), dict(gaps)
    if gaps is not None and not isinstance(gaps, RealGap):
        raise UserError(
            f"gaps is {gaps!r}; give None, a RealGap such as task.gap('paper'), or a dict of ranges"
        )
    gap = RealGap() if gaps is None else gaps
    delay = np.asarray(gap.action_delay)
    if not ((delay >= 0) & (delay <= MAX_ACTION_DELAY)).all():
        raise UserError(f"gap field action_delay is {delay}, outside 0..{MAX_ACTION_DELAY} control steps")
    return broadcast_gap(gap, n, xp), None


def gap_rows(gap: RealGap) -> np.ndarray:
    """A batch of gaps as one host array `[N, fields]` float64, fields in the order of the dataclass."""
    return np.stack([np.asarray(getattr(gap, name), np.float64) for name in FIELDS], axis=1)


def command(action, action_buffer, gap: RealGap, *, xp=jnp):
    """Passes actions through the gap's clip, delay and dead zone; `xp` is numpy or jax.numpy.

    Args:
      action: `[N, A]`; clipped to [-1, 1].
      action_buffer: `[N, 3, A]`, the actions of the last three control steps, newest first.

    Returns:
      the command `[N, A]` to hold for this control step and the new buffer `[N, 3, A]`.
    """
    past = xp.concatenate([xp.clip(action, -1.0, 1.0)[:, None], action_buffer], axis=1)
    ctrl = past[xp.arange(len(past)), xp.asarray(gap.action_delay)]
    alive = xp.abs(ctrl) >= xp.asarray(gap.deadzone)[:, None]
    return xp.where(alive, ctrl, xp.zeros_like(ctrl)), past[:, :MAX_ACTION_DELAY]
