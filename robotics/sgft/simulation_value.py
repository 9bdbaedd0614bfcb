"""V_sim in simulation: pi_sim's value from disturbed rollouts, then improved by planning on it there.

Lanes are seeds, side by side, as in `pretrain`, which runs this between PPO and the simulated transitions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from core import sim
from core.rl import normalize
from core.sim.branch import branch
from core.sim.drive import drive
from core.sim.task import with_exploring_starts
from robotics.sgft import value_improvement, value_refit
from robotics.sgft.source import lane_policy, sim_value
from robotics.sgft.value_improvement import Alternatives

__all__ = ["choose", "improve", "improve_value", "refit", "refit_value", "wide_simulator"]

UNLIMITED = 1 << 30


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


def wide_simulator(task, options, lanes, *, backend):
    """`lanes * options.num_envs` randomised environments without a time limit; a share starts anywhere.

    The simulator is of core.sim, its observations `[L * N, O]` lane after lane.
    """
    wide = with_exploring_starts(task, options.exploring_share, episode_length=UNLIMITED)
    return sim.make(wide, lanes * options.num_envs, backend=backend, gaps=dict(task.randomisation))


def _by_lane(x, lanes):
    """`[T, L * N, ...]` -> `[L, T, N, ...]`."""
    x = jnp.asarray(x)
    return jnp.moveaxis(x.reshape(x.shape[0], lanes, -1, *x.shape[2:]), 1, 0)


def refit(task, config, modules, critic, state, source, backend, key, run):
    """V_sim as pi_sim's own value: fitted to returns of disturbed rollouts, which PPO's critic closes.

    `source`, with a lane axis `[L, ...]`, has pi_sim; `state` is PPO's, `critic` its value network. Returns
    (source with V_sim, metrics `[L]`).
    """
    lanes, options = source.gamma.shape[0], config.refit
    rollout_key, fit_key = jax.random.split(key)
    simulator = wide_simulator(task, options, lanes, backend=backend)
    policy = value_refit.make_policy(lane_policy(modules))
    make = jax.jit(
        jax.vmap(functools.partial(value_refit.monte_carlo_targets, gamma=task.gamma, keep=options.keep))
    )
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


def improve(task, config, modules, source, backend, key, run):
    """V_sim as the best policy's value: sweeps of planning on it in simulation, then value iteration.

    The planner tries every candidate in the simulator itself; V_sim is fitted to all that was tried, in just
    the states that planning on V_sim leads to. Returns (source `[L, ...]` with the new V_sim, metrics `[L]`).
    """
    lanes, options = source.gamma.shape[0], config.improve
    simulator = wide_simulator(task, options, lanes, backend=backend)
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
    """What was tried in `options.steps` steps of L * N environments: Alternatives `[L, N, ..]` each."""
    lanes, n = source.gamma.shape[0], simulator.num_envs
    reset_key, play_key = jax.random.split(key)
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
        held = _choose(source, rows, actions, held, choice_key, modules=modules, exploring=options.exploring)
        env = simulator.auto_reset_step(env, np.asarray(held[0]))
        tried.append(rows)
        tracker.advance()
    return tried


def choose(source, tried, actions, held, key, *, modules, exploring):
    """Which of the tried actions every environment of one or more lanes plays next; pure, jit-able.

    The best one, by what it earned and V_sim beyond; or, with probability `exploring`, a random one that goes
    on for another step with probability 1/2.

    Args:
      tried: Alternatives `[L, N, ...]` of `actions` `[C, L * N, A]`, which come in no order.
      held: (action `[L * N, A]`, bool `[L * N]`): what was played before, and whether at random.

    Returns:
      the next `held`.
    """
    previous, was_random = held
    values = jax.vmap(functools.partial(sim_value, networks=modules))(source, tried.reached)
    best = jnp.argmax(tried.earned + tried.discount * values, axis=-1).reshape(-1)
    begin_key, on_key = jax.random.split(key)
    begins = jax.random.bernoulli(begin_key, exploring, best.shape)
    goes_on = was_random & jax.random.bernoulli(on_key, 0.5, best.shape)
    # Candidates come in no order: the first is a random one.
    fresh = actions[jnp.where(begins, 0, best), jnp.arange(best.shape[0])]
    return jnp.where(goes_on[:, None], previous, fresh), begins | goes_on


_choose = jax.jit(choose, static_argnames="modules")
