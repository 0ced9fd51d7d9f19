"""Which of two values of a validation metric is better."""

from __future__ import annotations


def larger_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is better: true of all but the losses.

    >>> larger_is_better("top1/loss"), larger_is_better("loss")
    (True, False)
    """
    return metric not in ("loss", "raw/loss")


def score(metric: str, value: float) -> float:
    """Negate a metric where lower is better. Applying it twice restores the value."""
    return value if larger_is_better(metric) else -value
