"""What a run is about: graphs, tasks between them, which labels are held out; read and checked once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from core.errors import UserError, nearest
from graphs.gaa import data, domains
from graphs.gaa.data import RawGraph
from graphs.gaa.networks import Domain

__all__ = ["Problem", "held_out", "load", "parse_task", "validate_tasks"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The graphs of one family.

    Attributes:
      classes: C.
      tasks: pairs (source, target) of names. raw: graphs as read, by name. domains: padded alike, by name.
    """

    classes: int
    tasks: tuple[tuple[str, str], ...]
    raw: dict[str, RawGraph]
    domains: dict[str, Domain]


def parse_task(task: str) -> tuple[str, str]:
    """("usa", "brazil") of "usa>brazil"; UserError for another form, or twice one graph."""
    names = tuple(name.strip() for name in task.split(">"))
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise UserError(f'tasks have {task!r}: a task is "source>target", two graphs')
    return names


def load(config: ConfigDict, family: str, channels: tuple[str, ...]) -> Problem:
    """Reads every graph of a family's tasks, makes the `channels` that the rows need, checks every pair.

    Raises:
      UserError: as data.load, domains.views and domains.check_pair.
    """
    chosen = config.families[family]
    tasks = tuple(map(parse_task, chosen.tasks))
    names = sorted({name for task in tasks for name in task})
    options = {"undirected": config.data.undirected, "width": config.data.width}
    raw = {name: data.load(family, name, chosen.path or None, **options) for name in names}
    for source, target in tasks:
        domains.check_pair(raw[source], raw[target], classes=chosen.classes)
    views = [
        domains.views(
            raw[name],
            channels,
            knn=config.knn.to_dict(),
            key=jax.random.fold_in(jax.random.key(config.seed), i),
            walks=config.walks.number,
            walk_length=config.walks.length,
            cache=Path(config.data.cache) if config.data.cache else None,
        )
        for i, name in enumerate(names)
    ]
    return Problem(chosen.classes, tasks, raw, dict(zip(names, domains.pad_all(views))))


def groups(problem: Problem, size: int, family: str) -> list[list[int]]:
    """Numbers of tasks that train at once, `size` in each, all of equal sizes of both domains.

    The last task of the family is the last of the last group.

    Raises:
      UserError: `size` does not divide the tasks of some sizes.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, task in reversed(list(enumerate(problem.tasks))):
        shapes = [leaf.shape for name in task for leaf in jax.tree.leaves(problem.domains[name])]
        alike.setdefault(tuple(sum(shapes, ())), []).append(i)
    found = []
    for members in alike.values():
        if len(members) % size:
            source, target = problem.tasks[members[0]]
            raise UserError(
                f"config.tasks_at_once={size} does not divide the {len(members)} task(s) of family {family} "
                f"with sizes as in {source}>{target}; 1 always does"
            )
        found += [members[i : i + size][::-1] for i in range(0, len(members), size)]
    return found[::-1]


def held_out(y: np.ndarray, share: float, seed: int) -> np.ndarray:
    """`[N]` bool: a `share` of the nodes of every class, drawn by `seed`; at least one node of each stays."""
    rng = np.random.default_rng(seed)
    chosen = np.zeros(len(y), bool)
    for label in np.unique(y[y >= 0]):
        nodes = np.flatnonzero(y == label)
        chosen[rng.permutation(nodes)[: min(round(share * len(nodes)), len(nodes) - 1)]] = True
    return chosen


def validate_tasks(config: ConfigDict) -> None:
    """UserError for tasks that can not be, before any file is read."""
    for family, chosen in config.families.items():
        if not chosen.tasks:
            raise UserError(f'config.families.{family}.tasks is empty: give at least one "source>target"')
        known = data.FAMILIES.get(family)
        for name in [name for task in chosen.tasks for name in parse_task(task)]:
            if known is not None and name not in known.nodes:
                listed = ", ".join(known.nodes)
                hint = nearest(name, known.nodes)
                raise UserError(f"config.families.{family} has no graph {name!r}{hint} ({listed})")
