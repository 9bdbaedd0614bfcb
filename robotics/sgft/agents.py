"""What a method of the real stage is: five pure functions of one lane, and nothing else.

The loop in finetune.py runs any of them, `vmap`ped over seeds: SGFT-SAC, SGFT-MB and every baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

__all__ = ["Agent"]


class Agent(NamedTuple):
    """One method, for one lane; `state` and `source` are pytrees that may carry a leading lane axis in vmap.

    Attributes:
      init: `(key, source, options) -> state`.
      explore: `(state, source, observation [O], key) -> action [A]` in [-1, 1], on the robot while learning.
      exploit: `(state, source, observation [N, O], key) -> action [N, A]`, exact but for draws in planning.
      learn: `(state, source, experience [n], key) -> (state, metrics)`, called after every `n` real steps.
      options: a pytree of scalars for `init`: methods that differ in it alone share one compile.
    """

    init: Callable[..., Any]
    explore: Callable[..., jax.Array]
    exploit: Callable[..., jax.Array]
    learn: Callable[..., tuple[Any, dict[str, jax.Array]]]
    options: Any = None
