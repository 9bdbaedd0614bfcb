"""Check mode of SGFT: every step of both stages lowers on the mesh, with nothing allocated."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from core import check
from core import config as configs
from core.mesh import make_mesh
from robotics.sgft import checks, methods, pretrain
from robotics.sgft.tasks.closed_form import ClosedFormPuck

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(monkeypatch):
    """The smoke variant with one agent of each kind, 3 seeds, and the closed form where MJX would be."""

    def make(task, n, *, backend, gaps):
        assert backend == "mjx"
        return ClosedFormPuck(n, gaps=gaps)

    monkeypatch.setattr(checks.sim, "make", make)
    config = configs.load("configs/sgft.py:smoke")[0]
    for name in set(config.agents) - {"sgft_mb", "sgft_sac"}:
        del config.agents[name]
    config.num_seeds = 3
    config.pretrain.num_envs = 16
    config.check.compile = False
    return config


def test_every_step_lowers_on_eight_devices(config, tmp_path):
    seen = []

    def functions(config, mesh):
        seen.extend(checks.functions(config, mesh))
        return seen

    assert check.run(config, tmp_path, SimpleNamespace(functions=functions)) == 0
    record = json.loads((tmp_path / "check.json").read_text())
    names = [function["name"] for function in record["functions"]]
    steps = ["init", "explore", "exploit", "learn"]
    assert [n for n in names if not n.startswith("simulation_")] == [
        f"{agent}/{step}" for agent in config.agents for step in steps
    ]
    value = {f"simulation_value/{step}" for step in ("rollout", "targets", "refit", "try", "improve")}
    assert {"simulation_policy/iteration", *value} <= set(names)
    assert record["devices"] == 8 and all(function["lowered"] for function in record["functions"])
    for function in seen:
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(function.args))
    # 3 lanes of 16 environments on 8 devices: the environments are what is split.
    state, env, _ = next(f for f in seen if f.name == "simulation_policy/iteration").args
    assert env.observation.sharding.shard_shape(env.observation.shape) == (3, 2, 8)
    assert jax.tree.leaves(state)[0].sharding.is_fully_replicated


def test_parameters_are_those_of_one_lane(config):
    found = {f.name: f.parameters for f in checks.functions(config, make_mesh(config.mesh))}
    parts = methods.make(config)
    for module, name in ((parts.networks.value, "simulation_value/refit"),):
        variables = jax.eval_shape(lambda k, m=module: m.init(k, jax.numpy.zeros((1, 8))), jax.random.key(0))
        assert found[name] == sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert found["sgft_mb/learn"] == found["sgft_mb/explore"] > 0


def test_lanes_are_split_where_they_divide():
    mesh = make_mesh({"data": 4, "fsdp": 2, "tensor": 1})
    shard = lambda shape, **options: pretrain.lane_sharding(  # noqa: E731
        mesh, jax.ShapeDtypeStruct(shape, float), **options
    ).shard_shape(shape)
    assert shard((8, 16, 2), env_axis=1) == (2, 16, 2)
    assert shard((5, 16, 2), env_axis=1) == (5, 4, 2)
    assert shard((5, 3), env_axis=1) == shard((5, 3)) == (5, 3)
    assert shard((5, 6, 16), env_axis=2) == (5, 6, 4)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 16])
def test_full_lowers_without_its_hardware(devices, tmp_path):
    command = [sys.executable, "launch.py", "--config=configs/sgft.py:full", "--mode=check"]
    options = [f"--config.check.devices={devices}", f"--workdir={tmp_path}"]
    environment = {key: text for key, text in os.environ.items() if key != "XLA_FLAGS"}
    subprocess.run([*command, *options], cwd=ROOT, env=environment, check=True, timeout=600)
    record = json.loads((tmp_path / "check.json").read_text())
    assert record["devices"] == devices and all(function["lowered"] for function in record["functions"])
