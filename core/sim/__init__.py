"""Environments as an MJCF model plus pure functions, on native MuJoCo threads or on MJX.

`make` gives the simulator; "the real robot" is always NativeSimulator with Solver() and a hidden RealGap.
"""

from __future__ import annotations

import jax

from core.errors import UserError, nearest
from core.sim.episode import EnvState
from core.sim.gap import RealGap, Solver, sample_gap
from core.sim.native import NativeSimulator
from core.sim.pure import PureSimulator
from core.sim.task import Task

__all__ = [
    "EnvState",
    "NativeSimulator",
    "PureSimulator",
    "RealGap",
    "Solver",
    "Task",
    "make",
    "sample_gap",
]

BACKENDS = ("auto", "mjx", "native")


def make(
    task: Task, num_envs: int, *, backend: str = "auto", gaps=None, solver: Solver | None = None, **options
):
    """A simulator of N environments of `task`.

    Args:
      backend: "native" (MuJoCo threads on the host), "mjx" (MuJoCo XLA, pure functions), or "auto":
        native where JAX computes on CPUs, MJX on a GPU or TPU.
      gaps, solver: as in NativeSimulator and MjxSimulator.
      options: `threads` (native), `pool_size` and `pool_seed` (mjx).

    Returns:
      an object with `reset(key) -> EnvState [N]`, `step(state, action [N, A]) -> EnvState` and the same
      `auto_reset_step`.
    """
    if backend not in BACKENDS:
        raise UserError(
            f"unknown sim backend {backend!r}{nearest(backend, BACKENDS)}; one of {', '.join(BACKENDS)}"
        )
    if backend == "auto":
        backend = "native" if jax.default_backend() == "cpu" else "mjx"
    if backend == "native":
        return NativeSimulator(task, num_envs, gaps=gaps, solver=solver, **options)
    # Importing MJX takes seconds, which the host backend need not pay.
    from core.sim.mjx import MjxSimulator

    return MjxSimulator(task, num_envs, gaps=gaps, solver=solver, **options)
