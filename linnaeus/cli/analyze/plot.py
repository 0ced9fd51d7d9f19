"""The picture of an analysis: memory against batch size, and samples per second where sizes were timed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import Mode
from linnaeus.cli.analyze.results import Analysis, Row, limit_words
from linnaeus.cli.measure import Speeds
from linnaeus.cli.picture import BLUE, GREEN, VERMILION, Picture, decorate, drawing, mark_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 1024**2


def save_plot(analysis: Analysis, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    columns = (
        *(["device", "margin", "safe_batch_size"] if analysis.is_predicted else []),
        "mode", "memory_fraction", "batch_size", "limited_by", "peak_bytes", "budget_bytes", "samples_per_s",
    )  # fmt: skip
    modes = list(analysis.speeds)
    with_speed = any(speeds.knee is not None for speeds in analysis.speeds.values())
    with drawing(
        path, _headline(analysis), analysis, columns, num_rows=1 + with_speed, num_columns=len(modes),
        panel_height=4.4,
    ) as picture:  # fmt: skip
        for column, (mode, speeds) in enumerate(analysis.speeds.items()):
            rows, curve = analysis.sorted_rows(mode), analysis.curves.get(mode, [])
            _memory_panel(picture, picture.panels[0][column], mode, rows, curve)
            if with_speed:
                _speed_panel(picture, picture.panels[1][column], mode, speeds)
        with_refused = any(_refused(analysis.sorted_rows(mode)) for mode in modes)
        _legend(
            picture.figure, with_refused=with_refused, is_predicted=analysis.is_predicted,
            num_columns=len(modes),
            small_print=_small_print(analysis.environment) if analysis.is_predicted else "",
        )  # fmt: skip


def _headline(analysis: Analysis) -> str:
    environment = analysis.environment
    size = "×".join(map(str, environment["image_size"] or []))
    model = environment["model"] + (f", {size} pixels" if size else "")
    if analysis.is_predicted:
        device = f"predicted for {', '.join(analysis.devices)}{limit_words(environment)}"
    else:
        limit = environment["memory_limit_gb"]
        device = f"{environment['device']} with {limit or environment['total_bytes'] / GIB:.3g} GiB"
    return f"{model}, {environment['precision']}, {environment['optimizer']}, {device}"


def _memory_panel(
    picture: Picture, axes: Axes, mode: Mode, rows: list[Row], curve: list[tuple[int, int]]
) -> None:
    """Measured peaks and the line through them, or predicted ones; the budgets and the sizes chosen."""
    trials = [trial for row in rows for trial in row.trials]
    measured = sorted((trial.size, trial.peak_bytes) for trial in trials if trial.peak_bytes is not None)
    points = curve or measured
    budgets = [row.budget_bytes for row in rows if row.budget_bytes is not None]
    heights = [*budgets, *(peak for _, peak in points)]
    refused = _refused(rows)
    unit, name = (GIB, "GiB") if max(heights, default=0) >= GIB else (_MIB, "MiB")
    decorate(axes, f"{mode}: memory", "batch size", f"peak memory ({name})")
    if not heights:
        axes.text(0.5, 0.5, "no batch size is possible", ha="center", transform=axes.transAxes)
        return
    right = 1.12 * max([size for size, _ in points] + list(refused), default=1)
    _budget_lines(axes, rows, unit, right)
    if curve:
        axes.plot(
            *zip(*[(size, peak / unit) for size, peak in curve], strict=True), "-", color=BLUE, zorder=3
        )
    else:
        _fitted_line(axes, points, unit, right)
    for size, peak in points:
        text = f"{mode}, batch size {size}: {'predicted ' if curve else ''}{peak / unit:.3f} {name}"
        picture.point(axes, size, peak / unit, "o", text, color=BLUE)
    top = max(heights) / unit
    for size, budget in refused.items():
        text = f"{mode}, batch size {size}: out of memory"
        picture.point(axes, size, budget / unit, "x", text, color=VERMILION, markersize=7, markeredgewidth=2)
    _sizes_without_margin(picture, axes, rows, unit, name)
    _chosen_sizes(picture, axes, rows, unit, name)
    low = min(heights) / unit
    axes.set_xlim(0, right)
    axes.set_ylim(0 if low < 0.5 * top else low - 0.15 * (top - low), top + 0.12 * (top - low or top))


def _refused(rows: list[Row]) -> dict[int, int]:
    """The budget in bytes under which each size ran out of memory."""
    return {
        trial.size: row.budget_bytes
        for row in rows
        for trial in row.trials
        if trial.peak_bytes is None and row.budget_bytes is not None
    }


def _budget_lines(axes: Axes, rows: list[Row], unit: int, right: float) -> None:
    heights: dict[float, list[Row]] = {}
    top = max(row.budget_bytes or 0 for row in rows) / unit
    for row in sorted(rows, key=lambda row: row.budget_bytes or 0, reverse=True):
        if row.budget_bytes is not None:
            height = row.budget_bytes / unit
            axes.axhline(height, color=VERMILION, linestyle=(0, (5, 3)), linewidth=1.3, zorder=2)
            above = min(heights, default=None)
            is_apart = above is None or not row.device or above - height > LABELS_APART * top
            heights.setdefault(height if is_apart or above is None else above, []).append(row)
    for height, close in heights.items():
        is_left = not close[0].device or height > top / 2  # away from the curve
        axes.text(
            (0.01 if is_left else 0.99) * right, height, _budget_label(close), color=VERMILION, va="bottom",
            ha="left" if is_left else "right", zorder=5, fontweight="bold",
        )  # fmt: skip


LABELS_APART = 0.055
"""Least distance between two labels of predictions, as a fraction of the highest budget."""


def _budget_label(rows: list[Row]) -> str:
    """Of budgets that are close together: `80%, 90% of rtx-4090`."""
    by_device: dict[str, dict[str, None]] = {}
    for row in reversed(rows):
        _, _, limit = row.share.partition(" of ")  # the same for all devices that it bounds
        by_device.setdefault(limit or row.device, {})[f"{row.memory_fraction:.0%}"] = None
    labels = (", ".join(shares) + (f" of {device}" if device else "") for device, shares in by_device.items())
    return "; ".join(labels)


def _fitted_line(axes: Axes, points: list[tuple[int, int]], unit: int, right: float) -> None:
    """Draw the line of least squares through (size, bytes), where there are two sizes."""
    if len({size for size, _ in points}) > 1:
        slope, start = statistics.linear_regression(*zip(*points, strict=True))
        ends = [0.0, right]
        heights = [(start + slope * end) / unit for end in ends]
        axes.plot(ends, heights, "-", color=BLUE, alpha=0.8, linewidth=1.6, gid="fitted-line", zorder=3)


def _sizes_without_margin(picture: Picture, axes: Axes, rows: list[Row], unit: int, name: str) -> None:
    """Of predicted rows, the sizes that fit if the prediction is exact: small and hollow."""
    for row in rows:
        if row.predicted is not None and row.batch_size is not None and row.peak_bytes is not None:
            height = row.peak_bytes / unit
            text = (
                f"{row.mode}, {row.memory}, without margin: batch size {row.batch_size}, "
                f"predicted {height:.3f} {name}"
            )
            picture.point(
                axes, row.batch_size, height, "s", text, markerfacecolor="none", markeredgecolor=GREEN,
                markersize=9, zorder=5,
            )  # fmt: skip


def _chosen_peak(row: Row) -> int:
    """Peak at the size to configure; 0 without one."""
    return (row.peak_bytes if row.predicted is None else row.predicted.safe_peak_bytes) or 0


def _chosen_sizes(picture: Picture, axes: Axes, rows: list[Row], unit: int, name: str) -> None:
    """The sizes to configure: measured ones, or those predicted to fit with the margin."""
    chosen = {row.safe_size: row for row in sorted(rows, key=_chosen_peak, reverse=True)}
    above, top = inf, max(row.budget_bytes or 0 for row in rows) / unit
    for size, row in chosen.items():
        if size is None or not _chosen_peak(row):
            continue
        fractions = ", ".join(other.memory for other in rows if other.safe_size == size)
        speed = "" if row.samples_per_s is None else f", {row.samples_per_s:.4g} samples/s"
        height = _chosen_peak(row) / unit
        text = f"{row.mode}, chosen for {fractions}: batch size {size}, {height:.3f} {name}{speed}"
        picture.point(
            axes, size, height, "D", text, markerfacecolor="none", markeredgecolor=GREEN,
            markeredgewidth=2.2, markersize=11, zorder=5,
        )  # fmt: skip
        if row.device and above - height < LABELS_APART * top:  # no room for the text
            continue
        above = height
        axes.annotate(
            str(size), (size, height), xytext=(-9, 5), textcoords="offset points", ha="right", color=GREEN,
            fontsize=12, fontweight="bold", zorder=6,
        )  # fmt: skip


def _small_print(environment: Mapping[str, Any]) -> str:
    """The assumptions of a prediction."""
    return (
        f"margin {environment['margin'] - 1:.0%} of the predicted peak, which includes "
        f"{environment['base_bytes'] / GIB:.2f} GiB beside the allocator ({environment['base']})"
    )


def _legend(
    figure: Figure, *, with_refused: bool, is_predicted: bool, num_columns: int, small_print: str
) -> None:
    """One legend below all panels, where it covers no point and no budget line."""
    from matplotlib.lines import Line2D

    looks: dict[str, dict[str, Any]] = {
        "predicted" if is_predicted else "measured, and fitted line": {
            "color": BLUE,
            "linestyle": "-",
            "marker": "o",
            "alpha": 0.9,
        },
        "budget": {"color": VERMILION, "linestyle": "--"},
        "size that fits with the margin" if is_predicted else "size chosen": {
            "color": GREEN,
            "marker": "D",
            "markerfacecolor": "none",
            "markeredgewidth": 2,
        },
        "size that fits without": {"color": GREEN, "marker": "s", "markerfacecolor": "none"},
        "out of memory": {"color": VERMILION, "marker": "x", "markeredgewidth": 2},
    }
    if not with_refused:
        del looks["out of memory"]
    if not is_predicted:
        del looks["size that fits without"]
    entries = [Line2D([], [], label=label, **{"linestyle": "", **look}) for label, look in looks.items()]
    columns = min(len(entries), 1 + 2 * num_columns)  # as many as one panel's width has room for
    figure.legend(
        handles=entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=9,
        title=small_print or None, title_fontsize=9,
    )  # fmt: skip


def _speed_panel(picture: Picture, axes: Axes, mode: Mode, speeds: Speeds) -> None:
    """Samples per second, and the smallest size that is about as fast as the fastest."""
    points = [(timing.batch_size, timing.samples_per_s) for timing in speeds.ascending()]
    picture.speeds(axes, points, title=f"{mode}: throughput", prefix=f"{mode}, ")
    largest = max((size for size, _ in points), default=1)
    axes.set_ylim(0, 1.2 * max((speed for _, speed in points), default=1))
    axes.set_xlim(0, 1.12 * largest)
    if speeds.knee is not None:
        is_left = speeds.knee < 0.7 * largest
        mark_size(axes, speeds.knee, f"knee: {speeds.knee}", text_on_the_right=is_left)
