"""Words of the sentences that users read."""

from __future__ import annotations

from collections.abc import Sequence

_NUM_NAMED = 5
"""Largest number of files or classes that a message names; it only counts the others."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, whose plural ends in `s`, or in `es` after another `s`.

    >>> counted(1, "trial"), counted(0, "trial"), counted(2, "class")
    ('1 trial', '0 trials', '2 classes')
    """
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def in_units(num_bytes: float) -> str:
    """Return a number of bytes in GiB, or in MiB below a tenth of one.

    >>> in_units(2**31), in_units(3 * 2**20)
    ('2.00 GiB', '3.0 MiB')
    """
    mib = num_bytes / 2**20
    return f"{mib:.1f} MiB" if mib < 102.4 else f"{mib / 1024:.2f} GiB"


def several(names: Sequence[str]) -> str:
    """Return the first few of many names, and how many more there are.

    >>> several(["a", "b"]), several(list("abcdefgh"))
    ('a, b', 'a, b, c, d, e and 3 more')
    """
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
