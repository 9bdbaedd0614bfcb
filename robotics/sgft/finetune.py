"""Stage 2, on the real system: collect a block of steps, learn from everything so far, repeat.

The loop knows the robot by `reset` and `auto_reset_step` alone; whatever hides behind them stays hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from core.rl import evaluate
from core.rl.evaluate import Curve, Interaction
from core.rl.replay import Transition
from robotics.sgft.agents import Agent
from robotics.sgft.pretrain import evaluate_policy
from robotics.sgft.source import Experience

__all__ = ["Finetuning", "Schedule", "deployed", "lane_functions", "run_lanes"]

Array = jax.Array


class Schedule(NamedTuple):
    """Real control steps per seed: in all, between two rounds of learning, between two evaluations."""

    total: int
    block: int
    eval_every: int


class Finetuning(flax.struct.PyTreeNode):
    """All of a running stage 2, with a leading lane axis `[L, ...]`: what a checkpoint holds."""

    agent: Any
    robot: Any
    curve: Curve
    used: Interaction
    episode: Array
    t: Array
    key: Array


@functools.lru_cache(maxsize=64)
def lane_functions(explore: Callable, exploit: Callable, learn: Callable) -> tuple[Callable, ...]:
    """An agent's three functions, `vmap`ped over lanes and compiled once for all agents that share them."""

    def exploit_lanes(carry, observation, key):
        state, source = carry
        lanes = jax.tree.leaves(source)[0].shape[0]
        by_lane = observation.reshape(lanes, -1, observation.shape[-1])
        action = jax.vmap(exploit)(state, source, by_lane, jax.random.split(key, lanes))
        return carry, action.reshape(observation.shape[0], -1)

    return jax.jit(jax.vmap(explore)), exploit_lanes, jax.jit(jax.vmap(learn), donate_argnums=0)


def deployed(agent_state: Any) -> Any:
    """What `explore` and `exploit` read of an agent's state: no replay, critic or optimizer is in it."""
    return agent_state.deployed()


def run_lanes(
    name: str,
    agent: Agent,
    source: Any,
    robot: Any,
    *,
    seeds: list[int],
    schedule: Schedule,
    value: Callable | None,
    control_seconds: float,
    run: Any,
    evaluation: Any = None,
    stop: Callable | None = None,
    checkpoint_every: int = 10,
) -> Finetuning:
    """Fine-tunes one agent on one robot per seed, resumably, as stage `name` of `run`.

    Args:
      agent: what to run. source: its Source, leaves `[L, ...]`.
      robot: simulator or real system of L lanes: `reset(key) -> state` and `auto_reset_step(state, action [L,
        A]) -> state`, with observation, final_observation `[L, O]`, reward, terminated and truncated `[L]`.
      schedule: real steps per lane; `total` and `eval_every` are multiples of `block`.
      value: `(source, observation [L, N, O]) -> [L, N]`, the frozen V_sim; None if the agent needs none.
      control_seconds: seconds of one control step, for the curve.
      evaluation: a simulator of L * N environments that play one episode each; None records no curve.
      stop: `(steps so far, robot state) -> bool`, asked after every control step; True ends the stage.

    Returns:
      the final state; its curve holds success rate, unshaped return, real steps, episodes and seconds.
    """
    lanes = len(seeds)
    explore, exploit, learn = lane_functions(agent.explore, agent.exploit, agent.learn)
    blocks, every = schedule.total // schedule.block, schedule.eval_every // schedule.block
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 2))(jnp.asarray(seeds))
    stopped = False

    def init():
        agent_keys, robot_keys, run_keys = jax.vmap(lambda k: jax.random.split(k, 3), out_axes=1)(keys)
        state = jax.jit(jax.vmap(agent.init, (0, 0, None)))(agent_keys, source, agent.options)
        zeros = jnp.zeros(lanes, jnp.int32)
        curve = jax.vmap(lambda _: evaluate.init_curve(blocks // every + 1))(zeros)
        used = jax.vmap(lambda _: Interaction.none())(zeros)
        return Finetuning(state, robot.reset(robot_keys[0]), curve, used, zeros, zeros, run_keys)

    def measure(state, i):
        if evaluation is None:
            return state
        # Every evaluation plays the same starts: differences along a curve are the policy's.
        key = jax.random.fold_in(jax.random.key(seeds[0]), 3)
        success, returns = evaluate_policy(evaluation, exploit, (state.agent, source), key, lanes=lanes)
        curve = _record(state.curve, state.used, jnp.asarray(success), jnp.asarray(returns))
        run.log(i * schedule.block, {"success": success.mean(), "return": returns.mean()}, group=name)
        return state.replace(curve=curve)

    def step(state, i):
        nonlocal stopped
        if stopped:
            return state
        if i == 0:
            state = measure(state, 0)
        step_keys = jax.vmap(lambda k: jax.random.split(jax.random.fold_in(k, i), schedule.block + 1))(
            state.key
        )
        env, episode, t, rows = state.robot, np.asarray(state.episode), np.asarray(state.t), []
        for k in range(schedule.block):
            observation = np.asarray(env.observation)
            action = np.asarray(explore(state.agent, source, observation, step_keys[:, k]))
            env = robot.auto_reset_step(env, action)
            rows.append(
                Transition(
                    observation,
                    action,
                    np.asarray(env.reward, np.float32),
                    np.asarray(env.final_observation),
                    np.asarray(env.terminated),
                    np.asarray(env.truncated),
                    episode,
                    t,
                )
            )
            ended = rows[-1].terminated | rows[-1].truncated
            episode, t = episode + ended.astype(np.int32), np.where(ended, 0, t + 1).astype(np.int32)
            if stop is not None and stop(i * schedule.block + k + 1, env):
                stopped = True
                break
        transition = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *rows)
        used = _count(state.used, transition.terminated | transition.truncated, control_seconds)
        state = state.replace(robot=env, used=used, episode=jnp.asarray(episode), t=jnp.asarray(t))
        if stopped:
            return state
        experience = _with_values(transition, value, source)
        learned, metrics = learn(state.agent, source, experience, step_keys[:, -1])
        run.log((i + 1) * schedule.block, jax.tree.map(jnp.mean, metrics), group=name)
        state = state.replace(agent=learned)
        return measure(state, i + 1) if (i + 1) % every == 0 else state

    return run.loop(
        name,
        init=init,
        step=step,
        total=blocks,
        checkpoint_every=checkpoint_every,
        progress=f"{name} on the real robot, {lanes} seeds",
    )


def _with_values(transition, value, source):
    if value is None:
        blank = np.zeros_like(transition.reward)
        return Experience(transition, blank, blank)
    ends = (transition.observation, transition.next_observation)
    return Experience(transition, *(np.asarray(value(source, end), np.float32) for end in ends))


@jax.jit
def _record(curve, used, success, returns):
    return jax.vmap(lambda c, u, s, r: evaluate.record(c, u, success=s, returns=r))(
        curve, used, success, returns
    )


@functools.partial(jax.jit, static_argnums=2)
def _count(used, ended, control_seconds):
    return jax.vmap(lambda u, e: evaluate.count(u, e, control_seconds=control_seconds))(used, ended)
