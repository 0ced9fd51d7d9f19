"""Runs side by side for people: a table."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Table

from linnaeus.commands.compare.differences import short_names
from linnaeus.commands.compare.results import Comparison, Row
from linnaeus.commands.tables import cell
from linnaeus.launchers.outcome import OUTPUT, last_line

MOST_KEYS = 8
"""Differing keys that have a column; a preset may change dozens."""

_NODES = re.compile(r"(?:\w+\.)+(?=\w+=)")
"""The nodes before the last part of each key in the name of a sweep's run."""
Column = tuple[str, Callable[[Row], str]]


def print_runs(runs: Comparison, console: Console) -> None:
    """Show the table, what limits the comparison, who runs what, and why runs have not ended well."""
    console.print(results_table(runs))
    sentences = [f"note: {note}" for note in runs.notes]
    sentences += [f"{row.status}: {row.title}: {text}" for row in runs.rows if (text := _said_of(row))]
    for sentence in sentences:
        console.print(sentence, markup=False, soft_wrap=True)


def _said_of(row: Row) -> str:
    """Who runs a run and its last line of output, or why it has not ended well; empty for the others."""
    if row.job is not None:
        return ": ".join(filter(None, (row.job.name, row.job.reason, last_line(row.folder))))
    if row.reason is None or row.status == "pruned":
        return ""
    output = row.folder / OUTPUT
    return f"{row.reason} ({output})" if output.exists() else row.reason


def results_table(runs: Comparison) -> Table:
    """One line per run: what differs, the batch plan, the metric at the end and at its best."""
    table = Table(title="Runs", title_justify="left")
    keys = runs.keys[:MOST_KEYS]
    names = short_names(runs.keys)
    texts: list[Column] = [(names[key], partial(_value_of, key)) for key in keys]
    if not _values_are_names(runs):
        texts.insert(0, ("run", lambda row: _NODES.sub("", row.name)))
    figures = _figures(runs)
    for heading, _ in texts:
        table.add_column(heading, overflow="fold")
    for heading, _ in figures:
        table.add_column(heading, justify="right")
    table.add_column("status")
    for row in runs.rows:
        table.add_row(*[text(row) for _, text in (*texts, *figures)], _status(row))
    if len(runs.keys) > MOST_KEYS:
        table.caption = f"{len(runs.keys) - MOST_KEYS} more keys differ: {', '.join(runs.keys[MOST_KEYS:])}"
    return table


def _status(row: Row) -> str:
    return f"{row.status} ({row.job.reason})" if row.job is not None and row.job.reason else row.status


def _value_of(key: str, row: Row) -> str:
    return row.values[key]


def _values_are_names(runs: Comparison) -> bool:
    """Whether the values tell the runs apart, and the names say no more, as in a sweep."""
    tell_apart = len({tuple(row.values.values()) for row in runs.rows}) == len(runs.rows)
    return (
        tell_apart
        and len(runs.keys) <= MOST_KEYS
        and all(not row.name or "=" in row.name for row in runs.rows)
    )


def _figures(runs: Comparison) -> list[Column]:
    """The columns of numbers. The size of a micro-batch has one where it is not the whole batch."""
    metric = runs.metric
    size: list[Column] = [("size", lambda row: cell(row.planned("batch_size"), "d"))]
    is_split = any(row.planned("batch_size") != row.planned("effective_batch") for row in runs.rows)
    return [
        *(size if is_split else []),
        ("batch", lambda row: cell(row.planned("effective_batch"), "d")),
        ("rate", lambda row: cell(row.planned("learning_rate"), ".3g")),
        ("warm-up", lambda row: cell(row.planned("warmup_steps"), "d")),
        (metric, lambda row: cell(row.value(metric), ".4f")),
        ("best", lambda row: _best(row, metric)),
        ("training s", lambda row: cell(row.result.get("training_s"), ".1f")),
        ("images/s", lambda row: cell(row.result.get("images_per_s"), ".0f")),
    ]


def _best(row: Row, metric: str) -> str:
    found = row.best(metric)
    return "" if found is None else f"{found.value:.4f} @{found.epoch}"
