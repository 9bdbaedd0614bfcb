"""A system of one's own behind Gymnasium's `reset` and `step`, as the robot of one lane, with limits kept."""

from __future__ import annotations

import logging
from typing import Any

import flax.struct
import jax
import numpy as np

from core.errors import UserError

__all__ = ["GymnasiumRobot", "Limits", "RobotState", "command"]

_log = logging.getLogger(__name__)


class Limits(flax.struct.PyTreeNode):
    """What an action of [-1, 1] means and what may be sent, in the system's units, `[A]` each.

    -1 and 1 stand for `low` and `high`; whatever comes of it is clipped to `lowest` .. `highest`.
    """

    low: Any
    high: Any
    lowest: Any
    highest: Any


class RobotState(flax.struct.PyTreeNode):
    """What the last step told, one lane: observations `[1, O]`, the rest `[1]`, as in core.sim.EnvState."""

    observation: np.ndarray
    final_observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def command(action: Any, limits: Limits, *, xp: Any = np) -> Any:
    """An action `[..., A]` of [-1, 1] in the system's units, within its limits; xp: numpy or jax.numpy."""
    action = limits.low + 0.5 * (action + 1.0) * (limits.high - limits.low)
    return xp.clip(action, limits.lowest, limits.highest)


class GymnasiumRobot:
    """One lane for `finetune.run_lanes`. Nothing outside the limits and nothing that is not finite is sent.

    Args:
      env: has `reset(seed=) -> (observation [O], info)` and `step(action [A]) -> (observation, reward,
        terminated, truncated, info)`; the range of actions is `env.action_space.low` and `.high`.
      observation_size, action_size: O and A of the policy, checked against the system's.
      limits: (low, high), numbers or `[A]`, inside that range: nothing beyond is sent, while -1 and 1 keep
        standing for the ends of the range. Where the env has no (finite) range they are the range.

    `episode_returns` lists the raw return of every episode that ended.
    """

    def __init__(
        self,
        env: Any,
        *,
        observation_size: int,
        action_size: int,
        limits: tuple[Any, Any] | None = None,
    ):
        self.limits = _limits(getattr(env, "action_space", None), limits)
        if len(self.limits.low) != action_size:
            raise UserError(f"the policy gives {action_size} actions, the robot takes {len(self.limits.low)}")
        self._observation_size = observation_size
        self.episode_returns: list[float] = []
        self._env = env
        self._running = 0.0
        self._state: RobotState | None = None
        self._warned = False

    def reset(self, key: jax.Array) -> RobotState:
        """Begins an episode of the system, seeded by a typed key."""
        seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
        observation = self._checked(self._env.reset(seed=seed)[0])
        self._running = 0.0
        no = np.zeros(1, bool)
        self._state = RobotState(observation, observation, np.zeros(1, np.float32), no, no)
        return self._state

    def auto_reset_step(self, state: RobotState, action: Any) -> RobotState:
        """One control step of the system with action `[1, A]`, then a reset if the episode ended.

        Raises UserError for an action that is not finite (nothing is sent), an observation or reward that is
        not, and a `state` that is not the newest: a real system can not go back to it.
        """
        if state is not self._state:
            raise UserError(
                "a real system can not go on from a saved state: begin a new run in another workdir"
            )
        result = self._env.step(self._safe(np.asarray(action, np.float32)[0]))
        final, reward, terminated, truncated = result[:4]
        if not np.isfinite(reward):
            raise UserError(f"the robot's reward is {reward}: rewards must be finite")
        final = self._checked(final)
        self._running += float(reward)
        observation = final
        if terminated or truncated:
            self.episode_returns.append(self._running)
            self._running = 0.0
            observation = self._checked(self._env.reset()[0])
        self._state = RobotState(
            observation,
            final,
            np.array([reward], np.float32),
            np.array([terminated], bool),
            np.array([truncated and not terminated], bool),
        )
        return self._state

    def _safe(self, action):
        if not np.isfinite(action).all():
            raise UserError(f"the policy gave the action {action}, which is not finite: nothing was sent")
        if np.abs(action).max() > 1.0 and not self._warned:
            self._warned = True
            _log.warning("the policy's action %s lies outside [-1, 1]; such actions are clipped", action)
        sent = command(np.clip(action, -1.0, 1.0), self.limits)
        return sent.astype(np.float32)

    def _checked(self, observation):
        observation = np.asarray(observation, np.float32)
        if observation.shape != (self._observation_size,):
            raise UserError(
                f"policy and V_sim read observations of size {self._observation_size}, but the robot gives "
                f"shape {observation.shape}: train them on what the robot can observe, as one vector"
            )
        if not np.isfinite(observation).all():
            raise UserError(f"the robot's observation is not finite: {observation}")
        return observation[None]


def _limits(space, limits):
    given = getattr(space, "low", None), getattr(space, "high", None)
    bounded = given[0] is not None and np.isfinite(given[0]).all() and np.isfinite(given[1]).all()
    if not bounded and limits is None:
        raise UserError(
            "env.action_space has no finite low and high: give limits=(low, high), a number per action"
        )
    full = given if bounded else limits
    low, high, lowest, highest = np.broadcast_arrays(*full, *(full if limits is None else limits))
    if low.ndim != 1:
        raise UserError(f"actions must be one vector, but their range has shape {low.shape}")
    if not ((low <= lowest) & (lowest < highest) & (highest <= high)).all():
        raise UserError(f"limits {lowest} .. {highest} are no range inside the env's {low} .. {high}")
    return Limits(
        np.float32(low),
        np.float32(high),
        _rounded(lowest, np.less, np.inf),
        _rounded(highest, np.greater, -np.inf),
    )


def _rounded(bound, beyond, inwards):
    """The bound in float32, towards the inside where it has to be rounded."""
    near = np.float32(bound)
    return np.where(beyond(near, bound), np.nextafter(near, np.float32(inwards)), near)
