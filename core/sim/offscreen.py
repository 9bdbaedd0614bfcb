"""Renders poses off-screen in a process of its own, so that no GL driver can crash or clutter a run.

Run by path with MUJOCO_GL set. Reads an npz (model, qpos `[T, nq]`, centre, reach, size) from stdin and
writes the pictures `[T, size, size, 3]` uint8 as npy to stdout.
"""

import io
import sys

import mujoco
import numpy as np


def frames(request) -> np.ndarray:
    """Looks straight down on every pose of the request: `[T, H, W, 3]` uint8."""
    model = mujoco.MjModel.from_binary_path("model.mjb", assets={"model.mjb": request["model"].tobytes()})
    data = mujoco.MjData(model)
    # Shadows and multisampling take a hundred times as long as all the rest on a software renderer.
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    size = int(request["size"])
    camera = mujoco.MjvCamera()
    camera.azimuth, camera.elevation = 90.0, -90.0
    camera.lookat[:] = (*request["centre"], 0.0)
    # The field of view covers 2 * reach at the height of the ground.
    camera.distance = float(request["reach"]) / np.tan(np.radians(model.vis.global_.fovy / 2))
    images = []
    with mujoco.Renderer(model, size, size) as renderer:
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        for qpos in request["qpos"]:
            data.qpos[:] = qpos
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera)
            images.append(renderer.render().copy())
    return np.stack(images)


if __name__ == "__main__":
    with np.load(io.BytesIO(sys.stdin.buffer.read())) as request:
        answer = frames(request)
    np.save(sys.stdout.buffer, answer)
