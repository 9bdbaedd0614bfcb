"""The tasks of the sim-to-real experiments, by name."""

from core.errors import UserError, nearest
from core.sim.task import Task
from robotics.sgft.tasks import puck_push

__all__ = ["get"]

TASKS = {task.name: task for task in (puck_push.TASK,)}


def get(name: str) -> Task:
    """The task of that name; UserError names the nearest one if there is none."""
    if name not in TASKS:
        raise UserError(f"no task {name!r}{nearest(name, TASKS)}; there are: {', '.join(TASKS)}")
    return TASKS[name]
