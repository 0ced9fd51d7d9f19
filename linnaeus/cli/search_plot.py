"""The picture of a search: the metric against each key that was searched, and in the order of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.cli.compare.runs import Comparison, Row
from linnaeus.cli.plots import BLUE, VERMILION, decorate, drawing
from linnaeus.sweep.space import Axis
from linnaeus.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_search_plot(sweep: Comparison, axes: Sequence[Axis], path: Path, *, smaller_is_better: bool) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names.

    Args:
        sweep: the runs, of which those with a value are points; hollow ones have not finished.
        axes: the keys searched.
        path: ends in `.png`, `.svg` or `.html`.
        smaller_is_better: whether the best value is the smallest.
    """
    columns = [name for name in sweep.columns if name not in ("folder", "reason")]
    finished, pruned = len(sweep.with_status("finished")), len(sweep.with_status("pruned"))
    title = f"{counted(len(sweep.rows), 'run')} of a search, {finished} finished, {pruned} pruned"
    points = [
        (n, row, value)
        for n, row in enumerate(sweep.rows, start=1)
        if (value := row.value(sweep.metric)) is not None
    ]
    with drawing(path, title, sweep, columns, num_columns=len(axes) + 1) as [panels]:
        decorate(panels[0], f"validation {sweep.metric}", "run", sweep.metric)
        ended = [(n, value) for n, row, value in points if row.status == "finished"]
        best = accumulate((value for _, value in ended), min if smaller_is_better else max)
        panels[0].plot(
            [n for n, _ in ended], list(best), color=VERMILION, drawstyle="steps-post", label="best so far"
        )
        if points:
            panels[0].legend(frameon=False, fontsize=9)
        for panel, axis in zip(panels[1:], axes, strict=True):
            decorate(panel, axis.key, "", sweep.metric)
            _scale(panel, axis)
        for n, row, value in points:
            face = BLUE if row.status == "finished" else "none"
            for panel, x in zip(panels, [n, *(_x(row, axis) for axis in axes)], strict=True):
                panel.plot([x], [value], "o", color=BLUE, markerfacecolor=face)


def _scale(panel: Axes, axis: Axis) -> None:
    if axis.choices:
        panel.set_xticks(range(len(axis.choices)), axis.choices)
    elif axis.is_log:
        panel.set_xscale("log")


def _x(row: Row, axis: Axis) -> float:
    """Where a run is on the axis of a key."""
    text = row.values[axis.key]
    return axis.choices.index(text) if axis.choices else float(text)
