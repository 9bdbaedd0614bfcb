"""The three ways a run ends early; launch.py turns each into an exit code."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterable

__all__ = ["NonFiniteError", "Preempted", "UserError", "explain", "nearest"]


class UserError(Exception):
    """Wrong input: the message says what, where and what to do; shown as one line, exit code 2."""


class NonFiniteError(Exception):
    """A loss became NaN or infinite; the message names the step and the last good checkpoint, exit code 3."""


class Preempted(Exception):
    """SIGTERM arrived and a complete checkpoint was written; exit code 143."""


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Returns "; did you mean 'x'?" for the closest of `names`, or "" if none has similarity `cutoff`."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain(error: UserError | NonFiniteError | Preempted) -> int:
    """Prints the error as one line on stderr (launch's --debug: a traceback before it); its exit code."""
    line = " ".join(str(error).split())
    logging.getLogger(__name__).debug("%s", type(error).__name__, exc_info=error)
    codes = {UserError: 2, NonFiniteError: 3, Preempted: 143}
    print(line if isinstance(error, Preempted) else f"error: {line}", file=sys.stderr, flush=True)
    return next(code for kind, code in codes.items() if isinstance(error, kind))
