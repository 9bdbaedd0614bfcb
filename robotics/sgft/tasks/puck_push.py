"""Push a puck onto a target with a velocity-controlled hand: the default task, one MJCF for every backend.

Observation 8: hand position and velocity, puck position and velocity (x, y each), clipped to +-2, in m and
m/s. Action 2 in [-1, 1]: the hand's velocity command in m/s. 40 control steps of 0.1 s, time limit only.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp

from core.sim.gap import RealGap
from core.sim.task import Task

__all__ = ["GAMMA", "GAPS", "RANDOMISATION", "TASK", "initial_state", "reward", "scripted_pusher", "success"]

GAMMA = 0.97
EPISODE_LENGTH = 40
SUBSTEPS = 5
STIFFNESS = 400.0  # of the contact, per unit of nominal puck mass, 1/s^2
# sensordata is hand position, hand velocity, puck position, puck velocity, three numbers each.
OBSERVED = (0, 1, 3, 4, 6, 7, 9, 10)

RANDOMISATION = {
    "actuator_gain": (0.7, 1.3),
    "mass_scale": (0.7, 1.3),
    "friction_scale": (0.7, 1.3),
    "frame_rotation": (-0.1, 0.1),
}
_PAPER = {
    "actuator_gain": 0.6,
    "actuator_lag": 0.5,
    "mass_scale": 2.5,
    "friction_scale": 2.0,
    "frame_rotation": 0.6,
}
GAPS = {
    "none": RealGap(),
    "mild": RealGap(actuator_gain=0.8, mass_scale=1.2, friction_scale=1.2, frame_rotation=0.1),
    "milder": RealGap(
        actuator_gain=0.7, actuator_lag=0.3, mass_scale=2.0, friction_scale=1.5, frame_rotation=0.6
    ),
    "paper": RealGap(**_PAPER),
    "hard": RealGap(**_PAPER, dry_friction=2.0, action_delay=1),
}


def initial_state(key):
    """Start of an episode: hand xy `[2]` and puck xy `[2]` in m.

    The puck lies 0.6 m from the target at an angle U(-0.4, 0.4) rad, the hand behind it (1.5 times as far)
    with U(-0.05, 0.05) m of error per axis; both at rest.
    """
    angle_key, hand_key = jax.random.split(key)
    angle = jax.random.uniform(angle_key, (), jnp.float32, -0.4, 0.4)
    puck = 0.6 * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    hand = 1.5 * puck + jax.random.uniform(hand_key, (2,), jnp.float32, -0.05, 0.05)
    return hand, puck


def rotate(vector, angle):
    """Turns `[2]` by `angle` `[]` rad, anticlockwise."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos * vector[0] - sin * vector[1], sin * vector[0] + cos * vector[1]])


def _reset(key, gap):
    hand, puck = initial_state(key)
    # The hand's joints are turned by the gap's calibration error: place it where the world says.
    return jnp.concatenate([rotate(hand, -gap.frame_rotation), puck]), jnp.zeros(4, jnp.float32)


def _exploring_reset(key, gap):
    """Puck at rest within 0.8 m of the target; hand near it (0.3 m) or far (1 m per axis), at up to 1 m/s."""
    radius_key, angle_key, near_key, hand_key, speed_key = jax.random.split(key, 5)
    radius = 0.8 * jnp.sqrt(jax.random.uniform(radius_key))
    angle = jax.random.uniform(angle_key, (), jnp.float32, -jnp.pi, jnp.pi)
    puck = radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    reach = jnp.where(jax.random.uniform(near_key) < 0.5, 0.3, 1.0)
    hand = puck + reach * jax.random.uniform(hand_key, (2,), jnp.float32, -1.0, 1.0)
    velocity = jax.random.uniform(speed_key, (2,), jnp.float32, -1.0, 1.0)
    turned = rotate(hand, -gap.frame_rotation), rotate(velocity, -gap.frame_rotation)
    still = jnp.zeros(2, jnp.float32)
    return jnp.concatenate([turned[0], puck]), jnp.concatenate([turned[1], still])


def _observe(qpos, qvel, ctrl, sensordata):
    del qpos, qvel, ctrl
    return jnp.clip(sensordata[jnp.array(OBSERVED)], -2.0, 2.0)


def _distance(observation):
    return jnp.linalg.norm(observation[..., 4:6], axis=-1)


def reward(observation):
    """exp(-4 |puck|) `[..]` in (0, 1], of noise-free observations `[.., 8]`."""
    return jnp.exp(-4.0 * _distance(observation))


def success(observation):
    """Whether the puck's centre is within 0.1 m of the target: `[..]` bool, of noise-free observations `[..,
    8]`.

    An episode succeeds by its last step.
    """
    return _distance(observation) < 0.1


def scripted_pusher(observation):
    """A hand-written expert, action `[2]` from an observation `[8]`: get behind the puck, then push it."""
    hand, puck = observation[0:2], observation[4:6]
    distance = jnp.linalg.norm(puck)
    outward = puck / distance
    offset = hand - puck
    along = offset @ outward
    lateral = offset - along * outward
    behind = jnp.linalg.norm(lateral) < 0.06
    pushing = 2.0 * jnp.maximum(distance - 0.03, 0.0) + 3.0 * (along - 0.12)
    push = jnp.where(behind, pushing, 3.0 * (along - 0.16))
    velocity = -6.0 * lateral - outward * jnp.clip(push, -1.0, 1.0)
    return jnp.where(distance < 0.05, 0.0, jnp.clip(velocity, -1.0, 1.0))


def _write_dynamics(model, nominal, gap):
    step = nominal.opt.timestep
    hand_mass, puck_mass = nominal.body_mass[1:].tolist()
    # Under implicitfast one nominal substep gives v += beta (gain ctrl - v).
    beta = 0.5 * (1.0 - gap.actuator_lag)
    velocity_gain = hand_mass * beta / ((1.0 - beta) * step)
    model.actuator_gainprm[:, 0] = velocity_gain * gap.actuator_gain
    model.actuator_biasprm[:, 2] = -velocity_gain
    puck_mass *= gap.mass_scale
    decay = 4.0 * gap.friction_scale
    model.body_mass[2] = puck_mass
    model.pair_solref[0] = (-STIFFNESS / gap.mass_scale, -decay)
    # A free puck loses exactly the share step * decay of its speed in each nominal substep.
    model.dof_damping[2:] = gap.damping_scale * puck_mass * decay / (1.0 - step * decay)
    model.dof_frictionloss[2:] = gap.dry_friction
    cos, sin = math.cos(gap.frame_rotation), math.sin(gap.frame_rotation)
    axis = model.jnt_axis
    axis[0, 0], axis[0, 1] = cos, sin
    axis[1, 0], axis[1, 1] = -sin, cos


TASK = Task(
    name="puck_push",
    xml=Path(__file__).with_suffix(".xml").read_text(),
    substeps=SUBSTEPS,
    episode_length=EPISODE_LENGTH,
    gamma=GAMMA,
    reset=_reset,
    observe=_observe,
    reward=lambda *world: reward(_observe(*world)),
    terminated=lambda *world: jnp.zeros((), bool),
    success=lambda *world: success(_observe(*world)),
    write_dynamics=_write_dynamics,
    model_fields=(
        "body_mass",
        "body_invweight0",
        "dof_invweight0",
        "dof_M0",
        "dof_damping",
        "dof_frictionloss",
        "pair_solref",
        "actuator_gainprm",
        "actuator_biasprm",
        "jnt_axis",
    ),
    randomisation=RANDOMISATION,
    gaps=GAPS,
    reward_from_observation=reward,
    success_from_observation=success,
    exploring_reset=_exploring_reset,
    observation_step=(0.05, 0.05, 0.3, 0.3, 0.05, 0.05, 0.3, 0.3),
)
