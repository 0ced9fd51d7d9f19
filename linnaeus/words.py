"""Words of the sentences that users read, and what the name of a metric says."""

from __future__ import annotations

from collections.abc import Sequence

_NUM_NAMED = 5
"""Largest number of files or classes that a message names; it only counts the others."""
_SMALLER_IS_BETTER = ("loss", "error", "mae", "mse", "ece", "nll", "brier", "perplexity")
"""Ends of the names of metrics of which a lower value is a better one."""
_OF_LEVELS = ("top1/", "top5/", "map/", "f1/")
"""Starts of the names of metrics that end in the name of a level, which may be any."""


def counted(number: int, noun: str) -> str:
    """A number with its noun, whose plural ends in `s`, or in `es` after another `s`.

    >>> counted(1, "trial"), counted(0, "trial"), counted(2, "process")
    ('1 trial', '0 trials', '2 processes')
    """
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def larger_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is a better one. Whatever compares values of a metric asks this.

    >>> larger_is_better("top1/loss"), larger_is_better("aux/loss"), larger_is_better("calibration_error")
    (True, False, False)
    """
    parts = metric.lower().split("/")
    return metric.startswith(_OF_LEVELS) or not any(p.endswith(_SMALLER_IS_BETTER) for p in parts)


def score(metric: str, value: float) -> float:
    """The value of a metric, negated unless a larger one is better; the score of a score is the value."""
    return value if larger_is_better(metric) else -value


def several(names: Sequence[str]) -> str:
    """The first few of many names, and how many more there are.

    >>> several(["a", "b"]), several(list("abcdefgh"))
    ('a, b', 'a, b, c, d, e and 3 more')
    """
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
