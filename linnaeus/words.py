"""Words of the sentences that users read."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number with its noun, whose plural ends in `s`, or in `es` after another `s`.

    >>> counted(1, "trial"), counted(0, "trial"), counted(2, "process")
    ('1 trial', '0 trials', '2 processes')
    """
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
