"""What the simulation stage hands to the real one: policy, frozen value, simulated transitions."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError
from core.rl import distributions, normalize
from core.rl.networks import Actor, ValueEnsemble
from core.rl.replay import Transition
from core.weights import load_npz, save_npz

__all__ = [
    "Experience",
    "Networks",
    "Source",
    "check_transfer",
    "lane_policy",
    "load",
    "policy_action",
    "save",
    "sim_value",
]

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Networks:
    """The modules behind a Source, hashable, static under jit: pi_sim and V_sim."""

    actor: Actor
    value: ValueEnsemble


class Experience(flax.struct.PyTreeNode):
    """Transitions `[n]` with the raw reward, and the frozen V_sim of both ends `[n]` (0 if unused).

    V_sim is evaluated once, at insertion: shaping then costs nothing when a batch is drawn, V_sim may be any
    callable, and rewards can be shaped anew at any time with another horizon or discount.
    """

    transition: Transition
    value: Array
    next_value: Array


class Source(flax.struct.PyTreeNode):
    """pi_sim, V_sim and D_sim of one seed; stack a leading axis for more.

    Attributes:
      actor: variables of `Networks.actor`.
      value: variables of `Networks.value`; V_sim = value_offset + value_scale * its mean over members.
      value_offset, value_scale: `[]`.
      stats: observation statistics of the policy, frozen. V_sim reads observations as they are: divided by
        the small spread that they have along pi_sim's path, what lies off it would look far away.
      gamma: `[]` discount that V_sim was trained with.
      simulated: D_sim, transitions `[n, ...]` of pi_sim in simulation.
    """

    actor: Any
    value: Any
    value_offset: Array
    value_scale: Array
    stats: normalize.RunningStats
    gamma: Array
    simulated: Experience


def sim_value(source: Source, observation: Array, *, networks: Networks) -> Array:
    """V_sim `[...]` of observations `[..., O]`; no gradient flows into its parameters."""
    source = jax.lax.stop_gradient(source)
    raw = networks.value.apply(source.value, observation)
    return source.value_offset + source.value_scale * jnp.mean(raw, axis=0)


def policy_action(source: Source, observation: Array, *, networks: Networks) -> Array:
    """pi_sim's deterministic action `[..., A]` in [-1, 1] at observations `[..., O]`."""
    mean, _ = networks.actor.apply(source.actor, normalize.apply(source.stats, observation))
    return distributions.mode(mean)


def lane_policy(networks: Networks) -> Callable:
    """pi_sim of every lane: `(source, observation [L * N, O]) -> action [L * N, A]`, lane after lane."""

    def act(source: Source, observation: Array) -> Array:
        lanes = source.gamma.shape[0]
        by_lane = observation.reshape(lanes, -1, observation.shape[-1])
        action = jax.vmap(functools.partial(policy_action, networks=networks))(source, by_lane)
        return action.reshape(observation.shape[0], -1)

    return act


def check_transfer(*, value_gamma: float, gamma: float, value_size: int, observation_size: int) -> None:
    """Raises UserError where V_sim cannot be a potential of the task: other discount or observation size."""
    if abs(value_gamma - gamma) > 1e-6:
        raise UserError(
            f"V_sim was trained with gamma {value_gamma:g} but the real task uses gamma {gamma:g}: the "
            "shaping would be wrong; train both with one discount"
        )
    if value_size != observation_size:
        raise UserError(
            f"V_sim reads observations of size {value_size} but the real task gives {observation_size}: "
            "train V_sim on what the robot can observe"
        )


def save(path: Path, source: Source, *, reward: str) -> None:
    """Writes pi_sim and V_sim of one lane as .npz, with all that makes them: obs_stats, gamma and reward.

    `reward` names the reward that V_sim was trained with, such as the name of the task.
    """
    save_npz(path, _stored(source) | {"reward_id": _reward_id(reward)})


def load(path: Path, *, networks: Networks, observation_size: int, gamma: float, reward: str) -> Source:
    """Reads what `save` wrote, for a task with that observation, discount and reward; no D_sim comes with it.

    Raises UserError where something is missing (obs_stats, say: without them pi_sim is another function), the
    observation has another size, or V_sim was trained with another gamma or reward.
    """

    def blank():
        observation = jnp.zeros((1, observation_size))
        actor, value = (net.init(jax.random.key(0), observation) for net in (networks.actor, networks.value))
        number = jnp.float32(0)
        return Source(actor, value, number, number, normalize.init(observation_size), number, None)

    like = jax.eval_shape(lambda: _stored(blank())) | {"reward_id": _reward_id(reward)}
    stored = load_npz(path, like)
    if stored.pop("reward_id") != _reward_id(reward):
        raise UserError(
            f"{path}: V_sim was trained with another reward than {reward!r}: the shaping would be wrong"
        )
    check_transfer(
        value_gamma=float(stored["gamma"]),
        gamma=gamma,
        value_size=observation_size,
        observation_size=observation_size,
    )
    names = {"policy": "actor", "obs_stats": "stats"}
    return Source(**{names.get(key, key): leaf for key, leaf in stored.items()}, simulated=None)


def _reward_id(name):
    return np.uint32(zlib.crc32(name.encode()))


def _stored(source):
    return {
        "policy": source.actor,
        "value": source.value,
        "value_offset": source.value_offset,
        "value_scale": source.value_scale,
        "obs_stats": source.stats,
        "gamma": source.gamma,
    }
