"""Run: what an experiment is handed: workdir, mesh, metrics, resumable loops, figures, summary."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from ml_collections import ConfigDict

from core import check, preemption, report, workdirs
from core import export as exporting
from core import progress as progressing
from core import summary as summaries
from core.checkpoint import Checkpoints, data_position, set_data_position
from core.config import ROOT, recorded, sha256
from core.errors import NonFiniteError, Preempted, UserError, explain
from core.files import read_json, write_bytes, write_json
from core.mesh import check_same_config, make_mesh, to_host
from core.metrics import Writer, compile_seconds
from core.stages import Stages
from core.summary import Claim

__all__ = ["Claim", "Loaded", "Run", "execute", "export", "load"]

State = TypeVar("State")
_log = logging.getLogger(__name__)


class Run:
    """One run of one config in one workdir; experiments get it from launch, tests and users make it.

    Args:
      config: the method's ConfigDict; `config.name` and `config.mesh` are read here.
      workdir: everything is written below it. A run that ended early resumes from what is there.
      mode: "train" writes; "eval" only restores and never trains.
      variant, overrides: recorded in config.json and summary.json.
      mesh: a device mesh instead of the one that `config.mesh` describes.
      results: folder that a finished, un-overridden run's summary is copied to, or None.
      quiet: no progress output.

    Raises UserError if the workdir belongs to another config or the mesh does not fit the devices.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: str | os.PathLike,
        *,
        mode: str = "train",
        variant: str = "small",
        overrides: Mapping[str, Any] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        results: Path | None = None,
        quiet: bool = False,
    ):
        self.config, self.workdir, self.mode, self.quiet = config, Path(workdir), mode, quiet
        self.variant, self.overrides = variant, dict(overrides or {})
        self.mesh = make_mesh(config.mesh) if mesh is None else mesh
        self.finished = False
        self._results = results
        self._main = jax.process_index() == 0
        self._started, self._compiled = time.monotonic(), compile_seconds()
        self._before = {"wall_s": 0.0, "compile_s": 0.0}
        self._stop = threading.Event()
        self._shown: dict[str, float] = {}
        self._checkpoints: Checkpoints | None = None
        if mode == "train":
            workdirs.prepare(self.workdir, config, variant=variant, overrides=self.overrides)
        self._stages = Stages(self.workdir / "checkpoints", writable=self._main and mode == "train")
        if mode == "train":
            self.metrics = Writer(self.workdir)
            if not self._stages.replaying:
                self.metrics.truncate(0)

    @property
    def preempted(self) -> bool:
        """Whether SIGTERM arrived: the current loop saves and ends at its next iteration."""
        return self._stop.is_set()

    def preempt(self) -> None:
        """Asks the run to save and end at the next iteration boundary, as SIGTERM does."""
        self._stop.set()

    def log(self, step: int, values: Mapping[str, Any], *, group: str = "") -> None:
        """Writes scalars `[]` to metrics.jsonl and TensorBoard, as `group/key`; nothing in eval mode.

        Raises NonFiniteError if a key that ends in "loss" is NaN or infinite.
        """
        numbers = {key: np.asarray(value).item() for key, value in values.items()}
        if self.mode == "train" and not self._stages.replaying:
            self.metrics.write(step, numbers, prefix=group)
        self._shown = dict(list(numbers.items())[:3])
        for key, value in numbers.items():
            if key.endswith("loss") and not math.isfinite(value):
                name = f"{group}/{key}" if group else key
                raise NonFiniteError(f"{name} is {value} at step {step}; {self._last_checkpoint()}")

    def progress(self, total: int, description: str) -> AbstractContextManager[progressing.Tracker]:
        """Returns a context manager whose value has `advance(n=1, **shown)`; see core.progress.track."""
        return progressing.track(total, description, quiet=self.quiet or not self._main)

    def figure(self, name: str, figure: Any, caption: str = "") -> None:
        """Writes a matplotlib figure and its caption to figures/ (not in eval mode), and closes it."""
        if self._main and self.mode == "train":
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
            folder = self.workdir / "figures"
            write_bytes(folder / f"{name}.png", buffer.getvalue())
            captions = read_json(folder / "captions.json") if (folder / "captions.json").is_file() else {}
            write_json(folder / "captions.json", {**captions, name: caption})
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close(figure)

    def loop(
        self,
        name: str,
        *,
        init: Callable[[], State],
        step: Callable[[State, int], State],
        total: int,
        checkpoint_every: int,
        iterator: Any = None,
        progress: str | None = None,
    ) -> State:
        """Runs `state = step(state, i)` for i in range(total), resumably; returns the last state.

        Args:
          name: of this stage, unique in the run; stages run one after another.
          init: makes the state, a pytree of arrays; called on resume too, for structure and shardings.
          step: one host iteration, usually a jitted block of many training steps.
          total, checkpoint_every: in iterations. A checkpoint is also kept at the end and on SIGTERM.
          iterator: a data iterator whose position is part of the checkpoint.
          progress: what to call this stage in the progress display; its name by default.

        A run that died goes on from its newest readable checkpoint: state, data position and metrics.jsonl
        (records after the checkpoint are cut) are as in an unbroken run. Raises Preempted after SIGTERM; in
        eval mode it returns the newest state without a step, UserError if there is none.
        """
        if checkpoint_every < 1:
            raise ValueError(f"checkpoint_every is {checkpoint_every}: at least 1 iteration")
        if self.mode != "train":
            state = self.restore(name, init())
            if state is None:
                raise UserError(f"no checkpoint of {name} in {self.workdir}: train first (--mode=train)")
            return state
        begun_at = self._stages.enter(name, self.metrics.offset())
        state, start = init(), 0
        self._checkpoints = checkpoints = Checkpoints(self.workdir / "checkpoints" / name)
        if begun_at is not None and (restored := checkpoints.restore(state)):
            start, state, host = restored
            begun_at = host["metrics_offset"]
            self._before = {key: max(self._before[key], host[key]) for key in self._before}
            if iterator is not None:
                set_data_position(iterator, host["iterator"])
            _log.info("%s: going on after iteration %d of %d", name, start, total)
        if begun_at is not None and (start < total or self._stages.is_last(name)):
            self.metrics.truncate(begun_at)
            self._stages.forget_after(name)
            self._stages.replaying = False

        def save(done: int) -> None:
            self.metrics.flush()
            host = {"metrics_offset": self.metrics.offset(), **self._clock()}
            if iterator is not None:
                host["iterator"] = data_position(iterator)
            checkpoints.save(done, state, host)

        try:
            with self.progress(total, progress or name) as tracker:
                tracker.skip(start)
                for i in range(start, total):
                    if preemption.agreed(self._stop):
                        save(i)
                        break
                    state = step(state, i)
                    tracker.advance(1, **self._shown)
                    if (i + 1) % checkpoint_every == 0 or i + 1 == total:
                        save(i + 1)
            checkpoints.wait()
            if preemption.agreed(self._stop):
                raise Preempted(f"SIGTERM: {self._last_checkpoint()}; run the same command to go on")
        finally:
            self._checkpoints = None
            checkpoints.close()
        return state

    def restore(self, name: str, like: State) -> State | None:
        """Returns the newest state of stage `name`, as `like` is structured and sharded; None if none."""
        directory = self.workdir / "checkpoints" / name
        if not directory.is_dir():
            return None
        checkpoints = Checkpoints(directory)
        try:
            restored = checkpoints.restore(like)
        finally:
            checkpoints.close()
        return None if restored is None else restored.state

    def summary(
        self, *, claims: Sequence[Claim], metrics: Mapping[str, Any], seeds: Sequence[int]
    ) -> dict[str, Any]:
        """Writes summary.json (and results/, see `Run`); metrics are `[]` or one value a seed `[S]`.

        Returns what was written. The run counts as finished from then on.
        """
        commit, dirty = summaries.commit(ROOT)
        record = {
            "schema": 1,
            "name": self.config.name,
            "method": self.config.method,
            "variant": self.variant,
            "overrides": self.overrides,
            "config_sha256": sha256(self.config),
            "commit": commit,
            "dirty": dirty,
            "status": "done",
            "seeds": [int(seed) for seed in seeds],
            "claims": [claim.as_dict() for claim in claims],
            "metrics": summaries.measured(metrics),
            "environment": summaries.environment(),
            **self._clock(),
        }
        if self._main and self.mode == "train":
            self.metrics.flush()
            write_json(self.workdir / "summary.json", record)
            if self._results is not None:
                summaries.copy_to_results(record, self._results)
        self.finished = True
        return record

    def export(
        self, apply: Callable, params: Any, example_args: tuple, *, directory: Path | None = None
    ) -> Path:
        """Writes `apply(params, *inputs)` by core.export.save to `directory`, WORKDIR/export by default."""
        directory = self.workdir / "export" if directory is None else Path(directory)
        params = to_host(params)
        if self._main:
            exporting.save(directory, apply, params, example_args)
        return directory

    def close(self) -> None:
        """Flushes and closes the metrics."""
        if self.mode == "train":
            self.metrics.close()

    def _clock(self) -> dict[str, float]:
        now = {
            "wall_s": time.monotonic() - self._started,
            "compile_s": compile_seconds() - self._compiled,
        }
        return {key: round(now[key] + self._before[key], 3) for key in now}

    def _last_checkpoint(self) -> str:
        if self._checkpoints is not None:
            self._checkpoints.wait()
        for name in reversed(self._stages.names):
            directory = self.workdir / "checkpoints" / name
            if steps := Checkpoints(directory).steps():
                return f"last good checkpoint: {directory / str(steps[-1])}"
        return "no checkpoint was written yet"


class Loaded(NamedTuple):
    """A trained run: its config, its parameters (a pytree), and the experiment's `apply(params, *inputs)`."""

    config: ConfigDict
    params: Any
    apply: Callable


def load(workdir: str | os.PathLike) -> Loaded:
    """Gives back what a run learned, on whatever devices are here; UserError if there is no usable run."""
    config = recorded(Path(workdir)).config
    run = Run(config, workdir, mode="eval", mesh=make_mesh({"data": -1}), quiet=True)
    return Loaded(config, *experiment(config).load(config, run))


def export(workdir: str | os.PathLike, directory: str | os.PathLike) -> Path:
    """Writes what a run learned to `directory` for use without this code (core.export.load reads it).

    The experiment's `example(config)` gives the inputs of `apply` after the parameters, `[B, ..]` each.
    """
    config, params, apply = load(workdir)
    method = experiment(config)
    if not hasattr(method, "example"):
        raise UserError(f"{config.method} has nothing to export: its experiment defines no example(config)")
    exporting.save(Path(directory), apply, params, method.example(config))
    return Path(directory)


def experiment(config: ConfigDict) -> ModuleType:
    """Imports `<config.method>.experiment`; UserError if there is no such module."""
    name = f"{config.method}.experiment"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise UserError(f"config.method is {config.method!r}, but there is no module {error.name}") from None


def execute(
    config: ConfigDict,
    workdir: str | os.PathLike,
    *,
    mode: str = "train",
    variant: str = "small",
    overrides: Mapping[str, Any] | None = None,
    restart: bool = False,
    results: Path | None = None,
    quiet: bool = False,
) -> int:
    """Runs a config in one of the modes train, eval, check, report; returns the exit code (design section 3).

    JAX is set up by then: platform, processes. The three errors of core.errors are printed as one line;
    others are bugs and propagate. Arguments as for Run; `restart` moves an old workdir aside first.
    """
    workdir = Path(workdir)
    try:
        if mode in ("eval", "report"):
            recorded(workdir)  # raises if there is no run
        if mode == "report":
            print(report.write(workdir))
            return 0
        method = experiment(config)
        getattr(method, "validate", lambda config: None)(config)
        if jax.process_count() > 1:
            check_same_config(sha256(config))
        if mode == "check":
            return check.run(config, workdir, method, variant=variant)
        if mode == "eval":
            workdirs.settle(workdir, config)
            return _evaluate(Run(config, workdir, mode="eval", variant=variant, quiet=quiet), method)
        if restart and (moved := workdirs.move_aside(workdir)):
            _log.info("the old run is now %s", moved)
        workdirs.settle(workdir, config)
        if done := workdirs.finished(workdir):
            if jax.process_index() == 0:
                print(summaries.render(done))
            return 0
        run = Run(config, workdir, variant=variant, overrides=overrides, results=results, quiet=quiet)
        return _train(run, method)
    except (UserError, NonFiniteError, Preempted) as error:
        return explain(error)


def _train(run: Run, method: ModuleType) -> int:
    try:
        with preemption.on_sigterm(run._stop):
            metrics = method.run(run.config, run)
            if not run.finished:
                run.summary(claims=(), metrics=metrics or {}, seeds=(run.config.seed,))
    except NonFiniteError:
        if jax.process_index() == 0:
            report.write(run.workdir)  # its curves show how it went wrong
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"no space left for {error.filename or run.workdir}"
        raise UserError(f"{where}; {run._last_checkpoint()}; free space and run the same command") from None
    finally:
        run.close()
    if jax.process_index() == 0:
        report.write(run.workdir)
        print(summaries.render(read_json(run.workdir / "summary.json")))
    return 0


def _evaluate(run: Run, method: ModuleType) -> int:
    record = {
        "schema": 1,
        "name": run.config.name,
        "variant": run.variant,
        "config_sha256": sha256(run.config),
        "metrics": method.evaluate(run.config, run),
        "environment": summaries.environment(),
        **run._clock(),
    }
    if jax.process_index() == 0:
        write_json(run.workdir / "eval.json", record)
        print(run.workdir / "eval.json")
    return 0
