"""Runs side by side for people: a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from linnaeus.cli.compare.differences import short_names
from linnaeus.cli.compare.results import Comparison, Row
from linnaeus.cli.tables import cell
from linnaeus.launchers.outcome import OUTPUT, last_line

MOST_KEYS = 8
"""Differing keys that have a column; a preset may change dozens."""

_NODES = re.compile(r"(?:\w+\.)+(?=\w+=)")
"""The nodes before the last part of each key in the name of a sweep's run."""
EXPENDABLE = ("warm-up", "images/s", "training s", "rate", "size", "batch")
"""Columns that a narrow terminal does without, in this order; the metric and the status are never cut."""
NAME_LETTERS = 24
"""Of a run's name, before it is folded to keep a column."""
Column = tuple[str, Callable[[Row], str]]


def print_runs(runs: Comparison, console: Console) -> None:
    """Show the table, what limits the comparison, who runs what, and why runs have not ended well."""
    console.print(_fitting_table(runs, console))
    sentences = [f"note: {note}" for note in runs.notes]
    sentences += [f"{row.status}: {row.title}: {text}" for row in runs.rows if (text := _said_of(row))]
    for sentence in sentences:
        console.print(sentence, markup=False, soft_wrap=True)


def _said_of(row: Row) -> str:
    """Who runs a run and its last line of output, or why it has not ended well; empty for the others."""
    if row.job is not None:
        last = last_line(row.folder) if row.status == "running" else ""
        return ": ".join(filter(None, (row.job.name, " ".join(row.job.reason.split()), last)))
    if row.reason is None or row.status == "pruned":
        return ""
    output = row.folder / OUTPUT
    return f"{row.reason} ({output})" if output.exists() else row.reason


def _fitting_table(runs: Comparison, console: Console) -> Table:
    """The table with as many columns as there is room for."""
    unlimited = console.options.update(max_width=10**6)
    layouts = [(count, MOST_KEYS) for count in range(len(EXPENDABLE))]
    layouts += [(len(EXPENDABLE), count) for count in range(min(len(runs.keys), MOST_KEYS), -1, -1)]
    for num_left_out, most_keys in layouts:
        table = results_table(runs, EXPENDABLE[:num_left_out], most_keys)
        folded = 0
        if table.columns[0].header == "run":
            folded = max(max(len(_short_name(row)) for row in runs.rows) - NAME_LETTERS, 0)
        if Measurement.get(console, unlimited, table).maximum - folded <= console.width:
            return table
    return results_table(runs, EXPENDABLE)


def results_table(runs: Comparison, left_out: Sequence[str] = (), most_keys: int = MOST_KEYS) -> Table:
    """One line per run: what differs, the batch plan, the metric at the end and at its best.

    Args:
        runs: of the rows.
        left_out: columns of figures that are not shown; nor are those that are empty.
        most_keys: of the differing keys, those with the most values are shown, and at most so many.
    """
    table = Table(title="Runs", title_justify="left")
    most = sorted(runs.keys, key=lambda key: -len({row.values[key] for row in runs.rows}))[:most_keys]
    keys = [key for key in runs.keys if key in most]
    names = short_names(runs.keys)

    def values_of(key: str) -> Column:
        return names[key], lambda row: row.values[key]

    texts = [values_of(key) for key in keys]
    if len(keys) < len(runs.keys) or not _values_are_names(runs):
        texts.insert(0, ("run", _short_name))
    figures = [
        (heading, text)
        for heading, text in _figures(runs)
        if heading not in left_out and (heading not in EXPENDABLE or any(map(text, runs.rows)))
    ]
    for heading, _ in texts:
        table.add_column(heading, overflow="fold")
    for heading, _ in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for row in runs.rows:
        table.add_row(*[text(row) for _, text in (*texts, *figures)], _status(row))
    if others := [key for key in runs.keys if key not in keys]:
        table.caption = (
            f"{len(others)} more {'keys differ' if len(others) > 1 else 'key differs'}: {', '.join(others)}"
        )
    return table


def _short_name(row: Row) -> str:
    return _NODES.sub("", row.name or row.title)


def _status(row: Row) -> str:
    """The status, for a waiting job with SLURM's word for the reason."""
    is_waiting = row.job is not None and row.status == "pending" and row.reason
    return f"{row.status} ({row.reason})" if is_waiting else row.status


def _values_are_names(runs: Comparison) -> bool:
    """Whether the values tell the runs apart, and the names say no more, as in a sweep."""
    tell_apart = len({tuple(row.values.values()) for row in runs.rows}) == len(runs.rows)
    return tell_apart and all(not row.name or "=" in row.name for row in runs.rows)


def _figures(runs: Comparison) -> list[Column]:
    """The columns of numbers. The size of a micro-batch has one where it is not the whole batch."""
    metric = runs.metric
    size: list[Column] = [("size", lambda row: cell(row.planned("batch_size"), ".0f"))]
    is_split = any(row.planned("batch_size") != row.planned("effective_batch") for row in runs.rows)
    return [
        *(size if is_split else []),
        ("batch", lambda row: cell(row.planned("effective_batch"), ".0f")),
        ("rate", lambda row: cell(row.planned("learning_rate"), ".3g")),
        ("warm-up", lambda row: cell(row.planned("warmup_steps"), ".0f")),
        (metric, lambda row: cell(row.value(metric), ".4f")),
        ("best", lambda row: _best(row, metric)),
        ("training s", lambda row: cell(row.result.get("training_s"), ".1f")),
        ("images/s", lambda row: cell(row.result.get("images_per_s"), ".0f")),
    ]


def _best(row: Row, metric: str) -> str:
    found = row.history.best(metric)
    return "" if found is None else f"{found.value:.4f} @{found.epoch}"
