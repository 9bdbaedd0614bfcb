"""The whole experiment as a user starts it: a smoke run, its evaluation, and the policy it deploys."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import core.run
from core import config as configs
from core import export
from robotics.sgft import methods
from robotics.sgft import source as sources
from robotics.sgft.source import sim_value

ROOT = Path(__file__).parents[3]


def launch(*arguments):
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    environment = {**os.environ, "XLA_FLAGS": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("smoke") / "sgft"
    result = launch("--config=configs/sgft.py:smoke", f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    return workdir


def test_a_smoke_run_leaves_its_files_and_nothing_beside_them(workdir):
    names = {path.name for path in workdir.iterdir()}
    assert {"config.json", "metrics.jsonl", "summary.json", "report.html", "figures"} <= names
    assert [path.name for path in workdir.parent.iterdir()] == ["sgft"]
    assert not (ROOT / "results" / "sgft.smoke.json").exists()
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["variant"] == "smoke" and summary["status"] == "done" and summary["seeds"] == [0]
    rows = (workdir / "curves.csv").read_text().splitlines()
    assert rows[0] == "method,step,episode,seconds,reward,success,seed"
    assert [row.split(",")[:2] for row in rows[1:4]] == [
        ["sgft_mb", "0"],
        ["sgft_mb", "20"],
        ["sgft_mb", "40"],
    ]
    metrics = summary["metrics"]
    assert {"zero_shot/return", "sgft_mb/final_return", "sgft_sac/final_return"} <= set(metrics)
    for name in ("success_against_real_steps", "rollout_sgft_mb", "rollout_zero_shot"):
        assert (workdir / "figures" / f"{name}.png").stat().st_size > 5000


def test_what_was_learned_in_simulation_is_there_to_take_along(workdir):
    config = configs.recorded(workdir).config
    parts = methods.make(config)
    source = sources.load(
        workdir / "simulation" / "seed0.npz",
        networks=parts.networks,
        observation_size=8,
        gamma=0.97,
        reward="puck_push",
    )
    values = sim_value(source, np.zeros((3, 8), np.float32), networks=parts.networks)
    assert values.shape == (3,) and np.isfinite(values).all()


def test_its_evaluation_plays_what_was_learned(workdir):
    result = launch(f"--workdir={workdir}", "--mode=eval")
    assert result.returncode == 0, result.stderr
    metrics = json.loads((workdir / "eval.json").read_text())["metrics"]
    assert set(metrics) == {"sgft_mb", "sgft_sac"}
    assert all(np.isfinite(measured["return"]).all() for measured in metrics.values())


def test_the_deployed_policy_runs_without_the_training_code(workdir, tmp_path):
    params, apply = core.run.load(workdir)[1:]
    core.run.export(workdir, tmp_path / "policy")
    observation = np.linspace(-1, 1, 8, dtype=np.float32)[None]
    action = export.load(tmp_path / "policy")(observation)
    assert action.shape == (1, 2) and (np.abs(action) <= 1).all()
    np.testing.assert_allclose(action, apply(params, observation), atol=1e-5)
