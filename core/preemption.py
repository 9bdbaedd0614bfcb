"""SIGTERM as a request: the run saves at its next iteration and ends; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

__all__ = ["agreed", "on_sigterm"]


@contextmanager
def on_sigterm(stop: threading.Event) -> Iterator[None]:
    """While inside, the first SIGTERM sets `stop`, a second exits with 143; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            os._exit(143)
        stop.set()
        os.write(2, b"SIGTERM: saving at the next iteration; a second one ends at once\n")

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def agreed(stop: threading.Event) -> bool:
    """Whether any process was asked to stop: the same answer on all, so that all save the same iteration."""
    if jax.process_count() == 1:
        return stop.is_set()
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(stop.is_set()))))
