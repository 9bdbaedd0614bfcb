"""The sides of each comparison do the same work, on sizes that take seconds."""

import os
import subprocess
import sys

import pytest

from benchmarks import sgft, sgft_env, sgft_sac
from core.config import ROOT


def test_native_and_bare_rollout_end_in_the_same_physics():
    ours, theirs, equal = sgft_env.native_pair(6, 3)
    assert equal
    assert (ours() == theirs()).all()
    assert len({tuple(row) for row in ours().tolist()}) == 6


@pytest.mark.parity
def test_torch_makes_the_same_updates_and_a_difference_is_noticed(monkeypatch):
    pytest.importorskip("torch")
    from benchmarks import sgft_torch

    problem = sgft_sac.make(4, 16, 8)  # the target is the minimum of a drawn subset
    assert sgft_sac.same_updates(problem, n=4) < sgft_sac.TOLERANCE
    monkeypatch.setattr(sgft_torch, "EPSILON", 1e-2)
    assert sgft_sac.same_updates(problem, n=4) > sgft_sac.TOLERANCE


def test_compiling_is_taken_out_of_the_first_stretches():
    from benchmarks.sgft_ppo import without_compiling

    assert without_compiling([30.0, 3.0, 1.0, 2.0, 1.5]) == ([1.5, 1.5, 1.0, 2.0, 1.5], 30.0)


def test_every_benchmark_that_is_promised_is_there():
    assert {"sac_small", "sac_large", "env_native", "env_mjx", "ppo_brax"} <= set(sgft.benchmarks())


@pytest.mark.slow
@pytest.mark.parity
def test_all_of_it_runs():
    """As a user starts it: with the devices there are, where the tests otherwise fake eight."""
    pytest.importorskip("torch")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "benchmarks.sgft", "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("ratio") == 4
    assert "DIFFER" not in done.stdout.split("ppo_brax ..")[0]
