"""Stage 1, in simulation: PPO under domain randomisation, V_sim refitted, simulated transitions kept.

Lanes are seeds: every seed has its own simulation stage, all of them run side by side.
"""

from __future__ import annotations

import dataclasses
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
from core.rl import normalize, ppo
from core.rl.networks import Actor, Value, ValueEnsemble
from core.rl.replay import Transition
from core.sim.branch import branch
from core.sim.drive import drive
from core.sim.pure import PureSimulator
from core.sim.task import Task
from robotics.sgft import value_improvement, value_refit
from robotics.sgft.source import Experience, Networks, Source, policy_action, sim_value
from robotics.sgft.value_improvement import Alternatives

__all__ = [
    "blank_source",
    "evaluate_policy",
    "fit",
    "improve_value",
    "lane_policy",
    "lane_sharding",
    "networks",
    "ppo_config",
    "ppo_iteration",
    "refit_value",
    "with_exploring_starts",
]

UNLIMITED = 1 << 30


def networks(config: ConfigDict, action_size: int) -> Networks:
    """pi_sim and V_sim as `config.pretrain` describes them."""
    actor = Actor(action_size, tuple(config.actor_features), nn.tanh, log_std_init=config.log_std_init)
    # Layer norm and relu: V_sim has edges, where contact begins, that a small tanh network blurs.
    return Networks(actor, ValueEnsemble(config.value_members, tuple(config.value_features)))


def ppo_config(config: ConfigDict, modules: Networks) -> ppo.Config:
    """PPO's static part: pi_sim's network, a critic of the policy's size, epochs and minibatches."""
    critic = Value(tuple(config.actor_features), nn.tanh)
    return ppo.Config(modules.actor, critic, epochs=config.epochs, minibatches=config.minibatches)


def with_exploring_starts(task: Task, share: float, *, episode_length: int | None = None) -> Task:
    """The task with a `share` of its episodes starting from its `exploring_reset` instead."""
    nominal, exploring = task.reset, task.exploring_reset

    def reset(key, gap):
        choice, key = jax.random.split(key)
        explore = jax.random.uniform(choice) < share
        return jax.tree.map(lambda a, b: jnp.where(explore, a, b), exploring(key, gap), nominal(key, gap))

    return dataclasses.replace(task, reset=reset, episode_length=episode_length or task.episode_length)


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


def lane_policy(modules):
    """pi_sim of every lane on `[L * N, O]` observations."""

    def act(source, observation):
        lanes = source.gamma.shape[0]
        by_lane = observation.reshape(lanes, -1, observation.shape[-1])
        action = jax.vmap(functools.partial(policy_action, networks=modules))(source, by_lane)
        return action.reshape(observation.shape[0], -1)

    return act


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


def refit_targets(observation, reward, terminated, tail, start, *, gamma, keep):
    """What V_sim of one lane is fitted to, from disturbed rollouts of pi_sim; pure, jit-able.

    Args:
      observation, reward, terminated: `[T, N, ...]`; tail: `[N]`, the value of the state after them.
      start: `[N]`, the first undisturbed step of each rollout.
      gamma: discount. keep: how many states from `start` on.

    Returns:
      value_refit.Targets.
    """
    return value_refit.monte_carlo_targets(
        observation, reward, terminated, tail, start, gamma=gamma, keep=keep
    )


def refit_value(key, targets, *, config, modules):
    """V_sim of one lane from its Targets `[M]`; returns as value_refit.fit. Pure, jit-able."""
    return value_refit.fit(
        key,
        targets.observation,
        targets.value,
        network=modules.value,
        epochs=config.refit.epochs,
        batch=config.refit.batch,
        lr=config.refit.lr,
    )


def _wide_simulator(task, options, lanes, backend):
    wide = with_exploring_starts(task, options.exploring_share, episode_length=UNLIMITED)
    return sim.make(wide, lanes * options.num_envs, backend=backend, gaps=dict(task.randomisation))


def _by_lane(x, lanes):
    """`[T, L * N, ...]` -> `[L, T, N, ...]`."""
    x = jnp.asarray(x)
    return jnp.moveaxis(x.reshape(x.shape[0], lanes, -1, *x.shape[2:]), 1, 0)


def _refit(task, config, modules, state, source, backend, key, run):
    """V_sim as pi_sim's own value: fitted to returns of disturbed rollouts, which PPO's critic closes."""
    lanes, options = source.gamma.shape[0], config.refit
    rollout_key, fit_key = jax.random.split(key)
    critic = ppo_config(config, modules).value
    simulator = _wide_simulator(task, options, lanes, backend)
    policy = value_refit.make_policy(lane_policy(modules))
    make = jax.jit(jax.vmap(functools.partial(refit_targets, gamma=task.gamma, keep=options.keep)))
    tail = jax.jit(jax.vmap(lambda p, stats, x: critic.apply(p, normalize.apply(stats, x))))

    def one_round(key):
        reset_key, disturb_key, drive_key = jax.random.split(key, 3)
        disturbance = value_refit.init_disturbance(
            disturb_key,
            lanes * options.num_envs,
            task.action_size,
            longest=options.disturbed_steps,
            largest=options.largest_offset,
        )
        length = options.disturbed_steps + options.horizon
        carry = (source, disturbance)
        _, _, steps = drive(simulator, simulator.reset(reset_key), policy, carry, drive_key, length=length)
        by_lane = functools.partial(_by_lane, lanes=lanes)
        last = by_lane(steps.final_observation[-1:])[:, 0]
        return make(
            *map(by_lane, (steps.observation, steps.reward, steps.terminated)),
            tail(state.value, source.stats, last),
            disturbance.remaining.reshape(lanes, -1),
        )

    with run.progress(options.rounds, "rollouts for V_sim") as tracker:
        found = []
        for round_key in jax.random.split(rollout_key, options.rounds):
            found.append(one_round(round_key))
            tracker.advance()
    targets = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *found)
    fit_value = jax.jit(jax.vmap(functools.partial(refit_value, config=config, modules=modules)))
    value, offset, scale, metrics = fit_value(jax.random.split(fit_key, lanes), targets)
    run.log(0, jax.tree.map(jnp.mean, metrics), group="simulation_value")
    return source.replace(value=value, value_offset=offset, value_scale=scale), metrics


def improve_value(key, source, alternatives, *, config, modules):
    """V_sim of one lane from its Alternatives `[M, ...]`; returns as value_improvement.improve."""
    return value_improvement.improve(
        key,
        source.value,
        alternatives,
        network=modules.value,
        offset=source.value_offset,
        scale=source.value_scale,
        updates=config.improve.updates,
        batch=config.improve.batch,
        lr=config.improve.lr,
        tau=config.improve.tau,
    )


def _improve(task, config, modules, source, backend, key, run):
    """V_sim as the best policy's value: sweeps of planning on it in simulation, then value iteration.

    The planner tries every candidate in the simulator itself; V_sim is fitted to all that was tried, in just
    the states that planning on V_sim leads to.
    """
    lanes, options = source.gamma.shape[0], config.improve
    simulator = _wide_simulator(task, options, lanes, backend)
    improve = jax.jit(jax.vmap(functools.partial(improve_value, config=config, modules=modules)))
    tried, metrics = [], {}
    with run.progress(options.sweeps * options.steps, "planning in simulation") as tracker:
        for sweep in range(options.sweeps):
            play_key, fit_key = jax.random.split(jax.random.fold_in(key, sweep))
            tried += _play_planner(task, options, modules, source, simulator, play_key, tracker)
            alternatives = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *tried)
            value, metrics = improve(jax.random.split(fit_key, lanes), source, alternatives)
            source = source.replace(value=value)
            run.log(sweep, jax.tree.map(jnp.mean, metrics), group="simulation_value")
    return source, metrics


def _play_planner(task, options, modules, source, simulator, key, tracker):
    """What the planner tried in `options.steps` steps of L * N environments: Alternatives `[L, N, ..]` each.

    It plays the best candidate, or, for `options.exploring` of the time and on, a random one.
    """
    lanes, n = source.gamma.shape[0], simulator.num_envs
    reset_key, play_key = jax.random.split(key)
    choose = _chooser(modules, options.exploring)
    env = simulator.reset(reset_key)
    held = jnp.zeros((n, task.action_size)), jnp.zeros(n, bool)
    tried = []
    for step_key in jax.random.split(play_key, options.steps):
        action_key, choice_key = jax.random.split(step_key)
        shape = (options.candidates, n, task.action_size)
        # A little beyond the limits, then clipped: the best action is often the strongest.
        actions = jnp.clip(1.2 * jax.random.uniform(action_key, shape, minval=-1.0, maxval=1.0), -1.0, 1.0)
        found = branch(simulator, env, np.asarray(actions), horizon=options.horizon, gamma=task.gamma)
        leaves = (env.observation, *found)
        rows = Alternatives(*(jnp.asarray(x).reshape(lanes, -1, *x.shape[1:]) for x in leaves))
        held = choose(source, rows, actions, held, choice_key)
        env = simulator.auto_reset_step(env, np.asarray(held[0]))
        tried.append(rows)
        tracker.advance()
    return tried


@functools.lru_cache(maxsize=8)
def _chooser(modules, exploring):
    @jax.jit
    def choose(source, rows, actions, held, key):
        previous, was_random = held
        values = jax.vmap(functools.partial(sim_value, networks=modules))(source, rows.reached)
        best = jnp.argmax(rows.earned + rows.discount * values, axis=-1).reshape(-1)
        index = jnp.arange(best.shape[0])
        begin_key, on_key = jax.random.split(key)
        # Candidates come in no order: the first is a random one.
        begins = jax.random.bernoulli(begin_key, exploring, best.shape)
        goes_on = was_random & jax.random.bernoulli(on_key, 0.5, best.shape)
        fresh = actions[jnp.where(begins, 0, best), index]
        return jnp.where(goes_on[:, None], previous, fresh), begins | goes_on

    return choose


def _finish(task, config, modules, state, stage, seeds, backend, run):
    """Refits V_sim, gathers D_sim and scores pi_sim in its own simulator."""
    source, _ = stage
    lanes = len(seeds)
    key = jax.random.fold_in(jax.random.key(seeds[0]), 1)
    refit_key, improve_key, data_key, score_key = jax.random.split(key, 4)
    source, metrics = _refit(task, config, modules, state, source, backend, refit_key, run)
    if config.improve.sweeps:
        source, improved = _improve(task, config, modules, source, backend, improve_key, run)
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
