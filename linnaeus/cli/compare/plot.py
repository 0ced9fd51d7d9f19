"""The picture of runs: learning curves, and metric and training time against what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.cli.compare.differences import SEED
from linnaeus.cli.compare.history import is_smaller_better
from linnaeus.cli.compare.results import Comparison
from linnaeus.cli.compare.series import Axis, Group, Mean, axis_of, groups_by, point_of
from linnaeus.cli.plots import INK, SERIES, Picture, decorate, drawing, size_axis
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
MOST_KEYS_IN_TITLE = 5
MOST_CATEGORIES = 16
"""Texts below an axis; with more, they would cover each other."""


def save_plot(runs: Comparison, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    columns = [name for name in runs.columns if name not in ("folder", "reason")]
    axis = axis_of(runs.rows)
    groups = groups_by(
        (row for row in runs.rows if row.metrics and axis.place(row) is not None), axis.keys | {SEED}
    )
    with drawing(path, _headline(runs), runs, columns, num_columns=3, panel_height=5.6) as picture:
        [[left, middle, right]] = picture.panels
        _curves_panel(picture, left, runs)
        decorate(middle, f"validation {runs.metric}", axis.label, runs.metric)
        decorate(right, "training time", axis.label, "seconds")
        _against_axis(picture, middle, groups, axis, runs.metric)
        _against_axis(picture, right, groups, axis, "training_s")
        if any(row.value("training_s") is not None for row in runs.rows):
            right.set_ylim(bottom=0)
        if len(groups) > 1:
            middle.legend(frameon=False, fontsize=9)


def _headline(runs: Comparison) -> str:
    finished, total = sum(row.status == "finished" for row in runs.rows), len(runs.rows)
    keys = counted(len(runs.keys), "key") if len(runs.keys) > MOST_KEYS_IN_TITLE else ", ".join(runs.keys)
    return f"{finished} of {counted(total, 'run')} finished{keys and f' over {keys}'}"


def _curves_panel(picture: Picture, axes: Axes, runs: Comparison) -> None:
    """A line for each run, or for the mean of those that differ in the seed alone with their range."""
    from matplotlib.ticker import MaxNLocator

    metric = runs.metric
    decorate(axes, "learning curves", "epoch", metric)
    sign = -1 if is_smaller_better(metric) else 1
    drawn = groups_by((row for row in runs.rows if row.history.finite(metric)), frozenset({SEED}))
    curves = [(_title(group), group.means(lambda row: row.history.finite(metric))) for group in drawn]
    best = sorted(curves, key=lambda curve: -max(sign * mean.value for mean in curve[1]))[:MOST_LABELS]
    coloured = [curve for curve in curves if curve in best]
    is_short = sum(len(means) for _, means in curves) <= MOST_POINTS
    for curve in curves:
        if curve not in best:
            _line(axes, curve[1], "-", color=INK, alpha=0.3, linewidth=0.8, zorder=2)
    for number, (label, means) in enumerate(coloured):
        top = max(means, key=lambda mean: sign * mean.value)
        _curve(picture, axes, number, label, means, means if is_short else sorted({top, means[-1]}), metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not curves:
        axes.text(0.5, 0.5, "no validation yet", ha="center", transform=axes.transAxes)
    if len(curves) > 1:
        _curves_legend(axes, len(coloured), len(curves) - len(coloured))


def _curve(
    picture: Picture, axes: Axes, number: int, label: str, means: Sequence[Mean], points: Sequence[Mean],
    metric: str,
) -> None:  # fmt: skip
    """One of the coloured learning curves, with its range, and those of its points that say something."""
    colour, style = SERIES[number % len(SERIES)], "-" if number < len(SERIES) else "--"
    _line(axes, means, style, color=colour, label=label)
    if band := [mean for mean in means if mean.number > 1]:
        epochs, _, lowest, highest, _ = zip(*band, strict=True)
        axes.fill_between(epochs, lowest, highest, color=colour, alpha=0.18, linewidth=0)
    for mean in points:
        of = f", mean of {mean.number}" if mean.number > 1 else ""
        text = f"{label}: epoch {mean.place}, {metric} {mean.value:.4g}{of}"
        size = 3 if len(points) == len(means) else 5
        picture.point(axes, mean.place, mean.value, "o", text, color=colour, markersize=size)


def _curves_legend(axes: Axes, num_coloured: int, num_grey: int) -> None:
    title = f"the best {num_coloured}; {num_grey} more in grey" if num_grey else None
    is_long = num_coloured > LABELS_INSIDE
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 2} if is_long else {}
    axes.legend(frameon=False, fontsize=8, title=title, title_fontsize=8, **place)


def _title(group: Group) -> str:
    """What the legend calls a learning curve."""
    if len(group.rows) == 1:
        return group.label or group.rows[0].title
    return f"{group.label} ({counted(len(group.rows), 'seed')})".lstrip()


def _line(axes: Axes, means: Sequence[Mean], style: str, **more: Any) -> None:
    places, values = [mean.place for mean in means], [mean.value for mean in means]
    axes.plot(places, values, style, **{"linewidth": 1.6, "zorder": 3, **more})


def _against_axis(picture: Picture, axes: Axes, groups: list[Group], axis: Axis, name: str) -> None:
    """A point for each run, and a line through the means at each place."""
    places = {place for group in groups for row in group.rows if (place := axis.place(row)) is not None}
    _scale(axes, axis, sorted(places))
    for number, group in enumerate(groups):
        is_coloured = number < MOST_LABELS
        colour = SERIES[number % len(SERIES)] if is_coloured else INK
        marker = MARKERS[number % len(MARKERS)]
        if is_coloured:  # without data: the legend's entry, with line and marker
            _line(axes, [], "-", color=colour, marker=marker, label=group.label or group.rows[0].name)
        if not axis.categories:
            means = group.means(lambda row: point_of(row, axis, name))
            _line(axes, means, "-", color=colour, alpha=0.7)
        for row in group.rows:
            for place, value in point_of(row, axis, name):
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
