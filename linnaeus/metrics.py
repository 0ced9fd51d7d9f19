"""Which of two values of a validation metric is better."""

from __future__ import annotations

import math
from collections.abc import Mapping


def larger_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is better: true of all but the losses.

    >>> larger_is_better("top1/loss"), larger_is_better("loss")
    (True, False)
    """
    return metric not in ("loss", "raw/loss")


def score(metric: str, value: float) -> float:
    """Negate a metric where lower is better. Applying it twice restores the value."""
    return value if larger_is_better(metric) else -value


def sort_key(
    metric: str, values: Mapping[str, float | None], place: float
) -> tuple[float, float, float] | None:
    """Return the score, the negated loss and the place of a validation: the largest tuple is the best.

    Of equal values of the metric, the smaller loss wins, then the later place. None if there is no value.

    >>> validations = [{"top1": 0.5, "loss": 2.0}, {"top1": 0.5, "loss": 1.0}, {"top1": None}]
    >>> [sort_key("top1", values, epoch) for epoch, values in enumerate(validations, start=1)]
    [(0.5, -2.0, 1), (0.5, -1.0, 2), None]
    """
    value, loss = values.get(metric), values.get("loss")
    if value is None or math.isnan(value):
        return None
    return score(metric, value), -math.inf if loss is None or math.isnan(loss) else -loss, place
