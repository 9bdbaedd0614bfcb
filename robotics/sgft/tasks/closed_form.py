"""puck_push in closed form: the same task, gaps and interface without a physics engine.

One control step is five substeps h = 0.02 s of a lagged velocity command, a spring between hand and puck, and
linear drag. It is what the MuJoCo model was fitted to, and an exact environment for tests and for studies in
which the simulator itself is jitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from core.sim.gap import RealGap, draw_gap, resolve_gaps
from core.sim.pure import PureSimulator, World
from robotics.sgft.tasks import puck_push

__all__ = ["ClosedFormPuck", "reset", "step"]

SUBSTEP = 0.02  # s
PUCK_MASS = 1.0
CONTACT_DISTANCE = 0.12  # m, the two radii


def reset(key: jax.Array) -> jax.Array:
    """Initial state `[8]` (hand xy, hand velocity, puck xy, puck velocity): see puck_push.initial_state."""
    hand, puck = puck_push.initial_state(key)
    rest = jnp.zeros(2, jnp.float32)
    return jnp.concatenate([hand, rest, puck, rest])


def step(state: jax.Array, action: jax.Array, gap: RealGap) -> jax.Array:
    """State `[8]` after one control step of 0.1 s under a command `[2]` and one world's gap (fields `[]`).

    Every field of the gap that changes the dynamics of puck_push changes these; delay, dead zone and noise
    are the simulator's. Positions and velocities are clipped to +-2 once per control step.
    """
    hand, hand_velocity, puck, puck_velocity = jnp.split(state, 4)
    target = puck_push.rotate(action, gap.frame_rotation) * gap.actuator_gain
    mass = PUCK_MASS * gap.mass_scale
    drag = 4.0 * gap.friction_scale * gap.damping_scale

    def substep(carry, _):
        hand, hand_velocity, puck, puck_velocity = carry
        hand_velocity = hand_velocity + 0.5 * (1.0 - gap.actuator_lag) * (target - hand_velocity)
        offset = puck - hand
        distance = jnp.linalg.norm(offset) + 1e-6
        depth = jnp.maximum(CONTACT_DISTANCE - distance, 0.0)
        push = puck_push.STIFFNESS * depth * offset / (distance * mass)
        hand = hand + SUBSTEP * hand_velocity
        puck_velocity = puck_velocity + SUBSTEP * (push - drag * puck_velocity)
        stop = SUBSTEP * gap.dry_friction / mass
        puck_velocity = jnp.sign(puck_velocity) * jnp.maximum(jnp.abs(puck_velocity) - stop, 0.0)
        return (hand, hand_velocity, puck + SUBSTEP * puck_velocity, puck_velocity), None

    carry, _ = jax.lax.scan(substep, (hand, hand_velocity, puck, puck_velocity), length=puck_push.SUBSTEPS)
    return jnp.clip(jnp.concatenate(carry), -2.0, 2.0)


class ClosedFormPuck(PureSimulator):
    """N closed-form puck worlds with the simulators' interface; pure, jit-able, no MuJoCo stepping.

    Args:
      num_envs: N.
      gaps: None, a RealGap (leaves `[]` or `[N]`), or a dict of field -> (low, high) drawn per episode.
    """

    def __init__(self, num_envs: int, *, gaps: RealGap | Mapping[str, tuple[float, float]] | None = None):
        gap, ranges = resolve_gaps(gaps, num_envs)

        def reset_joints(key, gap):
            del gap
            hand, hand_velocity, puck, puck_velocity = jnp.split(reset(key), 4)
            return jnp.concatenate([hand, puck]), jnp.concatenate([hand_velocity, puck_velocity])

        def draw(key, gap, model):
            return (gap if ranges is None else draw_gap(key, ranges)), model

        def place(qpos, qvel):
            return jnp.concatenate([qpos[:, :2], qvel[:, :2], qpos[:, 2:], qvel[:, 2:]], axis=1)

        def sense(physics, gap, model):
            hand, hand_velocity, puck, puck_velocity = jnp.split(physics, 4, axis=1)
            sensordata = jnp.pad(physics.reshape(-1, 4, 2), ((0, 0), (0, 0), (0, 1))).reshape(-1, 12)
            return World(
                jnp.concatenate([hand, puck], axis=1),
                jnp.concatenate([hand_velocity, puck_velocity], axis=1),
                sensordata,
            )

        def integrate(physics, ctrl, gap, model):
            physics = jax.vmap(step)(physics, ctrl, gap)
            return physics, sense(physics, gap, model)

        super().__init__(
            dataclasses.replace(puck_push.TASK, reset=reset_joints),
            num_envs,
            gap=gap,
            model=jnp.arange(num_envs, dtype=jnp.int32),
            draw=draw,
            place=place,
            sense=sense,
            integrate=integrate,
        )
