"""SAC updates per second: one scan of core.rl.sac against the eager torch loop, and how they grow."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.harness import Growth, Point, Row
from core import flops
from core.rl import replay, sac
from core.rl.networks import Actor, Critic

__all__ = ["growth_with_batch", "growth_with_seeds", "large", "make", "same_updates", "small"]

OBSERVATION, ACTION, ROWS = 8, 2, 4096
WORK = (
    "SAC updates, each of critic, target average, actor and temperature; drawing the batch from the replay "
    "and the noise counts on both sides; ours one scan, torch an eager loop"
)
# Largest relative difference of what the updates changed and of the losses. Float32 sums in another order, in
# steps of Adam, which divides by the size of the gradient.
TOLERANCE = 2e-3


class Problem(NamedTuple):
    """A SAC start: static config, state, hyper-parameters, a filled replay and the batch size."""

    config: sac.Config
    state: sac.SACState
    hyper: sac.Hyper
    replay: replay.Replay
    batch: int


def make(ensemble: int, width: int, batch: int) -> Problem:
    """`ensemble` critics and an actor with two hidden layers of `width`; 4096 random transitions."""
    actor = Actor(ACTION, (width, width), nn.relu, log_std="head", log_std_init=-1.0)
    config = sac.Config(actor, Critic(ensemble, (width, width)))
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal((ROWS, *shape), np.float32)

    data = replay.Transition(
        observation=normal(OBSERVATION),
        action=np.tanh(normal(ACTION)),
        reward=normal(),
        next_observation=normal(OBSERVATION),
        terminated=rng.random(ROWS) < 0.02,
        truncated=np.zeros(ROWS, bool),
        episode_id=np.zeros(ROWS, np.int32),
        t=np.arange(ROWS, dtype=np.int32),
    )
    filled = replay.Replay(jax.tree.map(jnp.asarray, data), jnp.int32(0), jnp.int32(ROWS))
    init = functools.partial(sac.init, config=config, observation_size=OBSERVATION)
    state = jax.jit(init)(jax.random.key(0))
    return Problem(config, state, sac.Hyper.arrays(), filled, batch)


def block(state, key, filled, hyper, *, config: sac.Config, batch: int, n: int):
    """`n` updates of one lane on batches drawn from `filled`; pure."""

    def sample(key):
        rows = replay.sample(filled, key, batch)
        return sac.Batch(rows.observation, rows.action, rows.reward, rows.next_observation, rows.terminated)

    return sac.update_block(state, key, sample, hyper, config=config, n=n)


class Ours:
    """The compiled block; a call makes the next `n` updates of its own state, in `flops` operations."""

    def __init__(self, problem: Problem, n: int, *, seeds: int | None = None):
        function = functools.partial(block, config=problem.config, batch=problem.batch, n=n)
        self.state, self._rest = problem.state, (problem.replay, problem.hyper)
        if seeds:
            function = jax.vmap(function)
            self.state, *self._rest = (
                jax.tree.map(lambda x: jnp.stack([x] * seeds), tree) for tree in (self.state, *self._rest)
            )
        else:
            self.state = jax.tree.map(jnp.array, self.state)  # it is donated
        self._keys = [
            jax.random.split(key, seeds) if seeds else key for key in jax.random.split(jax.random.key(1), 64)
        ]
        self._calls = 0
        self.flops = flops.count(function, self.state, self._keys[0], *self._rest)
        self._step, self.compile_s, self.peak_bytes = harness.compile_and_time(
            function, self.state, self._keys[0], *self._rest, donate_argnums=0
        )
        self()

    def __call__(self):
        self.state, metrics = self._step(self.state, self._keys[self._calls % 64], *self._rest)
        self._calls += 1
        return metrics


def torch_peer(problem: Problem, n: int) -> Any:
    """The torch loop at the layout and the number of threads that make `n` updates fastest here."""
    import torch

    from benchmarks.sgft_torch import LAYOUTS

    def run(peer, threads):
        torch.set_num_threads(threads)
        peer.run(n)

    peers = {layout: _torch(problem, layout) for layout in LAYOUTS}
    variants = {
        (layout, threads): functools.partial(run, peer, threads)
        for layout, peer in peers.items()
        for threads in sorted({1, harness.threads()})
    }
    layout, threads = harness.fastest(variants)
    torch.set_num_threads(threads)
    return peers[layout]


def _torch(problem, layout):
    from benchmarks.sgft_torch import TorchSAC

    config, hyper, batch = problem.config, problem.hyper, problem.batch
    state, data = jax.device_get((problem.state, problem.replay.data))
    return TorchSAC(config, state, hyper, data, batch=batch, layout=layout)


def same_updates(problem: Problem, *, n: int = 8) -> float:
    """Makes `n` updates on all sides from the same parameters, batches and random numbers.

    Returns:
      the largest relative difference `|ours - theirs| / |theirs|` (Euclidean) among the mean losses and the
      changes of each array of the actor, the critic and the target and of the temperature.
    """
    import torch

    from benchmarks.sgft_torch import LAYOUTS, Draw

    key = jax.random.key(2)
    ours = jax.jit(functools.partial(block, config=problem.config, batch=problem.batch, n=n))
    state, metrics = jax.device_get(ours(problem.state, key, problem.replay, problem.hyper))
    # The random numbers of `update_block`, drawn again from its keys.
    sample_key, draw_key = jax.random.split(key)
    rows = jax.vmap(lambda k: replay.sample(problem.replay, k, problem.batch).t)(
        jax.random.split(sample_key, n)
    )
    draws = jax.device_get((rows, *sac.draw(draw_key, (n,), problem.batch, problem.config)))
    draws = [[None] * n if leaf is None else torch.tensor(np.array(leaf)) for leaf in draws]

    differences = []
    for layout in LAYOUTS:
        peer = _torch(problem, layout)
        before = [leaf.copy() for leaf in peer.parameters()]
        losses = peer.run(n, [Draw(*each) for each in zip(*draws, strict=True)]).numpy()
        after = zip(peer.arrays(state), peer.parameters(), before, strict=True)
        pairs = [(ours - start, theirs - start) for ours, theirs, start in after]
        pairs += zip((metrics[f"{name}_loss"] for name in ("critic", "actor", "alpha")), losses, strict=True)
        differences += [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
    return max(differences)


def small(quick: bool) -> tuple[list[Row], list[Growth]]:
    """2 critics 128x128, batch 128."""
    return [_row("sac_small", 2, 128, 128, n=8 if quick else 160, pairs=5 if quick else 11, target=2.0)], []


def large(quick: bool) -> tuple[list[Row], list[Growth]]:
    """10 critics 256x256, batch 256."""
    return [_row("sac_large", 10, 256, 256, n=2 if quick else 20, pairs=5 if quick else 9, target=1.0)], []


def _row(id, ensemble, width, batch, *, n, pairs, target):
    import torch

    problem = make(ensemble, width, batch)
    difference = same_updates(problem)
    ours, theirs = Ours(problem, n), torch_peer(problem, max(1, n // 4))
    times = harness.alternate(
        lambda i: harness.seconds(ours), lambda i: harness.seconds(lambda: theirs.run(n)), pairs=pairs
    )
    layout = "stacked" if theirs.stacked else "a loop over the critics"
    return harness.paired_row(
        id,
        work=f"{WORK}, {layout}, {torch.get_num_threads()} thread(s), its best here; "
        f"largest relative difference {difference:.1e}",
        size=f"{ensemble} critics {width}x{width}, actor {width}x{width}, batch {batch}, {n} updates a call",
        ours=times[0],
        theirs=times[1],
        amount=n,
        peer="torch",
        peer_version=harness.version("torch"),
        outputs_equal=difference <= TOLERANCE,
        tolerance=TOLERANCE,
        target=target,
        compile_s=ours.compile_s,
        peak_bytes=ours.peak_bytes,
    )


def growth_with_batch(quick: bool) -> tuple[list[Row], list[Growth]]:
    """Seconds of one update of 2 critics 128x128 with the batch, beside the torch loop."""
    n = 4 if quick else 20
    points = []
    for batch in (64, 256) if quick else (64, 256, 1024):
        problem = make(2, 128, batch)
        ours, theirs = Ours(problem, n), torch_peer(problem, n)
        times = harness.alternate(
            lambda i, ours=ours: harness.seconds(ours),
            lambda i, theirs=theirs: harness.seconds(lambda: theirs.run(n)),
        )
        points.append(Point(batch, *(float(np.median(side)) / n for side in times), "s"))
    return [], [Growth("sac_batch", "batch", tuple(points), harness.exponent(points))]


def growth_with_seeds(quick: bool) -> tuple[list[Row], list[Growth]]:
    """Seconds of one update of all seeds, `vmap`ped, 2 critics 128x128, batch 128."""
    n = 4 if quick else 20
    points = []
    for seeds in (1, 2) if quick else (1, 3, 8):
        ours = Ours(make(2, 128, 128), n, seeds=seeds)
        times = [harness.seconds(ours) for _ in range(harness.PAIRS)]
        points.append(Point(seeds, float(np.median(times)) / n, None, "s"))
    return [], [Growth("sac_seeds", "vmapped seeds", tuple(points), harness.exponent(points))]
