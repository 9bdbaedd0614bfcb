"""Training any method of graph domain adaptation: one scan over full-batch steps, with a history."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from graphs.gaa.metrics import micro_macro_f1
from graphs.gaa.networks import Domain

__all__ = ["Method", "Progress", "Scores", "TrainState", "adam", "by_gradient", "scores", "train"]

Array = jax.Array
Params = Any
_adam = optax.scale_by_adam()


class Progress(NamedTuple):
    """Where training is: `step` `[]` int, and how many `steps` `[]` there will be."""

    step: Array
    steps: Array

    @property
    def share(self) -> Array:
        """step / steps `[]`: 0 at the first step."""
        return self.step / self.steps


class Method(NamedTuple):
    """A method as pure functions; `hyper` is a dict of scalars `[]`, which may be vmapped.

    Attributes:
      init: `(key, source, target) -> state`.
      step: `(state, source, target, labelled [N_s] bool, hyper, key, Progress) -> (state, metrics)`.
      predict: `(state, Domain) -> logits [N, C]`.
    """

    init: Callable
    step: Callable
    predict: Callable


class TrainState(flax.struct.PyTreeNode):
    """What a method learned, the next step `[]`, and the key `[]` that all steps derive theirs from."""

    method: Any
    step: Array
    key: Array


class Scores(NamedTuple):
    """Micro- and macro-F1 `[...]` on the target, and on the source nodes whose labels were held out."""

    target_micro: Array
    target_macro: Array
    validation_micro: Array
    validation_macro: Array


class Learner(flax.struct.PyTreeNode):
    """Parameters and Adam's moments."""

    params: Params
    opt_state: optax.OptState


def adam(learner: Learner, gradient: Params, *, lr: Array, weight_decay: Array) -> Learner:
    """One Adam step; `weight_decay []` joins the gradient before the moments (not AdamW), `lr []`."""
    gradient = jax.tree.map(lambda g, p: g + weight_decay * p, gradient, learner.params)
    updates, opt_state = _adam.update(gradient, learner.opt_state)
    params = jax.tree.map(lambda p, u: p - lr * u, learner.params, updates)
    return Learner(params, opt_state)


def by_gradient(init: Callable, loss: Callable, predict: Callable) -> Method:
    """A Method that follows one gradient by Adam, with `lr` and `weight_decay` of `hyper`.

    Args:
      init: `(key, source, target) -> params`.
      loss: `(params, source, target, labelled, hyper, key, Progress) -> (loss [], metrics)`.
      predict: `(params, Domain) -> logits [N, C]`.
    """

    def first(key, source, target):
        params = init(key, source, target)
        return Learner(params, _adam.init(params))

    def step(learner, source, target, labelled, hyper, key, progress):
        gradient, metrics = jax.grad(loss, has_aux=True)(
            learner.params, source, target, labelled, hyper, key, progress
        )
        return adam(learner, gradient, lr=hyper["lr"], weight_decay=hyper["weight_decay"]), metrics

    return Method(first, step, lambda learner, domain: predict(learner.params, domain))


def scores(
    method: Method, state: Any, source: Domain, target: Domain, labelled: Array, *, classes: int
) -> Scores:
    """How a method does on the target, and on source nodes that are not `labelled [N_s]` (0 if all are)."""

    def score(domain, mask):
        predicted = jnp.argmax(method.predict(state, domain), axis=-1)
        return micro_macro_f1(domain.y, predicted, mask, classes=classes)

    return Scores(*score(target, target.mask & (target.y >= 0)), *score(source, source.mask & ~labelled))


def train(
    key: Array,
    source: Domain,
    target: Domain,
    labelled: Array,
    hyper: dict[str, Array],
    *,
    method: Method,
    steps: int,
    score_every: int,
    classes: int,
) -> tuple[TrainState, tuple[Scores, dict[str, Array]]]:
    """A whole run in one scan: pure, jit-able; vmap over keys, `labelled`, `hyper`, or whole tasks.

    Args:
      key: typed key.
      source, target: what is trained on; target labels are read for the scores alone.
      labelled: `[N_s]` bool, source nodes whose labels are used.
      hyper: scalars `[]` that the method reads.
      steps: full-batch steps, a multiple of `score_every`.
      classes: C.

    Returns:
      the final state; Scores and metrics `[steps / score_every]`, taken after every `score_every` steps.
    """
    init_key, run_key = jax.random.split(key)
    state = TrainState(method.init(init_key, source, target), jnp.int32(0), run_key)
    advance_block = functools.partial(
        advance,
        source=source,
        target=target,
        labelled=labelled,
        hyper=hyper,
        method=method,
        steps=steps,
        n=score_every,
        classes=classes,
    )
    return jax.lax.scan(lambda state, _: advance_block(state), state, length=steps // score_every)


def advance(
    state: TrainState,
    *,
    source: Domain,
    target: Domain,
    labelled: Array,
    hyper: dict[str, Array],
    method: Method,
    steps: int,
    n: int,
    classes: int,
) -> tuple[TrainState, tuple[Scores, dict[str, Array]]]:
    """`n` steps of a run of `steps`, then its Scores `[]` and the last step's metrics `[]`; as `train`."""

    def step(state, _):
        key = jax.random.fold_in(state.key, state.step)
        progress = Progress(state.step, jnp.float32(steps))
        learned, metrics = method.step(state.method, source, target, labelled, hyper, key, progress)
        return TrainState(learned, state.step + 1, state.key), metrics

    state, metrics = jax.lax.scan(step, state, length=n)
    found = scores(method, state.method, source, target, labelled, classes=classes)
    return state, (found, jax.tree.map(lambda x: x[-1], metrics))
