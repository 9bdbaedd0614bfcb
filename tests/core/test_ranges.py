"""Ranges: every number of a config, also inside tuples, is held to the first pattern that names it."""

import pytest
from ml_collections import ConfigDict

from core import ranges
from core.errors import UserError
from core.ranges import COUNT, NATURAL, NOT_NEGATIVE, POSITIVE, SHARE

CONFIG = ConfigDict({"name": "x", "flag": False, "n": 3, "deep": {"lr": 0.1, "sizes": (4, 2), "none": None}})


@pytest.mark.parametrize(
    ("wanted", "inside", "outside"),
    [
        (COUNT, (1, 7, 2.0), (0, -1, 1.5)),
        (NATURAL, (0, 3), (-1, 0.5)),
        (NOT_NEGATIVE, (0, 0.5), (-0.1,)),
        (POSITIVE, (1e-9, 3), (0, -1)),
        (SHARE, (0, 0.5, 1), (-0.1, 1.1)),
    ],
)
def test_ranges(wanted, inside, outside):
    assert all(map(wanted.holds, inside)) and not any(map(wanted.holds, outside))


def test_what_is_in_range_or_has_none_passes():
    ranges.check(CONFIG, {"n": COUNT, "deep.*": POSITIVE})
    ranges.check(CONFIG, {})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"n": SHARE}, r"^config\.n must be in 0\.\.1, not 3$"),
        ({"deep.sizes": SHARE}, r"^config\.deep\.sizes must be in 0\.\.1, not 4$"),
        ({"*.lr": COUNT, "*": POSITIVE}, r"^config\.deep\.lr must be a whole number, 1 or more, not 0\.1$"),
    ],
)
def test_the_first_number_out_of_range_is_named(table, message):
    with pytest.raises(UserError, match=message):
        ranges.check(CONFIG, table)


def test_numbers_are_neither_words_nor_flags():
    assert dict(ranges.numbers(CONFIG)) == {"n": (3,), "deep.lr": (0.1,), "deep.sizes": (4, 2)}
