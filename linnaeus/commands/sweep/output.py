"""The figures of a sweep for programs (JSON, CSV) and for people (a table)."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from linnaeus.commands.sweep.results import Row, Sweep
from linnaeus.commands.tables import save_table


def save(sweep: Sweep, folder: Path) -> None:
    """Write `sweep.json` and `sweep.csv`, each atomically."""
    for name in ("sweep.json", "sweep.csv"):
        save_table(folder / name, sweep.as_dict(), sweep.scalars(), sweep.columns)


def results_table(sweep: Sweep) -> Table:
    """One line per run."""
    table = Table(title="Runs", title_justify="left")
    keys = list(sweep.rows[0].values)
    for key in keys:
        table.add_column(key.rpartition(".")[2] if _is_clear(key, keys) else key, overflow="fold")
    for heading in ("batch", "rate", "warm-up", sweep.metric, "training s", "images/s"):
        table.add_column(heading, justify="right")
    table.add_column("status")
    for row in sweep.rows:
        table.add_row(*row.values.values(), *_figures(row, sweep.metric), row.status)
    return table


def _figures(row: Row, metric: str) -> list[str]:
    planned = [row.result.get(name) for name in ("learning_rate", "warmup_steps")]
    figures = [_shown(row.effective_batch_size, "d"), _shown(planned[0], ".3g"), _shown(planned[1], "d")]
    return [
        *figures,
        _shown(row.metric(metric), ".4f"),
        _shown(row.result.get("training_s"), ".1f"),
        _shown(row.result.get("images_per_s"), ".0f"),
    ]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _is_clear(key: str, keys: list[str]) -> bool:
    """Whether the last component of a key tells it from the others."""
    last = key.rpartition(".")[2]
    return sum(other.rpartition(".")[2] == last for other in keys) == 1
