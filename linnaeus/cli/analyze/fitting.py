"""The sizes that fit on each device, from the prediction of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.gpus import device_that_would_do
from linnaeus.autobatch.predict.prediction import largest_within
from linnaeus.autobatch.search import Candidates
from linnaeus.cli.analyze.breakdown import Breakdown, break_down
from linnaeus.cli.analyze.results import Row
from linnaeus.cli.analyze.traced import PredictedStep

CURVE_POINTS = 12
"""Sizes of the predicted curve of a mode."""
MAX_STEPS_DOWN = 256
"""Sizes below a bound that are looked at one by one, before the range below them is halved."""


def fill(row: Row, step: PredictedStep, limit_gb: float | None) -> None:
    """Find the largest sizes within the row's fraction of its device, with the margin and without."""
    assert row.predicted is not None
    prediction = step.prediction
    row.budget_bytes = of_device = int(row.memory_fraction * row.predicted.device_bytes)
    if limit_gb is not None:
        of_limit = prediction.base_bytes + int(row.memory_fraction * limit_gb * GIB)
        row.budget_bytes = min(of_device, of_limit)
    safe = largest_size(step, row.budget_bytes, prediction.safe_bytes)
    row.predicted = replace(
        row.predicted, safe_batch_size=safe,
        safe_peak_bytes=None if safe is None else prediction.peak_bytes(safe),
        memory_limit_gb=limit_gb if row.budget_bytes < of_device else None,
    )  # fmt: skip
    sizes = (largest_size(step, row.budget_bytes, prediction.peak_bytes), safe)
    row.batch_size = max((size for size in sizes if size is not None), default=None)
    if row.batch_size is None:
        row.reason = _why_nothing_fits(row, step)
        return
    row.limited_by = step.bound if row.batch_size == step.candidates[len(step.candidates) - 1] else "memory"
    row.peak_bytes = prediction.peak_bytes(row.batch_size)
    row.breakdown = _breakdown(row.peak_bytes, step)
    if row.limited_by == "dataset":
        row.notes.append(f"{row.mode}: the dataset limits the batch size: {step.data}")
    if safe is None:
        enough = _what_would_do(row, step)
        row.notes.append(f"{row.mode}, {row.memory}: no size fits with the margin; {enough}")


def largest_size(step: PredictedStep, budget_bytes: int, need: Callable[[int], int]) -> int | None:
    """The largest allowed size that needs no more than the budget; None where none does.

    Needs are a sawtooth in the size, so halving ranges of different lengths would end at different sizes. The
    sizes that the configuration allows must not change the answer, except that they bound it: so one search
    over all sizes gives the size that fits where the next one does not, and the bounds apply to that.
    """
    allowed = step.candidates
    free = largest_within(step.all_sizes, budget_bytes, need)
    if free is None or free < allowed[0]:  # then hardly anything that is allowed can fit
        return largest_within(allowed, budget_bytes, need)
    top = allowed.nearest(free)
    top -= allowed[top] > free
    for index in range(top, max(-1, top - MAX_STEPS_DOWN), -1):
        if need(allowed[index]) <= budget_bytes:
            return allowed[index]
    if top < MAX_STEPS_DOWN:
        return None
    below = Candidates(allowed[0], allowed[top - MAX_STEPS_DOWN], step.multiple_of)
    return largest_within(below, budget_bytes, need)


def _why_nothing_fits(row: Row, step: PredictedStep) -> str:
    assert row.predicted is not None
    assert row.budget_bytes is not None
    size, base_bytes = step.candidates[0], step.prediction.base_bytes
    peak_bytes = step.prediction.peak_bytes(size)
    limit_gb = row.predicted.memory_limit_gb
    origin = f"{row.memory_fraction:.0%} of {row.device}"
    if limit_gb is not None:
        origin = f"{row.memory_fraction:.0%} of DATA.AUTOBATCH.MEMORY_LIMIT_GB, {limit_gb:g} GiB"
    return (
        f"prediction ({row.mode}): no batch size fits. The budget is {row.budget_bytes / GIB:.2f} GiB, "
        f"{origin}; batch size {size} takes {peak_bytes / GIB:.2f} GiB, of which {base_bytes / GIB:.2f} GiB "
        f"are in use beside the allocator; {_what_would_do(row, step)}"
    )


def _what_would_do(row: Row, step: PredictedStep) -> str:
    """The device or the limit with which the smallest size fits with the margin."""
    assert row.predicted is not None
    prediction = step.prediction
    safe_bytes = prediction.safe_bytes(step.candidates[0])
    note = f", with the margin of {100 * (prediction.margin - 1):.3g} %"
    if row.predicted.memory_limit_gb is None or safe_bytes > row.memory_fraction * row.predicted.device_bytes:
        return device_that_would_do(safe_bytes / row.memory_fraction, note)
    limit = (safe_bytes - prediction.base_bytes) / row.memory_fraction / GIB
    return f"a limit of {math.ceil(100 * limit) / 100:.2f} GiB would do{note}"


def _breakdown(peak_bytes: int, step: PredictedStep) -> Breakdown:
    state = step.state
    resident = state.parameters + state.buffers + state.average
    if step.mode == "val":
        resident += state.optimizer_state
    held_bytes = step.prediction.base_bytes + resident
    return break_down(
        step.mode, state, peak_bytes=peak_bytes, held_bytes=held_bytes, has_buckets=step.has_buckets
    )


def curve(step: PredictedStep, rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Predicted peaks at sizes up to the largest one found; where none fits, at the smallest ones."""
    smallest = step.candidates[0]
    largest = max((row.batch_size for row in rows if row.batch_size is not None), default=None)
    if largest is None:
        largest = min(8 * smallest, step.candidates[len(step.candidates) - 1])
    sizes = {max(round(largest * part / CURVE_POINTS), smallest) for part in range(1, CURVE_POINTS + 1)}
    return [(size, step.prediction.peak_bytes(size)) for size in sorted(sizes)]
