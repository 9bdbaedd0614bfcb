"""Stage 2, on the real system: collect a block of steps, learn from everything so far, repeat.

The loop knows the robot by `reset` and `auto_reset_step` alone; whatever hides behind them stays hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from core.errors import UserError
from core.rl import evaluate
from core.rl.evaluate import Curve, Interaction
from core.rl.replay import Transition
from robotics.sgft.agents import Agent
from robotics.sgft.gymnasium_robot import GymnasiumRobot
from robotics.sgft.own_robot import Finetuned, InMemory, Policy, make_agent, make_source
from robotics.sgft.pretrain import evaluate_policy
from robotics.sgft.source import Experience, check_transfer

__all__ = ["Finetuning", "Schedule", "deployed", "fit", "lane_functions", "run_lanes"]

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


def fit(
    env: Any,
    policy: Policy | tuple,
    value: Callable,
    *,
    gamma: float,
    steps: int = 2400,
    horizon: int = 1,
    method: str = "sac",
    reward: Callable | None = None,
    simulated: Mapping[str, Any] | None = None,
    value_gamma: float | None = None,
    limits: tuple[Any, Any] | None = None,
    block: int = 40,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    stop: Callable | None = None,
    run: Any = None,
) -> Finetuned:
    """Fine-tunes a policy of your own on a system of your own with Gymnasium's interface.

    Args:
      env: has `reset(seed=)`, `step(action)` and bounds of the action, see gymnasium_robot.GymnasiumRobot.
      policy: Policy, or (Actor, variables[, observation statistics]); its [-1, 1] is the action's range.
      value: frozen V_sim, observations `[..., O]` -> `[...]`; numpy will do, except for "model_based".
      gamma: discount of the task, in [0, 1]. value_gamma: the one V_sim was trained with, checked if given.
      steps: real control steps, a multiple of `block`; the robot waits between blocks while the agent learns.
      horizon: H >= 1, the window of SGFT-SAC ("sac"), or the steps of a plan of SGFT-MB ("model_based").
      reward: for SGFT-MB, the known reward of the state entered, `[..., O]` -> `[...]`, in jax.numpy.
      simulated: transitions from simulation, a dict of observation, action (in [-1, 1]), reward,
        next_observation, terminated, `[n, ...]`: pre-fits the critic; SGFT-MB needs them.
      limits: (low, high), narrower than the range of `env`: nothing outside is ever sent, nor is NaN.
      settings: other hyperparameters, see own_robot.SETTINGS.
      stop: `(steps so far, robot state) -> bool`, asked after every control step; True ends the run there.
      run: a core.run.Run that records metrics and checkpoints, or None, which writes nothing. A real system
        can not be put back into a saved state: a run that was cut short can not be resumed, only begun anew.

    Returns:
      Finetuned: `policy(observation)`, `export(directory)`, `steps`, `episode_returns`.
    """
    policy = Policy(*policy)
    size = policy.observation_size
    check_transfer(
        value_gamma=gamma if value_gamma is None else value_gamma,
        gamma=gamma,
        value_size=size,
        observation_size=size,
    )
    if block < 1 or steps < block or steps % block:
        raise UserError(f"steps={steps} is not a positive multiple of block={block} real steps")
    source = make_source(policy, value, simulated, gamma)
    agent = make_agent(
        method,
        policy,
        value,
        source=source,
        gamma=gamma,
        horizon=horizon,
        capacity=steps,
        block=block,
        reward=reward,
        prefit=simulated is not None,
        settings=settings or {},
    )
    robot = GymnasiumRobot(env, observation_size=size, action_size=policy.actor.action_size, limits=limits)
    state = run_lanes(
        "finetune",
        agent,
        source,
        robot,
        seeds=[seed],
        schedule=Schedule(steps, block, steps),
        value=lambda source, observation: value(observation),
        control_seconds=0.0,
        run=InMemory() if run is None else run,
        stop=stop,
    )
    return Finetuned(agent, state.agent, source, robot, int(state.used.steps[0]))


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
