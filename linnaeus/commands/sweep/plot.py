"""The picture of a sweep: validation metric and training time against effective batch size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.commands.picture import SERIES, Tips, decorate, save_picture, size_axis, style
from linnaeus.commands.sweep.folder import effective_batch_size
from linnaeus.commands.sweep.results import Series, Sweep, series_of, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP"


def save_plot(sweep: Sweep, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    figure, tips = draw(sweep)
    columns = [name for name in sweep.columns if name not in ("folder", "reason")]
    save_picture(path, figure, tips, title=_headline(sweep), columns=columns, rows=sweep.scalars())


def draw(sweep: Sweep) -> tuple[Figure, Tips]:
    """The figure, and what its points say on hover."""
    from matplotlib.figure import Figure

    tips = Tips()
    series = series_of(sweep.rows)
    with style():
        figure = Figure(figsize=(12.8, 4.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        decorate(left, f"validation {sweep.metric}", "effective batch size", sweep.metric)
        decorate(right, "training time", "effective batch size", "seconds")
        _lines(left, series, sweep.metric, tips)
        _lines(right, series, "training_s", tips)
        if series:
            right.set_ylim(bottom=0)
        if len(series) > 1:
            _legend(left, series)
        figure.suptitle(_headline(sweep), fontsize=11)
    return figure, tips


def _headline(sweep: Sweep) -> str:
    finished, total = len(sweep.with_status("finished")), len(sweep.rows)
    keys = ", ".join(sweep.rows[0].values)
    return f"{finished} of {total} runs over {keys}"


def _lines(axes: Axes, series: list[Series], name: str, tips: Tips) -> None:
    """A point for each run, and a line through the means of each size."""
    sizes = sorted({effective_batch_size(row.result) for one in series for row in one.rows})
    if sizes:
        size_axis(axes, sizes)
    for number, one in enumerate(series):
        colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
        means = one.means(name)
        axes.plot(
            [size for size, _ in means], [mean for _, mean in means], "-", color=colour, alpha=0.7, zorder=3,
            linewidth=1.6,
        )  # fmt: skip
        for row in one.rows:
            value = value_of(row, name)
            if value is not None:
                tip = tips.add(f"{row.title}: {name} {value:.4g}")
                axes.plot(
                    [effective_batch_size(row.result)], [value], marker, color=colour, markersize=6, gid=tip,
                    zorder=4,
                )  # fmt: skip


def _legend(axes: Axes, series: list[Series]) -> None:
    from matplotlib.lines import Line2D

    looks = [(SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]) for number in range(len(series))]
    entries = [
        Line2D([], [], color=colour, marker=marker, label=one.label)
        for one, (colour, marker) in zip(series, looks, strict=True)
    ]
    axes.legend(handles=entries, frameon=False, fontsize=9)
