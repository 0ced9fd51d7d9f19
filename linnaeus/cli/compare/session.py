"""One comparison: the table, the files and the picture of runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from linnaeus.cli.compare.options import Options, run_names
from linnaeus.cli.compare.runs import SEED, Comparison, Row, compared, read_runs, short_names
from linnaeus.cli.plots import (
    BLUE,
    INK,
    SERIES,
    VERMILION,
    decorate,
    drawing,
    log_axis,
    size_axis,
)
from linnaeus.cli.tables import cell
from linnaeus.metrics import larger_is_better
from linnaeus.runtime.console import make_console
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.run_folder import OUTPUT, last_line
from linnaeus.runtime.words import counted, several

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from linnaeus.sweep.space import Axis

EXPENDABLE = ("warm-up", "images/s", "training s", "rate", "size", "batch")
"""Columns that a narrow terminal does without, in this order, and then those of keys that differ least."""
_MOST_KEYS = 8
"""Differing keys that have a column; a preset may change dozens."""
_LETTERS = 24
"""Letters of a name or a value that are not folded to keep a column."""
_LABEL_LETTERS = 48
_LOG_FACTOR = 8
"""Numbers that spread over more than this factor have a logarithmic axis."""


def run(options: Options, folders: Sequence[Path]) -> int:
    """Read the runs, write the files and show the table; returns the exit code 0.

    Raises:
        ConfigError: no run has the metric, or there is nothing to sort by.
    """
    runs = compared(read_runs(folders), run_names(folders), options.metric)
    if runs.unknown_metric is not None:
        raise ConfigError(f"--metric: {runs.unknown_metric}")
    if options.sort is not None:
        sort_rows(runs, options.sort)
    if options.aside:
        names = several([str(folder) for folder in options.aside])
        runs.notes.append(
            f"left out, as later runs of the same name have moved them aside: {names}; "
            "name their folders to compare them"
        )
    console = make_console()
    print_runs(runs, console)
    if options.output is not None:
        runs.save(options.output)
        console.print(f"figures: {options.output.resolve()}", soft_wrap=True)
    if options.plot is not None:
        save_plot(runs, options.plot)
        console.print(f"picture: {options.plot.resolve()}", soft_wrap=True)
    return 0


def sort_rows(runs: Comparison, key: str) -> None:
    """Sort the rows: by a metric from its best value to the worst, by anything else ascending.

    Rows without a value come last. A `-` before the key reverses the others.

    Raises:
        ConfigError: there is no such key; the message names the closest.
    """
    wanted = key.removeprefix("-")
    full = {short: full for full, short in short_names(runs.keys).items()}
    name = runs.metric if wanted == "metric" else full.get(wanted, wanted)
    is_metric = name in runs.metrics
    column = f"best {name}" if is_metric else name
    values = {row.folder: row.scalars(runs.metrics) for row in runs.rows}
    known = values[runs.rows[0].folder]
    if column not in known:
        close = get_close_matches(wanted, ["metric", *full, *known], 5, cutoff=0)
        raise ConfigError(
            f"--sort: {wanted!r} is no metric, column or key that differs; closest are {', '.join(close)}"
        )
    in_order = [row for row in runs.rows if values[row.folder][column] not in (None, "")]
    is_reversed = key.startswith("-") != (is_metric and larger_is_better(name))
    in_order.sort(key=lambda row: _order(values[row.folder][column]), reverse=is_reversed)
    runs.rows = in_order + [row for row in runs.rows if row not in in_order]


def _order(value: Any) -> tuple[float, str]:
    """Sorts numbers by their value, also those in texts, and other texts after them."""
    with suppress(ValueError):
        if math.isfinite(number := float(value)):
            return number, ""
    return math.inf, str(value)


# The table.


def print_runs(runs: Comparison, console: Console) -> None:
    """Show the table, what limits the comparison, who runs what, and why runs have not ended well."""
    console.print(runs_table(runs, console))
    sentences = [f"note: {note}" for note in runs.notes + runs.damage]
    sentences += [
        f"{row.state.status}: {row.title}: {text}" for row in runs.rows if (text := _said_of(row))
    ]
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def runs_table(runs: Comparison, console: Console) -> Table:
    """The table, without the columns for which the console is too narrow."""
    keys = sorted(runs.keys, key=lambda key: -len({row.values[key] for row in runs.rows}))
    expendable = [*EXPENDABLE, *reversed(keys[:_MOST_KEYS])]
    unlimited = console.options.update(max_width=10**6)
    for count in range(len(expendable) + 1):
        left_out = {*keys[_MOST_KEYS:], *expendable[:count]}
        table = _table(runs, left_out)
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
    for column in table.columns:
        column.max_width = None  # the width that is left is for names and values
    return table


def _said_of(row: Row) -> str:
    """Who runs a run, and its last line of output with its age, or why it has not ended well."""
    output = row.folder / OUTPUT
    if row.state.status == "running":
        age_s = None
        with suppress(OSError):
            age_s = time.time() - output.stat().st_mtime
        last = f"{last_line(row.folder)} ({age_s:.0f} s ago)" if age_s is not None else ""
        return ": ".join(filter(None, (str(row.state.holder), last)))
    reason = row.state.reason
    if reason is None or row.state.status == "pruned":
        return ""
    return f"{reason} ({output})" if output.is_file() else reason


def _table(runs: Comparison, left_out: Collection[str]) -> Table:
    """One line per run: what differs, the batch plan, the metric at the end and at its best.

    Names and values are folded, but no heading is.
    """
    names = short_names(runs.keys)
    keys = [key for key in runs.keys if key not in left_out]
    hidden = [key for key in runs.keys if key in left_out]
    # The names of a sweep's runs are their values.
    has_names = bool(hidden) or not keys or any("=" not in (row.name or "=") for row in runs.rows)
    table = Table(title="Runs", title_justify="left")
    for heading in (*(["run"] if has_names else []), *(names[key] for key in keys)):
        most = max(_LETTERS, len(heading))
        table.add_column(heading, overflow="fold", min_width=len(heading), max_width=most)
    figures = {
        heading: text
        for heading, text in _figures(runs).items()
        if heading not in left_out and (heading not in EXPENDABLE or any(map(text, runs.rows)))
    }
    for heading in (*figures, "status"):
        table.add_column(heading, justify="left" if heading == "status" else "right", no_wrap=True)
    for row in runs.rows:
        values = (
            *(row.values[key] for key in keys),
            *(text(row) for text in figures.values()),
            row.state.status,
        )
        table.add_row(*([row.title] if has_names else []), *values)
    if hidden:
        table.caption = f"more keys that differ: {', '.join(hidden)}"
    return table


def _figures(runs: Comparison) -> dict[str, Callable[[Row], str]]:
    """The columns of numbers. The size of a micro-batch has one where it is not the whole batch."""
    metric = runs.metric
    is_split = any(row.planned("batch_size") != row.planned("effective_batch") for row in runs.rows)

    def best_of(row: Row) -> str:
        best = row.history.best(metric)
        return "" if best is None else f"{best.value:.4f} @{best.epoch}"

    return {
        "size": lambda row: cell(row.planned("batch_size"), ".0f") if is_split else "",
        "batch": lambda row: cell(row.planned("effective_batch"), ".0f"),
        "rate": lambda row: cell(row.planned("learning_rate"), ".3g"),
        "warm-up": lambda row: cell(row.planned("warmup_steps"), ".0f"),
        metric: lambda row: cell(row.value(metric), ".4f"),
        "best": best_of,
        "training s": lambda row: cell(row.result.get("training_s"), ".1f"),
        "images/s": lambda row: cell(row.result.get("images_per_s"), ".0f"),
    }


# The picture.


def save_plot(runs: Comparison, path: Path) -> None:
    """Draw learning curves, and metric and training time against what differs, and write the picture.

    Runs without the metric are left out. Those that differ in the seed alone are one line, their mean.
    """
    metric = runs.metric
    measured = [metric, f"best {metric}"] if metric in runs.metrics else []
    columns = [
        *(["run"] if runs.rows[0].name else []),
        *runs.keys,
        *measured,
        "training_s",
        "status",
    ]
    title = f"{len(runs.with_status('finished'))} of {counted(len(runs.rows), 'run')} finished"
    with drawing(path, title, runs, columns, num_columns=3, panel_height=5.6) as [
        [left, middle, right]
    ]:
        _curves(left, [row for row in runs.rows if row.history.finite(metric)], metric)
        rows = [row for row in runs.rows if row.value(metric) is not None]
        for panel, name, panel_title, unit in (
            (middle, metric, f"validation {metric}", metric),
            (right, "training_s", "training time", "seconds"),
        ):
            label = _against_what_differs(panel, rows, name) if rows else ""
            decorate(panel, panel_title, label, unit)
        _legend(middle)
        if any(row.value("training_s") is not None for row in rows):
            right.set_ylim(bottom=0)


def save_search_plot(runs: Comparison, axes: Sequence[Axis], path: Path) -> None:
    """Draw each run's best value in the order of the runs, and against each key that was searched.

    Hollow points have not finished.
    """
    metric, num_runs = runs.metric, counted(len(runs.rows), "run")
    columns = [name for name in runs.columns if name not in ("folder", "reason")]
    finished, pruned = (len(runs.with_status(status)) for status in ("finished", "pruned"))
    title = f"{num_runs} of a search, {finished} finished, {pruned} pruned"
    found = [row.history.best(metric) for row in runs.rows]
    points = [
        (n, row, best and best.value)
        for n, (row, best) in enumerate(zip(runs.rows, found, strict=True), start=1)
    ]
    with drawing(path, title, runs, columns, num_columns=len(axes) + 1) as [panels]:
        decorate(panels[0], f"best validation {metric}", "run", metric)
        ended = {
            n: value
            for n, row, value in points
            if row.state.status == "finished" and value is not None
        }
        best = accumulate(ended.values(), max if larger_is_better(metric) else min)
        panels[0].plot(
            [*ended], [*best], color=VERMILION, drawstyle="steps-post", label="best so far"
        )
        panels[0].legend(frameon=False, fontsize=9)
        for panel, axis in zip(panels[1:], axes, strict=True):
            decorate(panel, axis.key, "", metric)
            if axis.choices:
                panel.set_xticks(range(len(axis.choices)), axis.choices)
            elif axis.is_log:
                log_axis(panel)
        for n, row, value in points:
            texts = [(axis, row.values[axis.key]) for axis in axes]
            xs = (axis.choices.index(text) if axis.choices else float(text) for axis, text in texts)
            if value is not None:
                face = BLUE if row.state.status == "finished" else "none"
                for panel, x in zip(panels, [n, *xs], strict=True):
                    panel.plot([x], [value], "o", color=BLUE, markerfacecolor=face)


def _curves(axes: Axes, rows: Sequence[Row], metric: str) -> None:
    """The lines, the best first; the range of each over its seeds is a band."""
    from matplotlib.ticker import MaxNLocator

    decorate(axes, "learning curves", "epoch", metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    choose = max if larger_is_better(metric) else min
    curves = [
        (
            label if len(group) == 1 else f"{label} ({counted(len(group), 'seed')})",
            _at_places(point for row in group for point in row.history.finite(metric)),
        )
        for label, group in _lines(rows, {SEED})
    ]
    curves.sort(key=lambda curve: choose(map(fmean, curve[1].values())), reverse=choose is max)
    for number, (label, values) in enumerate(curves):
        means = [*map(fmean, values.values())]
        if number >= len(SERIES):
            axes.plot([*values], means, color=INK, alpha=0.3, linewidth=0.8, zorder=1)
            continue
        colour = SERIES[number]
        axes.plot(
            [*values], means, "o-", color=colour, label=label, markersize=3, linewidth=1.6, zorder=3
        )
        ends = [*map(min, values.values())], [*map(max, values.values())]
        axes.fill_between([*values], *ends, color=colour, alpha=0.18, linewidth=0)
    if not curves:
        axes.text(0.5, 0.5, "no validation yet", ha="center", transform=axes.transAxes)
    _legend(axes, f"the best {len(SERIES)}; others are grey" if len(curves) > len(SERIES) else None)


def _against_what_differs(axes: Axes, rows: Sequence[Row], name: str) -> str:
    """A point for each run, hollow if it has not finished, and a line through the means at each place.

    Places are the values of the key that has the most, in order: numbers on an axis, texts side by side.
    Where the runs do not differ, each has a place.

    Returns:
        The label of the axis of places.
    """
    counts = {key: len({row.values[key] for row in rows} - {""}) for key in rows[0].values}
    differing = [key for key, count in counts.items() if count > 1]
    # The seed only where nothing else differs.
    key = max(differing, key=lambda key: (key != SEED, counts[key]), default="")
    texts = {row.folder: row.values[key] if key else row.title for row in rows}
    rows = [row for row in rows if texts[row.folder]]
    order = sorted({texts[row.folder] for row in rows}, key=_order)
    numbers = [_order(text)[0] for text in order]
    is_numeric = all(map(math.isfinite, numbers))
    places = dict(zip(order, numbers if is_numeric else range(len(order)), strict=True))

    hidden = {key, SEED}
    if key == "DATA.BATCH_SIZE":  # a size that AutoBatch has found trains as one that was set
        hidden |= {each for each in counts if each.startswith("DATA.AUTOBATCH.")}
    for number, (label, group) in enumerate(_lines(rows, hidden)):
        colour = SERIES[number] if number < len(SERIES) else INK
        points = [(row, value) for row in group if (value := row.value(name)) is not None]
        xs, ys = [places[texts[row.folder]] for row, _ in points], [value for _, value in points]
        if is_numeric:
            at_places = _at_places(zip(xs, ys, strict=True))
            axes.plot(
                [*at_places],
                [*map(fmean, at_places.values())],
                color=colour,
                alpha=0.7,
                linewidth=1.6,
            )
        faces = [colour if row.state.status == "finished" else "none" for row, _ in points]
        axes.scatter(
            xs,
            ys,
            facecolors=faces,
            edgecolors=colour,
            label=label if number < len(SERIES) else None,
        )
    if not is_numeric:
        axes.set_xticks(range(len(order)), [text[:24] for text in order], rotation=30, ha="right")
        axes.set_xlim(-0.5, len(order) - 0.5)
    elif key.endswith("BATCH_SIZE"):
        size_axis(axes, [int(place) for place in numbers])
    elif 0 < _LOG_FACTOR * numbers[0] < numbers[-1]:
        log_axis(axes)
    return key.rpartition(".")[2] if key else "run"


def _lines(rows: Sequence[Row], hidden: set[str]) -> list[tuple[str, list[Row]]]:
    """Runs that differ in hidden keys alone form a line, which the other keys name, or its first run."""
    keys = [
        key
        for key in (rows[0].values if rows else ())
        if len({row.values[key] for row in rows}) > 1
    ]
    names = {key: name for key, name in short_names(keys).items() if key not in hidden}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        label = ", ".join(
            f"{name}={row.values[key]}" for key, name in names.items() if row.values[key]
        )
        groups.setdefault(label or (row.title if names else ""), []).append(row)
    return [
        (
            # matplotlib leaves a label that begins with `_` out of the legend
            " " * label.startswith("_") + label
            if len(label) <= _LABEL_LETTERS
            else f"…{group[0].title[-_LABEL_LETTERS:]}",
            group,
        )
        for label, group in groups.items()
    ]


def _at_places(points: Iterable[tuple[float, float]]) -> dict[float, list[float]]:
    """The values at each place, by ascending place."""
    found: dict[float, list[float]] = {}
    for place, value in points:
        found.setdefault(place, []).append(value)
    return dict(sorted(found.items()))


def _legend(axes: Axes, title: str | None = None) -> None:
    """A legend where there are lines to tell apart, below the panel, where it covers no curve."""
    if len(axes.get_legend_handles_labels()[0]) > 1:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}
        axes.legend(**place, frameon=False, fontsize=8, title=title, title_fontsize=8)
