"""A plan for people: a table, and notes about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.table import Table

from linnaeus.cli.duration import show_duration
from linnaeus.cli.plan.results import Plan, Row

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]\d+)?%?(?![\w.]*\w)")
"""A number or a percentage that is not part of a word."""


def results_table(plan: Plan) -> Table:
    """One line per size."""
    table = Table(title="Batch sizes by time", title_justify="left")
    lines = [_cells(row, plan) for row in plan.rows]
    for heading in lines[0]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", min_width=len("recommended"))
    for row, cells in zip(plan.rows, lines, strict=True):
        table.add_row(*cells.values(), ", ".join(plan.marks(row)))
    return table


def _cells(row: Row, plan: Plan) -> dict[str, str]:
    """The cells of a line by their headings, which are the same for all rows."""
    cells = {"batch size": str(row.batch_size)}
    if any(other.effective_batch_size != other.batch_size for other in plan.rows):
        cells["effective"] = str(row.effective_batch_size)
    cells["samples/s"] = f"{row.samples_per_s:.4g}"
    cells["epoch"] = show_duration(row.epoch_s)
    cells["run"] = show_duration(row.run_s)
    if row.in_time is not None:
        cells["in time"] = "yes" if row.in_time else "no"
    if row.relative_steps is not None:
        cells["steps"] = f"{row.relative_steps:.3g} x"
        cells["to loss"] = f"{plan.relative_time(row):.2f} x"
    cells["rate"] = "none" if row.learning_rate is None else f"{row.learning_rate:.3g}"
    return cells


def notes(plan: Plan) -> list[str]:
    """Notes below the table: sizes left out, its columns, warnings, the time budget, the recommended size."""
    found = [f"batch size {size} is left out: {reason}" for size, reason in plan.left_out.items()]
    if not plan.rows:
        return found
    noise_scale = plan.goal.noise_scale
    if noise_scale is not None:
        found.append(
            f"steps and time to the same loss: predicted for a noise scale of {noise_scale:g} samples; "
            "steps as a multiple of the fewest possible, time as a multiple of the recommended size's"
        )
    found += _warnings(plan)
    found += _time_notes(plan)
    why = (
        "the smallest within 5 % of the best samples per second"
        if noise_scale is None
        else "the least predicted time to the same loss"
    )
    return [*found, f"recommended: DATA.BATCH_SIZE={plan.recommended.batch_size}, {why}"]


def _time_notes(plan: Plan) -> list[str]:
    """That no size meets the time budget, or not the recommended one."""
    budget_s, recommended = plan.goal.time_budget_s, plan.recommended
    if budget_s is None or recommended.in_time:
        return []
    in_time = [str(row.batch_size) for row in plan.rows if row.in_time]
    if in_time:
        return [
            f"the run takes {show_duration(recommended.run_s)} with the recommended size, more than "
            f"{show_duration(budget_s)}; it ends in time with {', '.join(in_time)}"
        ]
    return [
        f"no size ends the run within {show_duration(budget_s)}: the fastest, batch size "
        f"{plan.fastest.batch_size}, takes {show_duration(plan.fastest.run_s)}; fewer TRAIN.EPOCHS or more "
        "processes take less time"
    ]


def _warnings(plan: Plan) -> list[str]:
    """Each warning once, with the sizes that it concerns. Where only the numbers differ, they are spans."""
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row in plan.rows:
        for warning in row.warnings:
            finding, _, remedy = warning.partition(";")
            key = (_NUMBER.sub("#", finding), remedy)  # numbers in a remedy are sizes to choose
            groups.setdefault(key, []).append((row.batch_size, warning))
    return [
        f"batch size {', '.join(str(size) for size, _ in group)}: {spanned([text for _, text in group])}"
        for group in groups.values()
    ]


def spanned(texts: Sequence[str]) -> str:
    """One text for several that differ in numbers alone: each number becomes a span.

    >>> spanned(["12 of 96 samples", "48 of 96 samples", "24 of 96 samples"])
    '12 to 48 of 96 samples'
    """
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    spans = iter([_span(numbers) for numbers in columns])
    return _NUMBER.sub(lambda _: next(spans), texts[0])


def _span(numbers: Sequence[str]) -> str:
    low, high = (choose(numbers, key=lambda number: float(number.rstrip("%"))) for choose in (min, max))
    return low if low == high else f"{low} to {high}"
