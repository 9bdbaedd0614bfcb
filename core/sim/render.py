"""Pictures of a rollout for the report: rendered where there is EGL, drawn from the geoms where not."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from scipy.spatial import ConvexHull

from core.sim.gap import RealGap, broadcast_gap, gap_rows
from core.sim.task import Task, compile_model

__all__ = ["film_strip"]


def film_strip(
    task: Task, physics, *, gap: RealGap | None = None, frames: int = 6, size: int = 240
) -> Figure:
    """A row of pictures of one episode, seen from above.

    Args:
      task: the environment.
      physics: `[T, nstate]`, one environment's EnvState.physics of the native or MJX backend over time.
      gap: the dynamics (fields `[]`) it was recorded under; None is nominal.
      frames: how many pictures, evenly spaced from the first to the last moment.
      size: pixels per picture.

    Returns:
      a matplotlib Figure. Without a usable GL driver the geoms are drawn from their poses; nothing fails.
    """
    model = compile_model(task, None)
    row = gap_rows(broadcast_gap(RealGap() if gap is None else gap, 1, np))[0]
    task.write_dynamics(model, task.nominal, RealGap(*row.tolist()))
    mujoco.mj_setConst(model, mujoco.MjData(model))
    physics = np.asarray(physics, np.float64)
    chosen = np.unique(np.linspace(0, len(physics) - 1, frames).round().astype(int))
    qpos = physics[chosen, 1 : 1 + model.nq]
    shapes = [_outlines(model, pose) for pose in qpos]
    corners = np.concatenate([outline for pose in shapes for outline, _ in pose])
    low, high = corners.min(axis=0), corners.max(axis=0)
    centre, reach = (low + high) / 2, 0.55 * float((high - low).max())
    images = offscreen(model, qpos, centre, reach, size)

    figure = Figure(figsize=(size / 100 * len(chosen), size / 100 + 0.25), layout="constrained")
    extent = (centre[0] - reach, centre[0] + reach, centre[1] - reach, centre[1] + reach)
    for i, axes in enumerate(np.atleast_1d(figure.subplots(1, len(chosen)))):
        if images is not None:
            axes.imshow(images[i], extent=extent)
        else:
            for outline, colour in shapes[i]:
                axes.add_patch(Polygon(outline, facecolor=colour, edgecolor="black", linewidth=0.5))
        axes.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[], aspect="equal")
        axes.set_title(f"{chosen[i] * task.control_dt:.1f} s", fontsize=9)
    return figure


def offscreen(model: mujoco.MjModel, qpos, centre, reach: float, size: int) -> np.ndarray | None:
    """Pictures `[T, size, size, 3]` uint8 of poses `[T, nq]`, or None if nothing here can render."""
    binary = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, binary)
    request = io.BytesIO()
    np.savez(request, model=binary, qpos=qpos, centre=centre, reach=reach, size=size)
    environment = {"MUJOCO_GL": "egl"} | dict(os.environ)
    # -P: the script's folder must not shadow installed packages.
    command = [sys.executable, "-P", str(Path(__file__).with_name("offscreen.py"))]
    try:
        child = subprocess.run(
            command, input=request.getvalue(), capture_output=True, timeout=120, env=environment, check=True
        )
        return np.load(io.BytesIO(child.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _outlines(model: mujoco.MjModel, qpos) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every site and bounded geom from above, lowest first: (outline `[K, 2]`, colour `[4]`)."""
    data = mujoco.MjData(model)
    data.qpos[:] = qpos
    mujoco.mj_forward(model, data)
    angle = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    found = []
    for i in range(model.nsite):
        found.append((data.site_xpos[i], circle * model.site_size[i, 0], model.site_rgba[i]))
    for i in range(model.ngeom):
        if model.geom_type[i] == mujoco.mjtGeom.mjGEOM_SPHERE:
            found.append((data.geom_xpos[i], circle * model.geom_size[i, 0], model.geom_rgba[i]))
        elif model.geom_rbound[i] > 0:  # a plane has none
            middle, half = np.split(model.geom_aabb[i], 2)
            box = middle + half * np.array(list(np.ndindex(2, 2, 2))) * 2 - half
            flat = (box @ data.geom_xmat[i].reshape(3, 3).T)[:, :2]
            found.append((data.geom_xpos[i], flat[ConvexHull(flat).vertices], model.geom_rgba[i]))
    found.sort(key=lambda shape: shape[0][2])
    return [(position[:2] + outline, colour) for position, outline, colour in found]
