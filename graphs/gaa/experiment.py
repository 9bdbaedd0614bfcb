"""The experiment: every row on every task, seeds and rules as lanes of one program, then table and claims."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from core import figures, mesh, ranges
from core.errors import UserError, nearest
from core.files import write_bytes
from core.ranges import ANY, COUNT, NATURAL, NOT_NEGATIVE, POSITIVE, SHARE
from core.run import Run
from graphs.gaa import lanes as lanes_of
from graphs.gaa import outcome, problem, rows, sparse
from graphs.gaa.networks import Channel, Domain
from graphs.gaa.training import Scores, TrainState

__all__ = ["evaluate", "example", "load", "run", "validate"]

NUMBERS = {
    "seed": NATURAL,
    "num_seeds": COUNT,
    "check.devices": COUNT,
    "checkpoint_every": COUNT,
    "families.*.classes": COUNT,
    "data.width": COUNT,
    "knn.*": COUNT,
    "walks.*": COUNT,
    "hidden": COUNT,
    "score_every": COUNT,
    "tasks_at_once": COUNT,
    "held_out": SHARE,
    "rows.*.steps": COUNT,
    "rows.*.lr": POSITIVE,
    "rows.*.dropout": SHARE,
    "rows.*.share": SHARE,
    "rows.*.start": NATURAL,
    "rows.*.every": COUNT,
    "rows.*.layers": COUNT,
    "rows.*.hops": NATURAL,
    "rows.*.critic_steps": COUNT,
    "rows.*": NOT_NEGATIVE,
    "mesh.*": ANY,
    "expected.*": ANY,
}


class Running(flax.struct.PyTreeNode):
    """All of a row in training: the lanes of the current tasks, and Scores `[T, 2, S, P]` so far."""

    lanes: TrainState
    scores: Scores


def validate(config: ConfigDict) -> None:
    """Raises UserError for what no run could work with, naming the key and what it may be."""
    ranges.check(config, NUMBERS)
    problem.validate_tasks(config)
    if config.deploy not in config.rows:
        hint = nearest(config.deploy, config.rows)
        raise UserError(f"config.deploy={config.deploy!r}{hint}; one of {', '.join(config.rows)}")
    for name, row in config.rows.items():
        if row.kind not in rows.KINDS:
            hint = nearest(row.kind, rows.KINDS)
            raise UserError(f"config.rows.{name}.kind={row.kind!r}{hint}; one of {', '.join(rows.KINDS)}")
        if row.steps % config.score_every:
            raise UserError(
                f"config.rows.{name}.steps={row.steps} is not a multiple of "
                f"config.score_every={config.score_every}"
            )
        try:
            rows.make(row, classes=2, hidden=config.hidden)
        except UserError as error:
            raise UserError(f"config.rows.{name}: {error}") from None


def run(config: ConfigDict, run: Run) -> dict[str, Any]:
    """All rows on all tasks, table, figures, claims and summary; returns the numbers of the summary."""
    found, seeds, tasks = _outcomes(config, run)
    _write_table(outcome.table(found, tasks, _rerun(config)), run)
    _figures(found, tasks, run)
    numbers = outcome.numbers(found, tasks)
    run.summary(claims=outcome.claims(found), metrics=numbers, seeds=seeds)
    return numbers


def evaluate(config: ConfigDict, run: Run) -> dict[str, Any]:
    """The numbers of the summary, from the scores in the newest checkpoints: steps not done yet count 0."""
    found, _, tasks = _outcomes(config, run)
    return outcome.numbers(found, tasks)


def load(config: ConfigDict, run: Run) -> tuple[Any, Callable]:
    """What `config.deploy` learned on the last task with all labels, first seed, and how to use it.

    `apply(params, x [N, F], {channel: (receiver [E], sender [E], weight [E])}) -> logits [N, C]`, where the
    channels hold the entries of the matrices that the row propagates with, see domains.views.
    """
    family = list(config.families)[-1]
    row = _rows(config, family)[config.deploy]
    given = problem.load(config, family, row.channels)
    seeds = [config.seed + i for i in range(config.num_seeds)]
    steps = config.rows[config.deploy].steps
    lanes = _train(config.deploy, row, steps, config, family, given, seeds, run).lanes  # of the last tasks

    def apply(params, x, channels):
        n = x.shape[0]
        made = {name: Channel(sparse.from_coo(*entries, shape=(n, n))) for name, entries in channels.items()}
        unknown = jnp.full(n, -1, jnp.int32)
        return row.method.predict(params, Domain(x, made, unknown, jnp.ones(n, bool)))

    return jax.tree.map(lambda leaf: leaf[-1, 0], lanes.method), apply


def example(config: ConfigDict) -> tuple[Any, ...]:
    """The inputs of `apply`: `[N, F]` and `[E]` as large as the last task's target."""
    family = list(config.families)[-1]
    row = _rows(config, family)[config.deploy]
    given = problem.load(config, family, row.channels)
    target = given.domains[given.tasks[-1][1]]
    entries = {name: channel.p.rows.data.shape for name, channel in target.channels.items()}
    index, weight = (functools.partial(jax.ShapeDtypeStruct, dtype=kind) for kind in (jnp.int32, jnp.float32))
    channels = {name: (index(shape), index(shape), weight(shape)) for name, shape in entries.items()}
    return weight(target.x.shape), channels


def _outcomes(config, run):
    """({row: Outcome over all tasks}, seeds, tasks)."""
    seeds = [config.seed + i for i in range(config.num_seeds)]
    scores: dict[str, list[Scores]] = {name: [] for name in config.rows}
    for family in config.families:
        made = _rows(config, family)
        given = problem.load(config, family, _channels(made))
        for name, row in made.items():
            trained = _train(name, row, config.rows[name].steps, config, family, given, seeds, run)
            scores[name].append(trained.scores)
    found = {
        name: outcome.select(Scores(*(np.concatenate(parts) for parts in zip(*some))))
        for name, some in scores.items()
    }
    return found, seeds, [task for family in config.families.values() for task in family.tasks]


def _rows(config, family):
    classes = config.families[family].classes
    return {name: rows.make(row, classes=classes, hidden=config.hidden) for name, row in config.rows.items()}


def _channels(made):
    return tuple(dict.fromkeys(name for row in made.values() for name in row.channels))


def _rerun(config):
    return next(iter(config.expected.to_dict().values()), {})


def _train(name, row, steps, config, family, given, seeds, run) -> Running:
    """Group of tasks after group, `score_every` steps a call; in each task a lane per rule and seed."""
    blocks, lanes = steps // config.score_every, 2 * len(seeds)
    groups = problem.groups(given, config.tasks_at_once, family)
    init, advance = lanes_of.programs(
        row.method, steps, config.score_every, given.classes, config.tasks_at_once, run.mesh
    )

    @functools.lru_cache(maxsize=1)
    def inputs(g):
        """Sources, targets and labels of a group, every leaf with its tasks first."""
        pairs = [given.tasks[i] for i in groups[g]]
        both = [lanes_of.stack([given.domains[pair[side]] for pair in pairs]) for side in (0, 1)]
        labels = np.stack([_labelled(given, source, config, seeds) for source, _ in pairs])
        return mesh.replicate(run.mesh, (*both, labels))

    one_pair = inputs(0)[:2]

    def begin(g):
        """Fresh states of a group; parameters depend on no graph, so one compiled program does for all."""
        keys = [[jax.random.fold_in(jax.random.key(seed), i) for seed in seeds * 2] for i in groups[g]]
        keys = mesh.replicate(run.mesh, jnp.stack([jnp.stack(some) for some in keys]))
        return init(keys, *one_pair)

    def first():
        shape = (len(given.tasks), 2, len(seeds), blocks)
        zeros = Scores(*(np.zeros(shape, np.float32) for _ in Scores._fields))
        return Running(begin(0), mesh.replicate(run.mesh, zeros))

    def step(state, index):
        g, block = divmod(index, blocks)
        states = begin(g) if block == 0 and g else state.lanes
        learned, (found, metrics) = advance(states, *inputs(g), row.hyper)
        tasks, metrics = np.array(groups[g]), mesh.to_host(metrics)
        scores = jax.tree.map(
            lambda old, new: old.at[tasks, :, :, block].set(new.reshape(len(tasks), 2, -1)),
            state.scores,
            found,
        )
        for row_of_metrics, i in enumerate(groups[g]):
            means = {key: value[row_of_metrics].mean() for key, value in metrics.items()}
            task = config.families[family].tasks[i]
            run.log((block + 1) * config.score_every, means, group=f"{name}/{task}")
        return Running(learned, scores)

    return run.loop(
        f"{name}_{family}",
        init=first,
        step=step,
        total=len(groups) * blocks,
        checkpoint_every=config.checkpoint_every,
        progress=f"{name}, {family}: {len(given.tasks)} tasks, {lanes} lanes",
    )


def _labelled(given, source, config, seeds):
    """`[2 S, N_s]`: all labels for every seed, then those that are not held out."""
    y, mask = given.raw[source].y, np.asarray(given.domains[source].mask)
    part = [np.pad(~problem.held_out(y, config.held_out, seed), (0, len(mask) - len(y))) for seed in seeds]
    return np.stack([mask] * len(seeds) + part)


def _write_table(lines, run):
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    write_bytes(run.workdir / "table.csv", buffer.getvalue().encode())
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    write_bytes(
        run.workdir / "table.md", "\n".join([head, "|" + " --- |" * len(lines[0]), *body, ""]).encode()
    )


def _figures(found, tasks, run):
    run.figure(
        "accuracy",
        figures.bars(
            {name: one.accuracy["last"].mean(axis=0) for name, one in found.items()},
            xlabel="accuracy in percent, last step, mean over tasks",
            title=f"{len(tasks)} transfers",
        ),
        "Accuracy on the target after the last step, mean over all tasks; a dot is a seed.",
    )
    run.figure(
        "accuracy_by_task",
        figures.heatmap(
            np.stack([one.accuracy["last"].mean(axis=1) for one in found.values()]),
            rows=list(found),
            columns=[task.replace(">", "\n> ") for task in tasks],
            colorbar="accuracy in percent",
            title="By task, mean over seeds",
        ),
        "Accuracy on the target after the last step, mean over seeds.",
    )
