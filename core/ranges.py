"""The ranges of a config's numbers: what no run could work with is said before one starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from core.config import flatten
from core.errors import UserError

__all__ = ["ANY", "COUNT", "NATURAL", "NOT_NEGATIVE", "POSITIVE", "SHARE", "Range", "check", "numbers"]


class Range(NamedTuple):
    """Numbers that a key may have: `words` follow "must be", `holds` tells."""

    words: str
    holds: Callable[[float], bool]


ANY = Range("a number", lambda x: True)
COUNT = Range("a whole number, 1 or more", lambda x: x >= 1 and x == int(x))
NATURAL = Range("a whole number, 0 or more", lambda x: x >= 0 and x == int(x))
NOT_NEGATIVE = Range("0 or more", lambda x: x >= 0)
POSITIVE = Range("above 0", lambda x: x > 0)
SHARE = Range("in 0..1", lambda x: 0 <= x <= 1)


def check(
    config: ConfigDict | Mapping[str, Any], ranges: Mapping[str, Range], *, prefix: str = "config."
) -> None:
    """Raises UserError for the first number of the config, or element of a tuple, that is out of its range.

    Args:
      ranges: pattern of dotted keys ("agents.*.lr"; `*` also spans dots) -> range; the first match counts.
      prefix: what stands before a key in the message.
    """
    for key, values in numbers(config):
        wanted = next((found for pattern, found in ranges.items() if fnmatchcase(key, pattern)), ANY)
        for value in values:
            if not wanted.holds(value):
                raise UserError(f"{prefix}{key} must be {wanted.words}, not {value}")


def numbers(config: ConfigDict | Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yields (dotted key, its numbers) of every leaf that is a number or a tuple of them."""
    for key, value in flatten(config).items():
        values = value if isinstance(value, tuple) else (value,)
        if values and all(isinstance(x, int | float) and not isinstance(x, bool) for x in values):
            yield key, values
