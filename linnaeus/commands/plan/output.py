"""A plan for people: a table, and notes about it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from linnaeus.commands.duration import show_duration
from linnaeus.commands.plan.results import Choice, Plan, Row


def results_table(plan: Plan) -> Table:
    """One line per size."""
    goal, choice = plan.goal, plan.choice()
    table = Table(title="Batch sizes by time", title_justify="left")
    differs = any(row.effective_batch_size != row.batch_size for row in plan.rows)
    headings = ["batch size", *(["effective"] if differs else []), "samples/s", "epoch", "run"]
    headings += ["in time"] if goal.time_budget_s is not None else []
    headings += ["steps", "to loss"] if goal.noise_scale is not None else []
    for heading in [*headings, "rate"]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", min_width=len("recommended"))
    for row in plan.rows:
        table.add_row(*_cells(row, choice, differs))
    return table


def _cells(row: Row, choice: Choice, with_effective: bool) -> Iterator[str]:
    yield str(row.batch_size)
    if with_effective:
        yield str(row.effective_batch_size)
    yield f"{row.samples_per_s:.4g}"
    yield show_duration(row.epoch_s)
    yield show_duration(row.run_s)
    if row.in_time is not None:
        yield "yes" if row.in_time else "no"
    relative_time = choice.relative_time(row)
    if row.relative_steps is not None and relative_time is not None:
        yield f"{row.relative_steps:.3g} x"
        yield f"{relative_time:.2f} x"
    yield "none" if row.learning_rate is None else f"{row.learning_rate:.3g}"
    yield ", ".join(choice.marks(row))


def notes(plan: Plan) -> list[str]:
    """Notes below the table: sizes left out, what its columns mean, warnings, and the recommended size."""
    found = [f"batch size {size} is left out: {reason}" for size, reason in plan.left_out.items()]
    if not plan.rows:
        return found
    goal, choice = plan.goal, plan.choice()
    if goal.noise_scale is not None:
        found.append(
            f"steps and time to the same loss: predicted for a noise scale of {goal.noise_scale:g} samples; "
            "steps as a multiple of the fewest possible, time as a multiple of the recommended size's"
        )
    found += _warnings(plan)
    why = (
        "the smallest within 5 % of the best samples per second"
        if goal.noise_scale is None
        else "the least predicted time to the same loss"
    )
    return [*found, f"recommended: DATA.BATCH_SIZE={choice.recommended}, {why}"]


def _warnings(plan: Plan) -> list[str]:
    """Each warning once, with the sizes that it concerns."""
    sizes: dict[str, list[int]] = {}
    for row in plan.rows:
        for warning in row.warnings:
            sizes.setdefault(warning, []).append(row.batch_size)
    return [f"batch size {', '.join(map(str, found))}: {warning}" for warning, found in sizes.items()]
