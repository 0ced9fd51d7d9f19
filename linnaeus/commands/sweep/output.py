"""The figures of a sweep for people: a table."""

from __future__ import annotations

from rich.table import Table

from linnaeus.commands.sweep.results import Sweep
from linnaeus.commands.tables import cell


def results_table(sweep: Sweep) -> Table:
    """One line per run."""
    table = Table(title="Runs", title_justify="left")
    keys = list(sweep.rows[0].values)
    for key in keys:
        last = key.rpartition(".")[2]
        is_unique = sum(other.rpartition(".")[2] == last for other in keys) == 1
        table.add_column(last if is_unique else key, overflow="fold")
    for heading in ("batch", "rate", "warm-up", sweep.metric, "training s", "images/s"):
        table.add_column(heading, justify="right")
    table.add_column("status")
    for row in sweep.rows:
        result = row.result
        table.add_row(
            *row.values.values(),
            cell(result.get("effective_batch"), "d"),
            cell(result.get("learning_rate"), ".3g"),
            cell(result.get("warmup_steps"), "d"),
            cell(row.value(sweep.metric), ".4f"),
            cell(result.get("training_s"), ".1f"),
            cell(result.get("images_per_s"), ".0f"),
            f"{row.status} ({row.job.reason})" if row.job is not None and row.job.reason else row.status,
        )
    return table
