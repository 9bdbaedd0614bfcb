"""The experiment: a simulation stage per seed, then every method on the same real robot, then the claims."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from core import figures
from core.files import write_bytes
from core.run import Run
from core.sim import NativeSimulator, Solver, render
from robotics.sgft import checks, claims, finetune, methods, pretrain, tabular_figures, transfer
from robotics.sgft.source import Source, lane_policy, policy_action, save, sim_value

__all__ = ["evaluate", "example", "functions", "load", "run", "validate"]

LABELS = {
    "zero_shot": "zero-shot",
    "sgft_mb": "SGFT-MB",
    "sgft_sac": "SGFT-SAC",
    "sac_finetune": "SAC fine-tuning",
    "sgft_mb_no_value": "planner without V_sim",
    "sac_scratch": "SAC from scratch",
    "pbrs_sac": "PBRS-SAC",
    "rlpd": "RLPD",
}

validate = methods.validate
functions = checks.functions


def run(config: ConfigDict, run: Run) -> dict[str, Any]:
    """Both stages, all methods, figures, claims and summary; returns the numbers of the summary."""
    parts = methods.make(config)
    source, numbers = _simulation(config, parts, run)
    zero_shot, measured = _zero_shot(config, parts, source)
    numbers.update(measured)
    curves, states = {}, {}
    for name, settings in config.agents.items():
        states[name] = _finetune(name, settings, config, parts, source, run)
        curves[name] = _learned(states[name], settings)
    numbers.update(claims.measure(curves, zero_shot, threshold=config.threshold))
    _keep(config, parts, source, curves, run)
    _figures(config, parts, source, states, curves, numbers, run)
    run.summary(claims=claims.summarise(numbers, curves), metrics=numbers, seeds=parts.seeds)
    return numbers


def evaluate(config: ConfigDict, run: Run) -> dict[str, Any]:
    """Success rate and unshaped return `[seeds]` of every method as last saved, on the real robot."""
    parts = methods.make(config)
    source, _ = _simulation(config, parts, run)
    results = {}
    for name, settings in config.agents.items():
        state = _finetune(name, settings, config, parts, source, run)
        lanes = settings.seeds
        agent = methods.agent(settings, config, parts)
        _, exploit, _ = finetune.lane_functions(agent.explore, agent.exploit, agent.learn)
        success, returns = pretrain.evaluate_policy(
            _robot(config, parts, lanes * config.evaluation.episodes),
            exploit,
            (state.agent, _lanes(source, lanes)),
            jax.random.fold_in(jax.random.key(config.seed), 4),
            lanes=lanes,
        )
        results[name] = {"success": success.tolist(), "return": returns.tolist()}
    return results


def load(config: ConfigDict, run: Run) -> tuple[Any, Any]:
    """What `config.deploy` learned on the first seed, and `apply(params, observation [B, O]) -> [B, A]`."""
    parts = methods.make(config)
    source, _ = _simulation(config, parts, run)
    name, settings = config.deploy, config.agents[config.deploy]
    state = _finetune(name, settings, config, parts, source, run)
    agent = methods.agent(settings, config, parts)
    first = jax.tree.map(
        lambda leaf: leaf[0], (finetune.deployed(state.agent), source.replace(simulated=None))
    )

    def apply(params, observation):
        state, source = params
        return agent.exploit(state, source, observation, jax.random.key(0))

    return first, apply


def example(config: ConfigDict) -> tuple[jax.ShapeDtypeStruct]:
    """The input of `apply`: observations `[B, O]`."""
    size = methods.make(config).task.observation_size
    return (jax.ShapeDtypeStruct((1, size), jnp.float32),)


def _simulation(config, parts, run) -> tuple[Source, dict[str, Any]]:
    return pretrain.fit(parts.task, config.pretrain, parts.seeds, backend=config.sim.backend, run=run)


def _robot(config, parts, n):
    """The real robot, n times: native MuJoCo with other solver settings and the hidden gap."""
    return NativeSimulator(parts.task, n, gaps=parts.task.gap(config.gap), solver=Solver())


def _lanes(source, lanes):
    return jax.tree.map(lambda leaf: leaf[:lanes], source)


def _finetune(name, settings, config, parts, source, run):
    lanes = settings.seeds
    value = functools.partial(sim_value, networks=parts.networks)
    return finetune.run_lanes(
        name,
        methods.agent(settings, config, parts),
        _lanes(source, lanes),
        _robot(config, parts, lanes),
        seeds=parts.seeds[:lanes],
        schedule=finetune.Schedule(settings.steps, config.block, config.evaluation.every),
        value=_values(value),
        control_seconds=parts.task.control_dt,
        run=run,
        evaluation=_robot(config, parts, lanes * config.evaluation.episodes),
        checkpoint_every=config.checkpoint_every,
    )


@functools.lru_cache(maxsize=8)
def _values(value):
    return jax.jit(jax.vmap(value))


def _zero_shot(config, parts, source):
    """pi_sim on the real robot, and what V_sim is worth there: foresight, and whether actions raise it."""
    lanes = len(parts.seeds)
    act = lane_policy(parts.networks)
    value = functools.partial(sim_value, networks=parts.networks)
    robot = _robot(config, parts, lanes * config.evaluation.episodes)
    key = jax.random.fold_in(jax.random.key(config.seed), 3)
    success, returns = pretrain.evaluate_policy(
        robot, lambda source, x, key: (source, act(source, x)), source, key, lanes=lanes
    )
    correlation, share = transfer.value_transfer(
        robot, jax.jit(act), _values(value), source, key, lanes=lanes
    )
    return returns, {
        "zero_shot/success": success,
        "zero_shot/return": returns,
        "zero_shot/value_correlation": correlation,
        "zero_shot/improvable_share": share,
    }


def _keep(config, parts, source, curves, run):
    """What others may want to go on from: pi_sim and V_sim of each seed, and all learning curves."""
    for i, seed in enumerate(parts.seeds):
        lane = jax.tree.map(lambda leaf, i=i: leaf[i], source.replace(simulated=None))
        save(run.workdir / "simulation" / f"seed{seed}.npz", lane, reward=parts.task.name)
    write_bytes(run.workdir / "curves.csv", claims.as_csv(curves, parts.seeds).encode())


def _learned(state, settings) -> claims.Learned:
    curve = jax.tree.map(np.asarray, state.curve)
    return claims.Learned(
        curve.steps[0], curve.episodes[0], curve.seconds[0], curve.success, curve.returns, settings.steps
    )


def _figures(config, parts, source, states, curves, numbers, run):
    labelled = {LABELS.get(name, name): curve for name, curve in curves.items()}
    for key, ylabel in (("success", "success rate"), ("returns", "unshaped return")):
        run.figure(
            f"{key}_against_real_steps",
            figures.curves(
                {label: (curve.steps, getattr(curve, key)) for label, curve in labelled.items()},
                xlabel="real control steps",
                ylabel=ylabel,
                title=f"{parts.task.name} on the real robot, gap {config.gap!r}",
                threshold=config.threshold if key == "success" else None,
            ),
            f"{ylabel.capitalize()} after so many real steps, {config.evaluation.episodes} episodes per "
            "point and seed; the band is the middle half of the seeds.",
        )
    run.figure(
        "steps_to_threshold",
        figures.bars(
            {
                label: numbers[f"{name}/steps_to_threshold"]
                for (name, _), label in zip(curves.items(), labelled)
            },
            xlabel="real control steps",
            title=f"Steps to success rate {config.threshold:g}",
        ),
        "Real control steps until the success threshold is reached and held; a bar at the budget is a bound.",
    )
    agent = methods.agent(config.agents[config.deploy], config, parts)
    for name, exploit, state in (
        ("zero_shot", lambda state, source, x, key: policy_action(source, x, networks=parts.networks), ()),
        (config.deploy, agent.exploit, jax.tree.map(lambda leaf: leaf[0], states[config.deploy].agent)),
    ):
        run.figure(
            f"rollout_{name}",
            _film_strip(config, parts, exploit, state, jax.tree.map(lambda leaf: leaf[0], source)),
            f"One episode of {LABELS.get(name, name)} on the real robot, seed {parts.seeds[0]}.",
        )
    if not config.tabular:
        return
    run.figure(
        "tabular_exact", tabular_figures.figure_exact(), "The idea, exactly solved: see docs/methods/sgft.md."
    )
    run.figure(
        "tabular_finite_data", tabular_figures.figure_finite_data(), "The idea with few real transitions."
    )
    run.figure(
        "counter_example",
        tabular_figures.figure_counter_example(),
        "Where the idea fails: V_sim not improvable.",
    )


def _film_strip(config, parts, exploit, state, source):
    robot, act = _robot(config, parts, 1), jax.jit(exploit)
    env = robot.reset(jax.random.fold_in(jax.random.key(config.seed), 5))
    physics = [env.physics[0]]
    for t in range(parts.task.episode_length):
        action = act(state, source, np.asarray(env.observation), jax.random.key(t))
        env = robot.step(env, np.asarray(action))
        physics.append(env.physics[0])
    return render.film_strip(parts.task, np.stack(physics), gap=parts.task.gap(config.gap))
