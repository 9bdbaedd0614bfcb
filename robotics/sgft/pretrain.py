"""Stage 1, in simulation: PPO under domain randomisation, V_sim refitted, simulated transitions kept.

Lanes are seeds: every seed has its own simulation stage, all of them run side by side.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from core import mesh as meshes
from core import sim
from core.rl import ppo
from core.rl.networks import Actor, Value, ValueEnsemble
from core.rl.replay import Transition
from core.sim.drive import drive
from core.sim.pure import PureSimulator
from core.sim.task import Task, with_exploring_starts
from robotics.sgft import simulation_value
from robotics.sgft.source import Experience, Networks, Source, lane_policy, sim_value

__all__ = [
    "blank_source",
    "evaluate_policy",
    "fit",
    "lane_sharding",
    "networks",
    "ppo_config",
    "ppo_iteration",
]


def networks(config: ConfigDict, action_size: int) -> Networks:
    """pi_sim and V_sim as `config.pretrain` describes them."""
    actor = Actor(action_size, tuple(config.actor_features), nn.tanh, log_std_init=config.log_std_init)
    # Layer norm and relu: V_sim has edges, where contact begins, that a small tanh network blurs.
    return Networks(actor, ValueEnsemble(config.value_members, tuple(config.value_features)))


def ppo_config(config: ConfigDict, modules: Networks) -> ppo.Config:
    """PPO's static part: pi_sim's network, a critic of the policy's size, epochs and minibatches."""
    critic = Value(tuple(config.actor_features), nn.tanh)
    return ppo.Config(modules.actor, critic, epochs=config.epochs, minibatches=config.minibatches)


def lane_sharding(mesh: Mesh, leaf: Any, *, env_axis: int | None = None) -> NamedSharding:
    """How a leaf `[L, ...]` lies on the mesh: split over its lanes if "data" divides L, else over `env_axis`
    (where the N environments are) if it divides N, else whole on every device."""
    shape, devices = jnp.shape(leaf), mesh.shape["data"]
    axes = [a for a in (0, env_axis) if a is not None and a < len(shape) and shape[a] % devices == 0]
    return NamedSharding(mesh, P(*[None] * axes[0], "data") if axes else P())


class _Training(flax.struct.PyTreeNode):
    ppo: ppo.PPOState
    env: Any
    key: jax.Array


def ppo_iteration(state, env_state, key, *, simulator, hyper, config, length):
    """One lane on a pure simulator: collects `length` steps of its N environments, then updates; jit-able.

    Returns (PPOState, env_state with leaves `[N, ...]`, metrics `[]`).
    """
    collect_key, update_key = jax.random.split(key)
    step = simulator.auto_reset_step
    env_state, rollout = ppo.collect(state, env_state, collect_key, step, config=config, length=length)
    state, metrics = ppo.update(state, rollout, update_key, hyper, config=config)
    return state, env_state, metrics


def fit(task: Task, config: ConfigDict, seeds: list[int], *, backend: str, run: Any) -> tuple[Source, dict]:
    """Runs stage 1 for all `seeds`: resumable stages `simulation/policy` and `simulation/value`.

    Args:
      task: the task; its `randomisation` is drawn anew for every episode.
      config: `config.pretrain`.
      backend: of core.sim.make.

    Returns:
      (Source with a leading lane axis `[L, ...]`, numbers for the summary, `[L]` each).
    """
    modules = networks(config, task.action_size)
    state = _train_policy(task, config, modules, seeds, backend, run)
    stage = run.loop(
        "simulation_value",
        init=lambda: blank_source(task, config, modules, state, len(seeds)),
        step=lambda source, i: _finish(task, config, modules, state, source, seeds, backend, run),
        total=1,
        checkpoint_every=1,
        progress="refitting V_sim",
    )
    source, measured = stage
    return source, {key: np.asarray(value) for key, value in measured.items()}


def _train_policy(task, config, modules, seeds, backend, run):
    lanes, n = len(seeds), config.num_envs
    static = ppo_config(config, modules)
    hyper = ppo.Hyper.arrays(
        gamma=task.gamma,
        lam=config.lam,
        lr=config.lr,
        clip=config.clip,
        value_coef=config.value_coef,
        std_bonus=config.std_bonus,
        max_grad_norm=config.max_grad_norm,
    )
    training_task = with_exploring_starts(task, config.exploring_share)
    simulator = sim.make(training_task, lanes * n, backend=backend, gaps=dict(task.randomisation))
    pure = isinstance(simulator, PureSimulator)
    if pure:
        simulator = sim.make(training_task, n, backend=backend, gaps=dict(task.randomisation))
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))

    def init():
        init_keys, env_keys, run_keys = jax.vmap(lambda k: jax.random.split(k, 3), out_axes=1)(keys)
        make = functools.partial(ppo.init, config=static, observation_size=task.observation_size)
        state = meshes.shard(run.mesh, jax.vmap(lambda k: make(k))(init_keys))
        if pure:
            env = jax.jit(jax.vmap(simulator.reset))(env_keys)
            env = jax.tree.map(lambda x: jax.device_put(x, lane_sharding(run.mesh, x, env_axis=1)), env)
        else:
            env = simulator.reset(env_keys[0])
        return _Training(state, env, run_keys)

    iteration = functools.partial(
        ppo_iteration, simulator=simulator, hyper=hyper, config=static, length=config.unroll
    )
    jitted_iteration = jax.jit(jax.vmap(iteration), donate_argnums=(0, 1))
    update = jax.jit(jax.vmap(functools.partial(ppo.update, hyper=hyper, config=static)), donate_argnums=0)

    def step(training, i):
        keys = jax.vmap(jax.random.fold_in, (0, None))(training.key, i)
        if pure:
            state, env, metrics = jitted_iteration(training.ppo, training.env, keys)
        else:
            collect_keys, update_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
            env, rollout = ppo.collect_host(
                training.ppo,
                training.env,
                collect_keys,
                simulator.auto_reset_step,
                config=static,
                length=config.unroll,
            )
            state, metrics = update(training.ppo, rollout, update_keys)
        run.log((i + 1) * n * config.unroll, jax.tree.map(jnp.mean, metrics), group="simulation")
        return _Training(state, env, training.key)

    training = run.loop(
        "simulation_policy",
        init=init,
        step=step,
        total=config.iterations,
        checkpoint_every=config.checkpoint_every,
        progress=f"PPO in simulation, {lanes} seeds",
    )
    return training.ppo


def blank_source(task, config, modules, state, lanes):
    """A Source `[L, ..]` with pi_sim of PPO's `state`, and zeros where later stages put V_sim and D_sim."""
    observation = jnp.zeros((1, task.observation_size))
    value = jax.vmap(lambda k: modules.value.init(k, observation))(jax.random.split(jax.random.key(0), lanes))
    n = config.sim_episodes * task.episode_length
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    flags, counts = jnp.zeros((lanes, n), bool), jnp.zeros((lanes, n), jnp.int32)
    wide, act = zeros((lanes, n, task.observation_size)), zeros((lanes, n, task.action_size))
    source = Source(
        actor=state.actor,
        value=value,
        value_offset=zeros(lanes),
        value_scale=jnp.ones(lanes),
        stats=state.stats,
        gamma=jnp.full(lanes, task.gamma, jnp.float32),
        simulated=Experience(
            Transition(wide, act, zeros((lanes, n)), wide, flags, flags, counts, counts),
            zeros((lanes, n)),
            zeros((lanes, n)),
        ),
    )
    measured = ["value_loss", "target_variance", "success", "return"]
    measured += ["backup_error"] if config.improve.sweeps else []
    return source, {f"simulation_{key}": zeros(lanes) for key in measured}


def _finish(task, config, modules, state, stage, seeds, backend, run):
    """Refits V_sim, gathers D_sim and scores pi_sim in its own simulator."""
    source, _ = stage
    lanes = len(seeds)
    key = jax.random.fold_in(jax.random.key(seeds[0]), 1)
    refit_key, improve_key, data_key, score_key = jax.random.split(key, 4)
    critic = ppo_config(config, modules).value
    source, metrics = simulation_value.refit(
        task, config, modules, critic, state, source, backend, refit_key, run
    )
    if config.improve.sweeps:
        source, improved = simulation_value.improve(task, config, modules, source, backend, improve_key, run)
        metrics |= improved
    transitions = _simulated_transitions(task, config, modules, source, lanes, backend, data_key)
    values = jax.jit(jax.vmap(functools.partial(sim_value, networks=modules)))
    source = source.replace(
        simulated=Experience(
            transitions, values(source, transitions.observation), values(source, transitions.next_observation)
        )
    )
    success, returns = evaluate_policy(
        sim.make(task, lanes * 50, backend=backend, gaps=dict(task.randomisation)),
        _score_policy(modules),
        source,
        score_key,
        lanes=lanes,
    )
    measured = {**metrics, "success": jnp.asarray(success), "return": jnp.asarray(returns)}
    return source, {f"simulation_{key}": value for key, value in measured.items()}


@functools.lru_cache(maxsize=8)
def _score_policy(modules):
    act = lane_policy(modules)
    return lambda source, observation, key: (source, act(source, observation))


def _simulated_transitions(task, config, modules, source, lanes, backend, key):
    """D_sim: episodes of pi_sim with Gaussian action noise under domain randomisation, `[L, n, ...]`."""
    reset_key, drive_key = jax.random.split(key)
    act = lane_policy(modules)

    def noisy(source, observation, key):
        action = act(source, observation)
        noise = config.sim_action_noise * jax.random.normal(key, action.shape)
        return source, jnp.clip(action + noise, -1.0, 1.0)

    n = config.sim_episodes
    explored = with_exploring_starts(task, config.sim_exploring_share)
    simulator = sim.make(explored, lanes * n, backend=backend, gaps=dict(task.randomisation))
    length = task.episode_length
    _, _, steps = drive(simulator, simulator.reset(reset_key), noisy, source, drive_key, length=length)

    def rows(x):  # [T, L * n, ...] -> [L, n * T, ...]
        x = jnp.moveaxis(jnp.asarray(x), 0, 1)
        return x.reshape(lanes, n * length, *x.shape[2:])

    shape = (length, lanes * n)
    episode = jnp.broadcast_to(jnp.tile(jnp.arange(n, dtype=jnp.int32), lanes), shape)
    t = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], shape)
    return jax.tree.map(
        rows,
        Transition(
            steps.observation,
            steps.action,
            steps.reward,
            steps.final_observation,
            steps.terminated,
            steps.truncated,
            episode,
            t,
        ),
    )


def evaluate_policy(simulator, policy, carry, key, *, lanes):
    """Plays one full episode in each of L * N environments.

    Args:
      simulator: of L * N environments, lane after lane.
      policy, carry: as in core.sim.drive.

    Returns:
      success rate (at the last step) and mean unshaped return, numpy `[L]` each.
    """
    reset_key, drive_key = jax.random.split(key)
    length = simulator.task.episode_length
    _, _, steps = drive(simulator, simulator.reset(reset_key), policy, carry, drive_key, length=length)
    ended = np.cumsum(np.asarray(steps.terminated | steps.truncated), axis=0)
    # Everything after the first end belongs to the next episode.
    alive = np.concatenate([np.zeros((1, ended.shape[1])), ended[:-1]]) == 0
    returns = (np.asarray(steps.reward) * alive).sum(0)
    last = alive.sum(0) - 1
    success = np.take_along_axis(np.asarray(steps.success), last[None], axis=0)[0]
    by_lane = (lanes, -1)
    return success.reshape(by_lane).mean(1), returns.reshape(by_lane).mean(1)
