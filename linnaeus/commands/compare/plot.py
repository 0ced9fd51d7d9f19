"""The picture of runs: learning curves, and metric and training time against what differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.commands.compare.history import is_smaller_better
from linnaeus.commands.compare.results import Comparison
from linnaeus.commands.compare.series import Axis, Curve, Series, axis_of, curves_of, series_of
from linnaeus.commands.picture import INK, SERIES, Picture, decorate, drawing, size_axis
from linnaeus.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP"
MOST_LABELS = 10
"""Lines of a panel that have a colour and an entry of the legend."""
LABELS_INSIDE = 4
"""A longer legend is below its panel, where it covers no curve."""
MOST_POINTS = 1500
"""Points of a panel that say something on hover; of longer curves only the best and the last one do."""
MOST_CATEGORIES = 16
"""Texts below an axis; with more, they would cover each other."""


def save_plot(runs: Comparison, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    columns = [name for name in runs.columns if name not in ("folder", "reason")]
    axis = axis_of(runs.rows)
    series = series_of(runs.rows, axis)
    with drawing(path, _headline(runs), runs, columns, num_columns=3, panel_height=5.6) as picture:
        [[left, middle, right]] = picture.panels
        _curves_panel(picture, left, runs)
        decorate(middle, f"validation {runs.metric}", axis.label, runs.metric)
        decorate(right, "training time", axis.label, "seconds")
        _lines(picture, middle, series, axis, runs.metric)
        _lines(picture, right, series, axis, "training_s")
        if any(row.value("training_s") is not None for row in runs.rows):
            right.set_ylim(bottom=0)
        if len(series) > 1:
            middle.legend(frameon=False, fontsize=9)


def _headline(runs: Comparison) -> str:
    finished, total = sum(row.status == "finished" for row in runs.rows), len(runs.rows)
    keys = f" over {', '.join(runs.keys)}" if runs.keys else ""
    return f"{finished} of {counted(total, 'run')} finished{keys}"


def _curves_panel(picture: Picture, axes: Axes, runs: Comparison) -> None:
    """A line for each run, or for the mean of those that differ in the seed alone with their range."""
    from matplotlib.ticker import MaxNLocator

    metric = runs.metric
    decorate(axes, "learning curves", "epoch", metric)
    curves = curves_of(runs.rows, metric)
    sign = -1 if is_smaller_better(metric) else 1
    best = sorted(curves, key=lambda curve: -max(sign * value for _, value in curve.means))[:MOST_LABELS]
    coloured = [curve for curve in curves if curve in best]
    is_short = sum(len(curve.means) for curve in curves) <= MOST_POINTS
    for curve in curves:
        if curve not in best:
            axes.plot(*zip(*curve.means, strict=True), "-", color=INK, alpha=0.3, linewidth=0.8, zorder=2)
    for number, curve in enumerate(coloured):
        colour, style = SERIES[number % len(SERIES)], "-" if number < len(SERIES) else "--"
        axes.plot(
            *zip(*curve.means, strict=True), style, color=colour, linewidth=1.6, label=curve.label, zorder=3
        )
        if curve.band:
            epochs, lowest, highest = zip(*curve.band, strict=True)
            axes.fill_between(epochs, lowest, highest, color=colour, alpha=0.18, linewidth=0)
        _hover(picture, axes, curve, metric, colour, sign, is_short=is_short)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not curves:
        axes.text(0.5, 0.5, "no validation yet", ha="center", transform=axes.transAxes)
    if len(curves) > 1:
        rest = len(curves) - len(coloured)
        title = f"the best {len(coloured)}; {rest} more in grey" if rest else None
        is_long = len(coloured) > LABELS_INSIDE
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 2} if is_long else {}
        axes.legend(frameon=False, fontsize=8, title=title, title_fontsize=8, **place)


def _hover(
    picture: Picture, axes: Axes, curve: Curve, metric: str, colour: str, sign: int, *, is_short: bool
) -> None:
    """Points with texts: all of them, or the best and the last."""
    best = max(range(len(curve.means)), key=lambda index: sign * curve.means[index][1])
    shown = range(len(curve.means)) if is_short else sorted({best, len(curve.means) - 1})
    for index in shown:
        (epoch, value), count = curve.means[index], curve.counts[index]
        mean = f", mean of {count}" if count > 1 else ""
        text = f"{curve.label}: epoch {epoch}, {metric} {value:.4g}{mean}"
        picture.point(axes, epoch, value, "o", text, color=colour, markersize=3 if is_short else 5)


def _lines(picture: Picture, axes: Axes, series: list[Series], axis: Axis, name: str) -> None:
    """A point for each run, and a line through the means at each place."""
    places = sorted({place for one in series for row in one.rows if (place := axis.place(row)) is not None})
    _scale(axes, axis, places)
    for number, one in enumerate(series):
        is_coloured = number < MOST_LABELS
        colour = SERIES[number % len(SERIES)] if is_coloured else INK
        marker = MARKERS[number % len(MARKERS)]
        if is_coloured:  # without data: the legend's entry, with line and marker
            axes.plot([], [], "-", color=colour, marker=marker, label=one.label)
        means = one.means(name)
        if not axis.categories:
            axes.plot(
                [place for place, _ in means], [mean for _, mean in means], "-", color=colour, alpha=0.7,
                zorder=3, linewidth=1.6,
            )  # fmt: skip
        for row in one.rows:
            place, value = axis.place(row), row.value(name)
            if place is not None and value is not None:
                style = {} if row.status == "finished" else {"markerfacecolor": "none"}
                text = f"{row.title}: {name} {value:.4g}"
                picture.point(axes, place, value, marker, text, color=colour, **style)


def _scale(axes: Axes, axis: Axis, places: list[float]) -> None:
    if axis.is_size and places:
        size_axis(axes, [int(place) for place in places])
    elif axis.is_log:
        axes.set_xscale("log")
    elif axis.categories:
        labels = [text if len(text) <= 24 else f"{text[:23]}…" for text in axis.categories]
        if len(labels) <= MOST_CATEGORIES:
            rotation = 30 if sum(map(len, labels)) > 40 else 0
            axes.set_xticks(
                range(len(labels)), labels, rotation=rotation, ha="right" if rotation else "center"
            )
        axes.set_xlim(-0.5, len(labels) - 0.5)
