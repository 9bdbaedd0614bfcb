"""Timings of SGFT's parts: `python -m benchmarks.sgft` (about 8 minutes on 2 cores; needs `make parity`).

Peers: an equal torch loop (SAC), mujoco.rollout (native steps), brax.training (PPO). Where JAX has an
accelerator, the comparisons that are about the host stay there, and `accelerator` adds absolute figures.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import jax

from benchmarks import harness, sgft_env, sgft_sac
from benchmarks.harness import Benchmark, Growth, Row

__all__ = ["benchmarks", "main"]

# Dense peak of float32 products as JAX runs them by default (TF32), FLOP/s, by a part of the device's name.
PEAK = {"A100": 156e12, "H100": 495e12, "H200": 495e12}


def _on_host(run: Callable) -> Callable:
    @functools.wraps(run)
    def on_host(quick: bool):
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return run(quick)

    return on_host


def _ppo(quick: bool) -> tuple[list[Row], list[Growth]]:
    # Importing brax takes seconds, which other rows need not wait for.
    from benchmarks.sgft_ppo import against_brax

    return against_brax(quick)


def on_accelerator(quick: bool) -> tuple[list[Row], list[Growth]]:
    """Absolute figures of the device JAX uses: SAC at full scale with 5 seeds, MJX at 4096 environments."""
    kind = jax.devices()[0].device_kind
    n, seeds = (2, 2) if quick else (200, 5)
    problem = sgft_sac.make(10, 256, 256)
    ours = sgft_sac.Ours(problem, n, seeds=seeds)
    times = [harness.seconds(ours) for _ in range(harness.PAIRS)]
    rate = ours.flops / sorted(times)[len(times) // 2]
    peak = next((peak for name, peak in PEAK.items() if name in kind), None)
    share = f"{rate / 1e12:.2g} TFLOP/s" + ("" if peak is None else f", {rate / peak:.2%} of the chip's peak")
    environments = 16 if quick else 4096
    steps, compile_s, peak_bytes = sgft_env.mjx_rate(environments, repeats=harness.PAIRS)
    return [
        harness.paired_row(
            "sac_accelerator",
            work=f"SAC updates of all seeds on {kind}: {share}",
            size=f"10 critics 256x256, batch 256, {seeds} seeds vmapped, {n} updates a call",
            ours=times,
            amount=n * seeds,
            compile_s=ours.compile_s,
            peak_bytes=ours.peak_bytes,
        ),
        harness.paired_row(
            "mjx_accelerator",
            work=f"control steps on MJX on {kind}, restarts included",
            size=f"puck_push, {environments} environments",
            ours=steps,
            amount=environments * sgft_env.TASK.episode_length,
            compile_s=compile_s,
            peak_bytes=peak_bytes,
        ),
    ], []


def benchmarks() -> dict[str, Benchmark]:
    """Every benchmark by its ID, in the order they run."""
    table = {
        "sac_small": Benchmark(_on_host(sgft_sac.small), peer="torch"),
        "sac_large": Benchmark(_on_host(sgft_sac.large), peer="torch"),
        "sac_batch": Benchmark(_on_host(sgft_sac.growth_with_batch), peer="torch"),
        "sac_seeds": Benchmark(sgft_sac.growth_with_seeds),
        "env_native": Benchmark(_on_host(sgft_env.native)),
        "env_mjx": Benchmark(sgft_env.through_mjx),
        "ppo_brax": Benchmark(_ppo, peer="brax"),
    }
    if jax.default_backend() != "cpu":
        table["accelerator"] = Benchmark(on_accelerator)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; `arguments` default to those of the process. Returns the exit code."""
    return harness.main("sgft", benchmarks(), arguments)


if __name__ == "__main__":
    sys.exit(main())
