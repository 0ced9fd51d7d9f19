"""A plan for people: a table, and notes about it."""

from __future__ import annotations

from rich.table import Table

from linnaeus.commands.duration import show_duration
from linnaeus.commands.plan.results import Plan, Row


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
    """Notes below the table: sizes left out, what its columns mean, warnings, and the recommended size."""
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
    why = (
        "the smallest within 5 % of the best samples per second"
        if noise_scale is None
        else "the least predicted time to the same loss"
    )
    return [*found, f"recommended: DATA.BATCH_SIZE={plan.recommended.batch_size}, {why}"]


def _warnings(plan: Plan) -> list[str]:
    """Each warning once, with the sizes that it concerns."""
    sizes: dict[str, list[int]] = {}
    for row in plan.rows:
        for warning in row.warnings:
            sizes.setdefault(warning, []).append(row.batch_size)
    return [f"batch size {', '.join(map(str, found))}: {warning}" for warning, found in sizes.items()]
