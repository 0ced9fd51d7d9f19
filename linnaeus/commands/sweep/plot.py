"""The picture of a sweep: validation metric and training time against effective batch size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.commands.picture import SERIES, Picture, decorate, drawing, size_axis
from linnaeus.commands.sweep.results import Series, Sweep, series_of
from linnaeus.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP"


def save_plot(sweep: Sweep, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    columns = [name for name in sweep.columns if name not in ("folder", "reason")]
    series = series_of(sweep.rows)
    with drawing(path, _headline(sweep), sweep, columns) as picture:
        [[left, right]] = picture.panels
        decorate(left, f"validation {sweep.metric}", "effective batch size", sweep.metric)
        decorate(right, "training time", "effective batch size", "seconds")
        _lines(picture, left, series, sweep.metric)
        _lines(picture, right, series, "training_s")
        if series:
            right.set_ylim(bottom=0)
        if len(series) > 1:
            left.legend(frameon=False, fontsize=9)


def _headline(sweep: Sweep) -> str:
    finished, total = len(sweep.with_status("finished")), len(sweep.rows)
    keys = ", ".join(sweep.rows[0].values)
    return f"{finished} of {counted(total, 'run')} over {keys}"


def _lines(picture: Picture, axes: Axes, series: list[Series], name: str) -> None:
    """A point for each run, and a line through the means of each size."""
    sizes = sorted({row.result["effective_batch"] for one in series for row in one.rows})
    if sizes:
        size_axis(axes, sizes)
    for number, one in enumerate(series):
        colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
        # Without data: the legend's entry, with line and marker.
        axes.plot([], [], "-", color=colour, marker=marker, label=one.label)
        means = one.means(name)
        axes.plot(
            [size for size, _ in means], [mean for _, mean in means], "-", color=colour, alpha=0.7, zorder=3,
            linewidth=1.6,
        )  # fmt: skip
        for row in one.rows:
            value = row.value(name)
            if value is not None:
                text = f"{row.title}: {name} {value:.4g}"
                picture.point(axes, row.result["effective_batch"], value, marker, text, color=colour)
