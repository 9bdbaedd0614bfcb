"""What --mode=check lowers: every step of both stages, on the configured mesh, with abstract arguments."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from core import sim
from core.check import Function
from core.rl import ppo
from core.sim.branch import branch
from core.sim.drive import drive
from core.sim.task import with_exploring_starts
from robotics.sgft import finetune, methods, pretrain, simulation_value, value_improvement, value_refit
from robotics.sgft.model_based import ModelBasedState
from robotics.sgft.source import lane_policy

__all__ = ["functions"]

_float = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
_flag = functools.partial(jax.ShapeDtypeStruct, dtype=bool)
_count = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)


def functions(config: ConfigDict, mesh: Mesh) -> list[Function]:
    """The steps of a run as accelerators would run them, the simulator on MJX whatever `config.sim.backend`.

    Leaves `[L, ...]` (a lane per seed) are split over the mesh's data axis where it divides L; those of
    environments `[L, N, ...]`, failing that, where it divides N. `parameters` are those of one lane. One
    rollout stands for all that drive pi_sim in simulation. Nothing but the simulator's model is allocated.
    """
    parts = methods.make(config)
    state = _abstract(
        jax.vmap(functools.partial(_init_ppo, config=config, parts=parts)), _keys(len(parts.seeds))
    )
    source, _ = _abstract(
        lambda state: pretrain.blank_source(
            parts.task, config.pretrain, parts.networks, state, len(parts.seeds)
        ),
        state,
    )
    found = [_iteration(config, parts, state, mesh), _rollout(config, parts, source, mesh)]
    found += [_targets(config, parts, mesh), _refit(config, parts, mesh)]
    found += _improve(config, parts, source, mesh)
    for name, settings in config.agents.items():
        found += _agent(name, settings, config, parts, source, mesh)
    return found


def _init_ppo(key, *, config, parts):
    static = pretrain.ppo_config(config.pretrain, parts.networks)
    return ppo.init(key, config=static, observation_size=parts.task.observation_size)


def _iteration(config, parts, state, mesh):
    lanes, options = len(parts.seeds), config.pretrain
    task = with_exploring_starts(parts.task, options.exploring_share)
    simulator = sim.make(task, options.num_envs, backend="mjx", gaps=dict(task.randomisation))
    iteration = functools.partial(
        pretrain.ppo_iteration,
        simulator=simulator,
        hyper=ppo.Hyper.arrays(gamma=config.gamma),
        config=pretrain.ppo_config(options, parts.networks),
        length=options.unroll,
    )
    keys = _keys(lanes)
    env = _abstract(jax.vmap(simulator.reset), keys)
    args = (_split(mesh, state), _split(mesh, env, env_axis=1), _split(mesh, keys))
    fn = jax.jit(jax.vmap(iteration), donate_argnums=(0, 1))
    return Function("simulation_policy/iteration", fn, args, _size((state.actor, state.value)) // lanes)


def _rollout(config, parts, source, mesh):
    lanes, options = len(parts.seeds), config.pretrain.refit
    n, length = lanes * options.num_envs, options.disturbed_steps + options.horizon
    simulator = simulation_value.wide_simulator(parts.task, options, lanes, backend="mjx")
    policy = value_refit.make_policy(lane_policy(parts.networks))
    draw = functools.partial(value_refit.init_disturbance, n=n, action_size=parts.task.action_size, longest=1)

    def rollout(env, carry, key):
        return drive(simulator, env, policy, carry, key, length=length)

    env, disturbance = _abstract(simulator.reset, _key()), _abstract(draw, _key())
    args = (_split(mesh, env), (_split(mesh, source), _split(mesh, disturbance)), _key())
    return Function("simulation_value/rollout", rollout, args, _size(source.actor) // lanes)


def _targets(config, parts, mesh):
    lanes, options = len(parts.seeds), config.pretrain.refit
    targets = functools.partial(value_refit.monte_carlo_targets, gamma=config.gamma, keep=options.keep)
    n = (lanes, options.num_envs)
    shape = (lanes, options.disturbed_steps + options.horizon, options.num_envs)
    steps = _float((*shape, parts.task.observation_size)), _float(shape), _flag(shape)
    args = (
        *_split(mesh, steps, env_axis=2),
        *_split(mesh, (_float(n), _count(n)), env_axis=1),
    )
    return Function("simulation_value/targets", jax.jit(jax.vmap(targets)), args, 0)


def _refit(config, parts, mesh):
    lanes, options = len(parts.seeds), config.pretrain.refit
    refit = functools.partial(simulation_value.refit_value, config=config.pretrain, modules=parts.networks)
    size = parts.task.observation_size
    m = (lanes, options.rounds * options.num_envs * options.keep)
    targets = value_refit.Targets(_float((*m, size)), _float(m))
    args = _split(mesh, (_keys(lanes), targets))
    value = _abstract(lambda k: parts.networks.value.init(k, jnp.zeros((1, size))), _key())
    return Function("simulation_value/refit", jax.jit(jax.vmap(refit)), args, _size(value))


def _improve(config, parts, source, mesh):
    options = config.pretrain.improve
    if not options.sweeps:
        return []
    lanes, size = len(parts.seeds), parts.task.observation_size
    n = lanes * options.num_envs
    simulator = simulation_value.wide_simulator(parts.task, options, lanes, backend="mjx")
    hold = functools.partial(branch, simulator, horizon=options.horizon, gamma=config.gamma)
    actions = _float((options.candidates, n, parts.task.action_size))
    env = _split(mesh, _abstract(simulator.reset, _key()))
    improve = functools.partial(
        simulation_value.improve_value, config=config.pretrain, modules=parts.networks
    )
    m = (lanes, options.sweeps * options.steps * options.num_envs)
    each = (*m, options.candidates)
    tried = value_improvement.Alternatives(
        _float((*m, size)), _float((*each, size)), _float(each), _float(each)
    )
    args = _split(mesh, (_keys(lanes), source, tried))
    return [
        Function("simulation_value/try", hold, (env, actions), 0),
        Function("simulation_value/improve", jax.jit(jax.vmap(improve)), args, _size(source.value) // lanes),
    ]


def _agent(name, settings, config, parts, source, mesh):
    agent, lanes = methods.agent(settings, config, parts), settings.seeds
    size = parts.task.observation_size
    source = _resized(source, lanes)
    options = _abstract(lambda: agent.options)
    init = jax.vmap(agent.init, (0, 0, None))
    state = _abstract(init, _keys(lanes), source, options)
    explore, exploit, learn = finetune.lane_functions(agent.explore, agent.exploit, agent.learn)
    parameters = _size(_trained(state)) // lanes
    observations = _float((lanes, size)), _float((lanes * config.evaluation.episodes, size))
    experience = _resized(source.simulated, lanes, config.block)
    keys = _keys(lanes)
    state, source, keys, (one, many), experience = _split(
        mesh, (state, source, keys, observations, experience)
    )
    return [
        Function(f"{name}/init", jax.jit(init), (keys, source, options), parameters),
        Function(f"{name}/explore", explore, (state, source, one, keys), parameters),
        Function(f"{name}/exploit", exploit, ((state, source), many, _key()), parameters),
        Function(f"{name}/learn", learn, (state, source, experience, keys), parameters),
    ]


def _trained(state):
    return state.model.params if isinstance(state, ModelBasedState) else (state.sac.actor, state.sac.critic)


def _abstract(fn, *args):
    return jax.eval_shape(fn, *args)


def _key():
    return _abstract(lambda: jax.random.key(0))


def _keys(n):
    return _abstract(lambda: jax.random.split(jax.random.key(0), n))


def _resized(tree, *lead):
    """The same leaves with other leading sizes."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape[len(lead) :]), leaf.dtype), tree
    )


def _split(mesh, tree, *, env_axis=None):
    """Puts every leaf on the mesh: over lanes (axis 0) if "data" divides them, else over environments."""

    def place(leaf):
        sharding = pretrain.lane_sharding(mesh, leaf, env_axis=env_axis)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def _size(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
