"""The figures of a sweep for people: a table."""

from __future__ import annotations

from rich.table import Table

from linnaeus.commands.sweep.results import Row, Sweep


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
        table.add_row(*row.values.values(), *_figures(row, sweep.metric), row.status)
    return table


def _figures(row: Row, metric: str) -> list[str]:
    return [
        _shown(row.result.get("effective_batch"), "d"),
        _shown(row.result.get("learning_rate"), ".3g"),
        _shown(row.result.get("warmup_steps"), "d"),
        _shown(row.value(metric), ".4f"),
        _shown(row.result.get("training_s"), ".1f"),
        _shown(row.result.get("images_per_s"), ".0f"),
    ]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
