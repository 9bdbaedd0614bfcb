"""Run: resume to the bit, logs, figures, load and export."""

import json
import math
import sys

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest

from core import config as configs
from core import export as exporting
from core import run as running
from core.checkpoint import CheckpointError
from core.errors import NonFiniteError, Preempted, UserError
from core.progress import track
from core.run import Run
from tests.toy import experiment as toy


class Crash(Exception):
    """Stands for whatever kills a process."""


def toy_config(**changes):
    config = configs.load("tests/toy/config.py")[0]
    for key, value in changes.items():
        config[key] = value
    return config


def records(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def without_clock(summary):
    return {key: value for key, value in summary.items() if key not in ("wall_s", "compile_s")}


def two_stages(run, crash_at=None):
    """Ten logged iterations in two stages with records between; raises Crash at the given one."""
    count = iter(range(100))

    def step(group):
        def call(state, i):
            if crash_at == next(count):
                raise Crash
            state = {"x": state["x"] * 1.5 + i, "key": jax.random.split(state["key"])[0]}
            run.log(i, {"x": state["x"], "noise": jax.random.uniform(state["key"])}, group=group)
            return state

        return call

    run.log(0, {"begin": 1.0})
    first = run.loop(
        "first",
        init=lambda: {"x": jnp.float32(1), "key": jax.random.key(0)},
        step=step("first"),
        total=5,
        checkpoint_every=2,
    )
    run.log(0, {"between": first["x"]})
    last = run.loop("second", init=lambda: first, step=step("second"), total=5, checkpoint_every=2)
    run.log(1, {"end": last["x"]})
    run.summary(claims=[], metrics={"x": last["x"]}, seeds=[0])
    return last


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    run = Run(toy_config(), workdir, quiet=True)
    state = two_stages(run)
    run.close()
    return state, workdir


@pytest.mark.parametrize("crashes", [(0,), (1,), (3, 1), (5,), (7, 2, 4), (9, 9), (8, 0)])
def test_a_resumed_run_is_the_unbroken_one(tmp_path, unbroken, crashes):
    for crash_at in crashes:
        run = Run(toy_config(), tmp_path, quiet=True)
        try:
            two_stages(run, crash_at)
        except Crash:
            pass
        finally:
            run.close()
    run = Run(toy_config(), tmp_path, quiet=True)
    state = two_stages(run)
    run.close()
    np.testing.assert_array_equal(state["x"], unbroken[0]["x"])
    np.testing.assert_array_equal(jax.random.key_data(state["key"]), jax.random.key_data(unbroken[0]["key"]))
    assert records(tmp_path) == records(unbroken[1])
    ours, theirs = (json.loads((w / "summary.json").read_text()) for w in (tmp_path, unbroken[1]))
    assert without_clock(ours) == without_clock(theirs)


def test_a_resumed_run_does_not_repeat_finished_work(tmp_path):
    calls = []

    def step(state, i):
        calls.append(i)
        if calls == [0, 1, 2, 3]:
            raise Crash
        return state

    def go():
        run = Run(toy_config(), tmp_path, quiet=True)
        try:
            run.loop("a", init=lambda: jnp.zeros(1), step=step, total=6, checkpoint_every=2)
        finally:
            run.close()

    with pytest.raises(Crash):
        go()
    go()
    go()
    assert calls == [0, 1, 2, 3, 2, 3, 4, 5]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, unbroken, caplog):
    run = Run(toy_config(), tmp_path, quiet=True)
    two_stages(run)
    run.close()
    for file in (tmp_path / "checkpoints" / "first" / "5").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    run = Run(toy_config(), tmp_path, quiet=True)
    state = two_stages(run)
    run.close()
    assert "first/5" in caplog.text and "first/4" in caplog.text
    np.testing.assert_array_equal(state["x"], unbroken[0]["x"])
    assert records(tmp_path) == records(unbroken[1])


def test_the_data_position_comes_back(tmp_path):
    seen = []

    def go(crash_at):
        run, batches = Run(toy_config(), tmp_path, quiet=True), toy.Batches(100, 1)

        def step(state, i):
            if i == crash_at:
                raise Crash
            seen.append((i, int(next(batches)[0])))
            return state

        try:
            run.loop("a", init=lambda: np.zeros(1), step=step, total=6, checkpoint_every=2, iterator=batches)
        finally:
            run.close()

    with pytest.raises(Crash):
        go(3)
    go(None)
    assert seen == [(i, i + 1) for i in (0, 1, 2, 2, 3, 4, 5)]


def test_preemption_saves_where_it_is_and_ends(tmp_path):
    run = Run(toy_config(), tmp_path, quiet=True)

    def step(state, i):
        if i == 2:
            run.preempt()
        return state + 1

    with pytest.raises(Preempted, match=r"checkpoints/a/3.*run the same command"):
        run.loop("a", init=lambda: np.zeros(1), step=step, total=9, checkpoint_every=100)
    run.close()
    again = Run(toy_config(), tmp_path, quiet=True)
    assert again.restore("a", np.zeros(1))[0] == 3
    again.close()


def test_preemption_in_the_last_iteration_ends_before_the_next_stage(tmp_path):
    run = Run(toy_config(), tmp_path, quiet=True)
    run.preempt()
    with pytest.raises(Preempted, match=r"checkpoints/a/0;"):
        run.loop("a", init=lambda: np.zeros(1), step=lambda s, i: s, total=2, checkpoint_every=1)
    run.close()


def test_loops_with_the_same_name_or_no_interval_are_mistakes(tmp_path):
    run = Run(toy_config(), tmp_path, quiet=True)
    kwargs = {"init": lambda: np.zeros(1), "step": lambda s, i: s, "total": 1}
    run.loop("a", checkpoint_every=1, **kwargs)
    with pytest.raises(ValueError, match="'a' ran already"):
        run.loop("a", checkpoint_every=1, **kwargs)
    with pytest.raises(ValueError, match="checkpoint_every is 0"):
        run.loop("b", checkpoint_every=0, **kwargs)
    with pytest.raises(ValueError, match=r"'\.\./x'"):
        run.loop("../x", checkpoint_every=1, **kwargs)
    run.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_step_key_and_checkpoint(tmp_path, bad):
    run = Run(toy_config(), tmp_path, quiet=True)
    with pytest.raises(
        NonFiniteError, match=r"a/q_loss is (nan|inf) at step 7; no checkpoint was written yet"
    ):
        run.log(7, {"q_loss": bad}, group="a")

    def step(state, i):
        run.log(i, {"loss": bad if i == 3 else 0.0})
        return state

    with pytest.raises(NonFiniteError, match=r"^loss is (nan|inf) at step 3; last good checkpoint: .*/b/2$"):
        run.loop("b", init=lambda: np.zeros(1), step=step, total=4, checkpoint_every=2)
    run.close()


def test_other_numbers_may_be_not_finite_and_are_null(tmp_path):
    run = Run(toy_config(), tmp_path, quiet=True)
    run.log(1, {"return": math.nan})
    run.close()
    assert records(tmp_path) == [{"step": 1, "return": None}]


def test_a_figure_is_written_with_its_caption_and_closed(tmp_path):
    import matplotlib.pyplot as plt

    run = Run(toy_config(), tmp_path, quiet=True)
    figure = plt.figure()
    run.figure("curve", figure, "A curve.")
    run.figure("other", matplotlib.figure.Figure())
    run.close()
    assert (tmp_path / "figures" / "curve.png").read_bytes().startswith(b"\x89PNG")
    captions = json.loads((tmp_path / "figures" / "captions.json").read_text())
    assert captions == {"curve": "A curve.", "other": ""}
    assert plt.get_fignums() == []


def test_a_folder_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"no run's folder \(it holds thesis.tex\)"):
        Run(toy_config(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_of_another_config_is_refused_with_the_difference(tmp_path):
    Run(toy_config(), tmp_path, quiet=True).close()
    with pytest.raises(UserError, match="batch: 32 -> 64"):
        Run(toy_config(batch=64), tmp_path)


def test_a_workdir_that_can_not_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        Run(toy_config(), tmp_path / "file")
    with pytest.raises(UserError, match="choose another --workdir"):
        Run(toy_config(), tmp_path / "file" / "below")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained") / "toy"
    code = running.execute(toy_config(iterations=4), workdir, quiet=True)
    return code, workdir


def test_load_gives_back_what_was_learned(trained):
    assert trained[0] == 0
    config, params, apply = running.load(trained[1])
    assert config.iterations == 4 and config.layers == (8, 4)
    x, y = toy.dataset(5)
    accuracy = float(((apply(params, x) > 0) == (y > 0.5)).mean())
    assert accuracy > 0.9


def test_load_does_not_need_the_mesh_of_the_training(tmp_path):
    config = toy_config(iterations=1)
    config.mesh.data = 4
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(4, 1, 1), ("data", "fsdp", "tensor"))
    run = Run(config, tmp_path, mesh=mesh, quiet=True)
    toy.run(config, run)
    run.close()
    assert running.load(tmp_path).params["w"].shape == (3,)


def test_load_writes_nothing(trained):
    before = {p: p.stat().st_mtime_ns for p in trained[1].rglob("*")}
    running.load(trained[1])
    assert {p: p.stat().st_mtime_ns for p in trained[1].rglob("*")} == before


def test_load_of_no_run_says_so(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        running.load(tmp_path)


def test_export_of_a_run_agrees_with_load(trained, tmp_path):
    running.export(trained[1], tmp_path / "model")
    _, params, apply = running.load(trained[1])
    x = random_inputs(5)
    np.testing.assert_allclose(exporting.load(tmp_path / "model")(x), apply(params, x), rtol=1e-5)


def random_inputs(n):
    return np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)


def test_a_run_exports_into_its_workdir(tmp_path):
    run = Run(toy_config(), tmp_path, quiet=True)
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    directory = run.export(toy.apply, params, toy.example(run.config))
    run.close()
    assert directory == tmp_path / "export"
    np.testing.assert_array_equal(exporting.load(directory)(random_inputs(2)), random_inputs(2).sum(1))


def test_a_method_that_does_not_exist_is_named(tmp_path, capsys):
    assert running.execute(toy_config(method="tests.tooy"), tmp_path / "w") == 2
    assert "config.method is 'tests.tooy'" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, capsys):
    def full(self, step, state, host=None):
        raise CheckpointError(f"could not write {self.directory / str(step)}: no space; last good is 3")

    with monkeypatch.context() as patch:
        patch.setattr(running.Checkpoints, "save", full)
        assert running.execute(toy_config(iterations=4), tmp_path / "w", quiet=True) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: could not write") and "no space" in error
    assert running.execute(toy_config(iterations=4), tmp_path / "w", quiet=True) == 0


def test_metrics_on_a_full_disk_end_with_one_line(tmp_path, monkeypatch, capsys):
    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(running.Writer, "write", full)
    assert running.execute(toy_config(iterations=4), tmp_path / "w", quiet=True) == 2
    assert "no space left" in capsys.readouterr().err


def test_eval_never_trains(tmp_path, trained):
    run = Run(toy_config(iterations=4), trained[1], mode="eval", quiet=True)
    state = run.loop("fit", init=lambda: toy.init(run.config), step=None, total=4, checkpoint_every=1)
    assert float(jnp.abs(state.params["w"]).sum()) > 0
    with pytest.raises(NonFiniteError, match=r"last good checkpoint: .*/fit/4"):
        run.log(0, {"loss": math.nan})
    with pytest.raises(UserError, match="no checkpoint of other"):
        run.loop("other", init=lambda: np.zeros(1), step=None, total=4, checkpoint_every=1)


def test_a_terminal_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with track(3, "work") as tracker:
        tracker.skip(1)
        tracker.advance(2, n=1, loss=0.5)
    assert "work" in capsys.readouterr().err and tracker.done == 3


def test_progress_is_silent_when_quiet_and_logs_when_not(caplog):
    caplog.set_level("INFO")
    with track(3, "work", quiet=True) as tracker:
        for _ in range(3):
            tracker.advance(1, loss=0.5)
    assert caplog.text == ""
    with track(3, "work") as tracker:
        tracker.skip(1)
        tracker.advance(1, loss=0.5)
        tracker.advance(1, loss=0.25)
    assert "work: 3/3" in caplog.text and "loss=0.25" in caplog.text and "2/3" not in caplog.text
