"""Environments as an MJCF model plus pure functions, on native MuJoCo threads or on MJX."""

from core.sim.episode import EnvState
from core.sim.gap import RealGap, Solver, sample_gap
from core.sim.native import NativeSimulator
from core.sim.task import Task

__all__ = ["EnvState", "NativeSimulator", "RealGap", "Solver", "Task", "sample_gap"]
