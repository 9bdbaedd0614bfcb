"""Two real processes over Gloo: one mesh, one run, one checkpoint, which a single process restores."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from core import mesh as meshes
from core.checkpoint import Checkpoints
from tests.core import two_process_worker as worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Directory and result of each process; both have ended, well, within a minute."""
    directory = tmp_path_factory.mktemp("two_processes")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.core.two_process_worker", str(port), str(i), str(directory)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output[-4000:]
    return directory, [json.loads((directory / f"result_{i}.json").read_text()) for i in range(2)]


def test_both_see_one_mesh_and_the_same_losses(run):
    _, (first, second) = run
    assert (first["devices"], first["local_devices"]) == (4, 2)
    assert first["losses"] == second["losses"] and first["losses"][0] > first["losses"][-1]
    assert first["gathered"] == second["gathered"] == {"rows": list(range(8)), "odd": [0, 1, 2]}


def test_a_single_process_restores_what_it_would_have_computed(run):
    directory, (result, _) = run
    mesh = meshes.make_mesh({"data": -1})
    expected, losses = worker.train(mesh)
    np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
    step, state, host = Checkpoints(directory / "checkpoints").restore(worker.init(mesh))
    assert step == worker.STEPS and host == {"step": worker.STEPS}
    assert state["batch"][0].sharding.num_devices == 8
    for actual, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
        actual, wanted = meshes.to_host([actual, wanted])
        assert actual.dtype == wanted.dtype
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_both_restore_and_agree_on_what_is_damaged(run):
    _, results = run
    for result in results:
        assert result["restored"] == [worker.STEPS, True]
        assert result["after_damage"] == worker.STEPS - 1


def test_another_config_is_refused_by_both(run):
    _, (first, second) = run
    assert first["refused"] == second["refused"]
    assert "process 1 holds another config (01010101) than process 0 (00000000)" in first["refused"]
