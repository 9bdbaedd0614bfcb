"""launch.py: every flag, mode and exit code; and a run that is killed ends like one that is not."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import launch
from core import config as configs
from core import run as running
from core.run import Run
from tests.toy import experiment as toy

ROOT = Path(launch.__file__).parent
CONFIG = "--config=tests/toy/config.py"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """launch sets these for the process it starts in, which here goes on with other tests."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ[name])


def snapshot(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def errors(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]


def spawn(workdir, *arguments, **environment):
    command = [sys.executable, str(ROOT / "launch.py"), CONFIG, f"--workdir={workdir}", *arguments]
    pipe = subprocess.PIPE
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=pipe, stderr=pipe, text=True)


def count_lines(path):
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for_lines(workdir, lines, process, *, older=None):
    """Waits until the file has so many lines and is no longer as `older`: as an earlier process left it."""
    deadline = time.monotonic() + 120
    path = workdir / "metrics.jsonl"
    while count_lines(path) < lines or (older is not None and path.read_bytes() == older):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)


def records(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("smoke") / "toy"
    before = snapshot(ROOT / "results") if (ROOT / "results").exists() else None
    code = launch.main([f"{CONFIG}:smoke", f"--workdir={workdir}"])
    assert code == 0
    assert (snapshot(ROOT / "results") if (ROOT / "results").exists() else None) == before
    return workdir


def test_a_run_leaves_its_files_and_nothing_beside_them(smoke):
    names = {p.name for p in smoke.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "figures", "summary.json", "report.html"} <= names
    assert any(name.startswith("events.out.tfevents") for name in (p.name for p in smoke.rglob("*")))
    assert [p.name for p in smoke.parent.iterdir()] == ["toy"]
    record = json.loads((smoke / "summary.json").read_text())
    assert record["variant"] == "smoke" and record["overrides"] == {} and record["claims"][0]["holds"]
    assert json.loads((smoke / "config.json").read_text())["config_sha256"] == record["config_sha256"]
    assert record["config_sha256"] == configs.sha256(configs.load("tests/toy/config.py:smoke")[0])


def test_a_finished_run_prints_its_summary_and_does_nothing(smoke, capsys):
    before = snapshot(smoke)
    assert launch.main([f"{CONFIG}:smoke", f"--workdir={smoke}"]) == 0
    assert "toy (smoke): done" in capsys.readouterr().out
    assert snapshot(smoke) == before


def test_a_workdir_alone_says_which_config(smoke, capsys):
    assert launch.main([f"--workdir={smoke}"]) == 0
    assert "toy (smoke): done" in capsys.readouterr().out


def test_eval_writes_eval_json_and_never_trains(smoke):
    before = snapshot(smoke)
    assert launch.main([f"{CONFIG}:smoke", f"--workdir={smoke}", "--mode=eval"]) == 0
    record = json.loads((smoke / "eval.json").read_text())
    assert record["metrics"]["accuracy"] > 0.9 and record["name"] == "toy" and record["variant"] == "smoke"
    after = snapshot(smoke)
    assert {p for p in after if after[p] != before.get(p)} == {smoke / "eval.json"}


def test_report_is_rebuilt_from_what_is_there(smoke):
    (smoke / "report.html").unlink()
    assert launch.main([f"--workdir={smoke}", "--mode=report"]) == 0
    assert "the line is found" in (smoke / "report.html").read_text()


def test_the_default_workdir_is_below_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch.main([f"{CONFIG}:smoke", "--config.iterations=1", "--config.checkpoint_every", "1"]) == 0
    assert [str(p) for p in Path().glob("*/*")] == ["runs/toy-smoke"]
    record = json.loads(Path("runs/toy-smoke/summary.json").read_text())
    assert record["overrides"] == {"iterations": 1, "checkpoint_every": 1}


def test_restart_moves_the_old_run_aside(tmp_path):
    arguments = [f"{CONFIG}:smoke", f"--workdir={tmp_path / 'w'}", "--config.iterations=1"]
    assert launch.main(arguments) == 0
    old = (tmp_path / "w" / "summary.json").read_bytes()
    assert launch.main([*arguments, "--config.seed=1", "--restart"]) == 0
    assert launch.main([*arguments, "--config.seed=2", "--restart"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w", "w.1", "w.2"]
    assert (tmp_path / "w.1" / "summary.json").read_bytes() == old
    assert json.loads((tmp_path / "w" / "summary.json").read_text())["overrides"]["seed"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([CONFIG, "--config.optimizer.lrr=1"], "no key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        (
            [CONFIG, "--config.optimizer.lr=fast"],
            "config.optimizer.lr is float (0.5 by default), 'fast' is not",
        ),
        ([CONFIG, "--config.optimizer.lr"], "has no value"),
        ([CONFIG, "--config.optimizer.momentum=2"], "config.optimizer.momentum is 2.0: between 0 and 1"),
        ([f"{CONFIG}:smokee"], "no variant 'smokee'; did you mean 'smoke'?"),
        (["--config=configs/nothing.py"], "no config file configs/nothing.py"),
        ([CONFIG, "--wrokdir=x"], "Unknown command line flag 'wrokdir'. Did you mean: workdir ?"),
        ([CONFIG, "--mode=trian"], "--mode=trian"),
        ([CONFIG, "--platform=gpu"], "--platform=gpu: value should be one of <auto|cpu|cuda|tpu>"),
        (
            [CONFIG, "--platform=cuda"],
            "--platform=cuda: no such device (is methodax[cuda] installed?); there is: cpu",
        ),
        ([CONFIG, "train"], "launch.py takes flags only, not 'train'"),
        ([CONFIG, "--mode=eval"], "holds no run"),
        ([CONFIG, "--mode=report"], "holds no run"),
        ([CONFIG, "--mode=eval", "--restart"], "--restart begins a training anew"),
        ([CONFIG, "--config.mesh.data=3"], "8"),
        ([CONFIG, "--coordinator=localhost:1"], "go with --distributed"),
        ([CONFIG, "--distributed", "--coordinator=localhost:1"], "come together"),
        ([CONFIG, "--mode=check", "--config.check.devices=4"], "wants 4 fake devices, JAX started with 8"),
        (["--config.seed=1"], "needs a --config"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, message, tmp_path, capsys):
    assert launch.main([*arguments, f"--workdir={tmp_path / 'w'}"]) == 2
    lines = errors(capsys)
    assert len(lines) == 1 and message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_no_config_at_all_says_what_to_give(capsys):
    assert launch.main([]) == 2
    assert "give --config=" in errors(capsys)[0]


def test_a_workdir_of_another_config_names_the_key(smoke, capsys):
    before = snapshot(smoke)
    assert launch.main([f"{CONFIG}:smoke", f"--workdir={smoke}", "--config.batch=16"]) == 2
    assert "batch: 32 -> 16" in errors(capsys)[0] and snapshot(smoke) == before


def test_debug_shows_the_traceback_and_keeps_the_code(tmp_path, caplog):
    assert launch.main([CONFIG, "--debug", "--config.batch=x", f"--workdir={tmp_path / 'w'}"]) == 2
    assert "Traceback" in caplog.text
    caplog.clear()
    assert launch.main([CONFIG, "--config.batch=x", f"--workdir={tmp_path / 'w'}"]) == 2
    assert "Traceback" not in caplog.text


def test_help_lists_flags_and_config_keys(capsys):
    assert launch.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--workdir" in out and "--restart" in out and "--platform" in out
    assert launch.main([CONFIG, "--help_config"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"--config\.optimizer\.lr=0\.5 +# step size", out)
    assert set(re.findall(r"--config\.([\w.]+)=", out)) == set(
        configs.flatten(configs.load("tests/toy/config.py")[0])
    )


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    process = spawn(tmp_path / "w", "--help_config")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 0


def test_a_loss_that_is_not_finite_ends_with_3(tmp_path, capsys):
    assert launch.main([f"{CONFIG}:nan", f"--workdir={tmp_path / 'w'}"]) == 3
    assert re.search(r"train/loss is \S+ at step \d+; last good checkpoint: .*/moments/4", errors(capsys)[0])
    assert not (tmp_path / "w" / "summary.json").exists()
    (tmp_path / "w" / "report.html").unlink()
    assert launch.main([f"--workdir={tmp_path / 'w'}", "--mode=report"]) == 0
    assert (tmp_path / "w" / "report.html").exists()


def test_a_published_config_is_copied_to_results_once_it_is_done(tmp_path, monkeypatch):
    root = tmp_path / "repository"
    (root / "configs").mkdir(parents=True)
    (root / "setup.cfg").write_text("")
    (root / "configs" / "toy.py").write_text((ROOT / "tests/toy/config.py").read_text())
    monkeypatch.setattr(configs, "ROOT", root)
    small = configs.load("configs/toy.py")[0]
    assert launch._results(small, "small") == root / "results"
    small.batch = 7
    assert launch._results(small, "small") is None
    (root / "setup.cfg").unlink()
    assert launch._results(configs.load("configs/toy.py")[0], "small") is None


def test_jax_is_not_imported_before_the_platform_is_known(tmp_path):
    script = "import sys, launch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_check_mode_has_as_many_devices_as_it_asks_for(tmp_path):
    process = spawn(tmp_path / "w", f"{CONFIG}:full", "--mode=check", XLA_FLAGS="")
    out, err = process.communicate()
    assert process.returncode == 0, err
    record = json.loads((tmp_path / "w" / "check.json").read_text())
    assert record["devices"] == 16 and record["mesh"]["data"] == 16 and "on 16 devices" in out
    assert [p.name for p in (tmp_path / "w").iterdir()] == ["check.json"]


def test_a_check_may_come_before_the_run(tmp_path, capsys):
    arguments = [f"{CONFIG}:smoke", f"--workdir={tmp_path / 'w'}"]
    missing = f"--config.data={tmp_path / 'not.csv'}"
    assert launch.main([*arguments, missing, "--mode=check"]) == 0
    assert "missing: " in capsys.readouterr().out
    assert launch.main([*arguments, "--config.iterations=1"]) == 0


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def spawn_two(workdir, *arguments, second=()):
    cluster = ["--distributed", f"--coordinator=localhost:{free_port()}", "--num_processes=2"]
    more = ([], list(second))
    return [
        spawn(workdir, f"{CONFIG}:smoke", *cluster, f"--process_id={i}", *arguments, *more[i], XLA_FLAGS="")
        for i in range(2)
    ]


@pytest.mark.slow
def test_two_processes_make_one_run(tmp_path):
    processes = spawn_two(tmp_path / "w")
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    record = json.loads((tmp_path / "w" / "summary.json").read_text())
    assert record["environment"]["process_count"] == 2 and record["environment"]["device_count"] == 2
    assert ["toy (smoke): done" in out for out, _ in outputs] == [True, False]
    assert len(records(tmp_path / "w")) == 4 + 1 + 4
    config = configs.recorded(tmp_path / "w").config
    assert all(np.isfinite(leaf).all() for leaf in final_state(tmp_path / "w", config))


def test_two_processes_with_different_configs_are_refused(tmp_path):
    processes = spawn_two(tmp_path / "w", second=["--config.seed=1"])
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    for _, err in outputs:
        assert "error: process 1 holds another config" in err and "Traceback" not in err
    assert not (tmp_path / "w").exists()


def final_state(workdir, config):
    run = Run(config, workdir, mode="eval", quiet=True)
    state = run.restore("fit", toy.init(config))
    return [
        np.asarray(jax.random.key_data(x) if x.dtype == state.rng.dtype else x)
        for x in jax.tree.leaves(state)
    ]


def test_a_run_killed_at_three_random_steps_ends_like_an_unbroken_one(tmp_path):
    pause = "--config.pause=0.1"
    assert launch.main([CONFIG, pause, f"--workdir={tmp_path / 'whole'}"]) == 0
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    seed = random.randrange(1 << 30)
    generator = random.Random(seed)
    for number, kill in zip(
        sorted(generator.sample(range(2, 15), 3)), (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)
    ):
        older = (broken / "metrics.jsonl").read_bytes() if broken.exists() else None
        process = spawn(broken, pause)
        wait_for_lines(broken, number, process, older=older)
        process.send_signal(kill)
        _, err = process.communicate()
        assert process.returncode == (143 if kill == signal.SIGTERM else -signal.SIGKILL), (seed, err)
        assert not (broken / "summary.json").exists(), seed
        if kill == signal.SIGTERM:
            assert "run the same command to go on" in err and "Traceback" not in err
            assert launch.main([f"--workdir={broken}", "--mode=report"]) == 0
    home = tmp_path / "home"
    home.mkdir()
    process = spawn(
        broken, pause, HOME=str(home), TMPDIR=str(home), XDG_CACHE_HOME=str(home), MPLCONFIGDIR=None
    )
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "going on after iteration" in err and "toy (small): done" in out
    assert list(home.iterdir()) == []
    assert records(broken) == records(whole), seed
    summaries = [json.loads((w / "summary.json").read_text()) for w in (broken, whole)]
    for summary in summaries:
        del summary["wall_s"], summary["compile_s"]
    assert summaries[0] == summaries[1], seed
    config = configs.recorded(whole).config
    for ours, theirs in zip(final_state(broken, config), final_state(whole, config), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_second_sigterm_ends_a_real_run_at_once(tmp_path):
    process = spawn(tmp_path / "w", "--config.pause=60.0")
    wait_for_lines(tmp_path / "w", 6, process)
    process.send_signal(signal.SIGTERM)
    assert any("a second one ends at once" in line for line in process.stderr)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert time.monotonic() - began < 10


def test_execute_is_what_launch_calls(tmp_path, capsys):
    config = configs.load("tests/toy/config.py:smoke")[0]
    assert running.execute(config, tmp_path / "w", variant="smoke", quiet=True) == 0
    assert "toy (smoke): done" in capsys.readouterr().out
