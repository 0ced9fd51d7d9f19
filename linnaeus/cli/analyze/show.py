"""An analysis for people: tables with what to know of them, YAML to paste, and the picture."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.throughput import TOLERANCE
from linnaeus.cli.analyze.results import Analysis, Row, Speeds, TimedSize
from linnaeus.cli.plots import (
    BLUE,
    GREEN,
    PURPLE,
    VERMILION,
    Picture,
    decorate,
    drawing,
    label_heights,
    mark_size,
    size_axis,
)
from linnaeus.cli.tables import UNITS, cell, show_duration
from linnaeus.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEYS = {"train": "BATCH_SIZE", "val": "BATCH_SIZE_VAL"}
COLUMNS = (
    "mode", "memory_fraction", "batch_size", "limited_by", "peak_bytes", "budget_bytes", "samples_per_s",
)  # fmt: skip
COLUMNS_PREDICTED = ("device", "margin", "safe_batch_size", *COLUMNS[:-1])
COLUMNS_OF_A_RUN = ("epoch_s", "run_s", "in_time", "relative_time", "learning_rate", "marks")


def show(analysis: Analysis, console: Console) -> None:
    """Print the tables of sizes, speeds and remedies, each with its notes, and YAML to paste."""
    if not analysis.rows:
        return
    console.print(sizes_table(analysis))
    lines = _notes(analysis)
    for mode, speeds in analysis.speeds.items():
        if speeds.sizes:
            _print(console, lines)
            console.print(speeds_table(mode, speeds))
            lines = _speed_notes(mode, speeds)
    _print(console, lines)
    if any(row.remedies for row in analysis.rows):
        console.print(remedies_table(analysis))
    if text := yaml_blocks(analysis):
        _print(console, [f"To paste into a configuration:\n\n{text}"])


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(title: str, *headings: str, left: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def sizes_table(analysis: Analysis) -> Table:
    """One line for each device and fraction, with the sizes of all modes."""
    margin, modes = analysis.margin, analysis.modes
    rows = {(row.device, row.memory_fraction, row.mode): row for row in analysis.sorted_rows()}
    if margin is None:
        columns = [heading for mode in modes for heading in (mode, "peak GiB", "samples/s")]
        table = _table("Batch sizes", "memory", "budget GiB", *columns)
    else:
        columns = [heading for mode in modes for heading in (mode, "without margin")]
        title = f"Batch sizes, predicted with {100 * (margin - 1):.3g} % margin"
        table = _table(title, "device", "memory", "budget GiB", *columns, left=("device",))
    for device, fraction in dict.fromkeys(place[:2] for place in rows):
        of_place = [rows.get((device, fraction, mode)) for mode in modes]
        budgets = [row.budget_bytes for row in of_place if row is not None and row.budget_bytes is not None]
        cells = [f"{fraction:.0%}", _gib(max(budgets, default=None))]
        for row in of_place:
            if row is None:
                cells += [""] * (3 if margin is None else 2)
            elif margin is None:
                cells += [_size(row.batch_size), _gib(row.peak_bytes), cell(row.samples_per_s, ".4g")]
            else:
                cells += [_size(row.safe_size), _size(row.batch_size)]
        table.add_row(*([] if margin is None else [device]), *cells)
    return table


def _size(size: int | None) -> str:
    return "none" if size is None else str(size)


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def _notes(analysis: Analysis) -> list[str]:
    """Where nothing fits, what other than memory bounds a size, and what most of the memory is used for."""
    rows = analysis.sorted_rows()
    has_sizes = any(row.batch_size is not None for row in rows)
    found = analysis.reasons if has_sizes else []  # otherwise the reasons are the command's error
    found += [row.note for row in rows if row.note is not None]
    bounds: dict[tuple[Mode, str], list[str]] = {}
    for row in rows:
        if row.batch_size is not None and row.limited_by not in (None, "memory"):
            bounds.setdefault((row.mode, row.limited_by or ""), []).append(row.memory)
    found += [
        f"{mode}: {limit}, not memory, bounds the size at {', '.join(places)}"
        for (mode, limit), places in bounds.items()
    ]
    largest = {
        row.mode: row for row in analysis.chosen_rows() if row.breakdown is not None and row.peak_bytes
    }
    for mode, row in largest.items():
        assert row.breakdown is not None
        parts = {name: part / (row.peak_bytes or 1) for name, part in asdict(row.breakdown).items()}
        if parts["rest"] < 0.5:  # on a CPU the process itself is most of it
            shares = sorted(((share, name) for name, share in parts.items() if share >= 0.01), reverse=True)
            words = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for share, name in shares)
            found.append(f"memory of {mode} at batch size {row.batch_size}: {words}")
    return found


def speeds_table(mode: Mode, speeds: Speeds) -> Table:
    """One line for each size that was timed, in training with the run that it gives."""
    lines = [_cells(size, speeds) for size in speeds.ascending()]
    if all(line["effective"] == line["batch size"] for line in lines):
        for line in lines:
            del line["effective"]
    shown = [heading for heading in lines[0] if any(line[heading] for line in lines)]
    title = "Speed and time of training" if mode == "train" else "Speed of validation"
    table = _table(title, *shown, left=("",))
    for line in lines:
        table.add_row(*(line[heading] for heading in shown))
    return table


def _cells(size: TimedSize, speeds: Speeds) -> dict[str, str]:
    """The cells of a line by their headings; a column that is empty in all lines is not shown."""
    figures = speeds.figures(size)
    steps, time = size.relative_steps, figures["relative_time"]
    return {
        "batch size": str(size.batch_size),
        "effective": str(size.effective_batch),
        "samples/s": f"{size.samples_per_s:.4g}",
        "of best": f"{size.samples_per_s / speeds.fastest.samples_per_s:.0%}",
        "epoch": "" if size.epoch_s is None else show_duration(size.epoch_s),
        "run": "" if size.run_s is None else show_duration(size.run_s),
        "in time": "" if size.in_time is None else "yes" if size.in_time else "no",
        "steps": "" if steps is None else f"{steps:.3g} x",
        "to loss": "" if time is None else f"{time:.2f} x",
        "rate": cell(size.learning_rate, ".3g"),
        "": figures["marks"].replace(" ", ", "),
    }


def _speed_notes(mode: Mode, speeds: Speeds) -> list[str]:
    """Sizes left out, what the columns mean, warnings, the time budget, and the recommended size."""
    recommended, goal = speeds.recommended, speeds.recommended.goal
    found = [f"batch size {size} is left out: {reason}" for size, reason in speeds.left_out.items()]
    why = f"the smallest within {100 * TOLERANCE:g} % of the best samples per second"
    if goal is not None and goal.noise_scale is not None:
        why = "the least predicted time to the same loss"
        found.append(
            f"steps and time to the same loss: predicted for a noise scale of {goal.noise_scale:g} samples; "
            "steps as a multiple of the fewest possible, time as a multiple of the recommended size's"
        )
    found += [f"batch size {recommended.batch_size}: {warning}" for warning in recommended.warnings]
    if goal is not None and goal.time_budget_s is not None and not recommended.in_time:
        limit, fastest = show_duration(goal.time_budget_s), speeds.fastest
        in_time = [str(size.batch_size) for size in speeds.ascending() if size.in_time]
        remedy = f"it ends in time with {', '.join(in_time)}"
        if not in_time:
            remedy = (
                f"no size ends it in time, the fastest, {fastest.batch_size}, after "
                f"{show_duration(fastest.run_s or 0.0)}; fewer TRAIN.EPOCHS or more processes take less time"
            )
        run = show_duration(recommended.run_s or 0.0)
        found.append(f"the run takes {run} with the recommended size, more than {limit}; {remedy}")
    return [*found, f"recommended: DATA.{KEYS[mode]}={recommended.batch_size}, {why}"]


def remedies_table(analysis: Analysis) -> Table:
    """The memory that each remedy saves at each size; a reason why one does not apply is shown once."""
    is_predicted = analysis.margin is not None
    last = "then fits with margin" if is_predicted else "samples/s"
    table = _table(
        f"Remedies, {'predicted' if is_predicted else 'measured'}", "mode", "batch size", "remedy",
        "before GiB", "after GiB", "saved", last, left=("mode", "remedy"),
    )  # fmt: skip
    # Measured rows of the same size have the same effects; predicted ones differ by what then fits.
    rows = analysis.sorted_rows() if len(analysis.devices) == 1 else analysis.chosen_rows()
    if not is_predicted:
        rows = list({(row.mode, row.batch_size): row for row in rows}.values())
    reasons: set[tuple[Mode, str, str | None]] = set()
    for row in rows:
        for remedy in row.remedies:
            keys = " ".join(f"{key}={value}" for key, value in remedy.keys.items())
            start, before = (row.mode, str(row.batch_size)), _gib(remedy.peak_bytes_before)
            if remedy.peak_bytes is not None:
                gain = cell(remedy.samples_per_s, ".4g")
                if is_predicted:
                    gain = f"{_size(remedy.safe_batch_size)} in {row.memory}"
                saved = "" if remedy.saved_percent is None else f"{remedy.saved_percent:.1f} %"
                table.add_row(*start, keys, before, _gib(remedy.peak_bytes), saved, gain)
            elif (reason := (row.mode, keys, remedy.reason)) not in reasons:
                reasons.add(reason)
                table.add_row(*start, f"{keys}: {remedy.reason}", before)
    return table


def yaml_blocks(analysis: Analysis) -> str:
    """YAML to paste into a configuration: one block for each device."""
    chosen, blocks = analysis.chosen_rows(), []
    for device in analysis.devices:
        rows = [row for row in chosen if row.device == device]
        sizes = {row.mode: row.safe_size for row in rows}
        heading = f"{rows[0].memory_fraction:.0%} of {device or 'the memory'}" if rows else ""
        if analysis.margin is not None:
            heading += f", predicted with {100 * (analysis.margin - 1):.3g} % margin"
        timed = {mode: speeds.recommended for mode, speeds in analysis.speeds.items() if speeds.sizes}
        if timed:
            heading = "recommended"
            sizes |= {mode: size.batch_size for mode, size in timed.items()}
        lines = [f"  {KEYS[mode]}: {size}" for mode, size in sizes.items() if size is not None]
        if lines:
            blocks.append("\n".join([f"# {heading}", "DATA:", *lines]))
    return "\n\n".join(blocks)


# The picture.


def save_plot(analysis: Analysis, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    columns = COLUMNS if analysis.margin is None else COLUMNS_PREDICTED
    speeds = {mode: found for mode, found in analysis.speeds.items() if found.sizes}
    if speeds:
        columns = (*columns, *COLUMNS_OF_A_RUN)
    modes = analysis.modes
    with drawing(
        path, _headline(analysis), analysis, columns, num_rows=2 if speeds else 1,
        num_columns=max(len(modes), 2 if speeds else 1), panel_height=4.4,
    ) as picture:  # fmt: skip
        for axes, mode in zip(picture.panels[0], modes, strict=False):
            _memory_panel(picture, axes, mode, analysis)
        for axes in picture.panels[0][len(modes) :]:
            axes.set_visible(False)
        panels = [] if not speeds else picture.panels[1]
        for axes, (mode, found) in zip(panels, speeds.items(), strict=False):
            _speed_panel(picture, axes, mode, found)
        for axes in panels[len(speeds) :]:
            _time_panel(picture, axes, speeds["train"]) if "train" in speeds else axes.set_visible(False)
        _legend(picture, analysis)


def _headline(analysis: Analysis) -> str:
    environment = analysis.environment
    size = "×".join(map(str, environment["image_size"] or []))
    model = environment["model"] + (f", {size} pixels" if size else "")
    limit, margin = environment["memory_limit_gb"], analysis.margin
    if margin is not None:
        device = f"predicted for {', '.join(analysis.devices)}"
    else:
        device = f"{environment['device']} with {limit or environment['total_bytes'] / GIB:.3g} GiB"
    text = f"{model}, {environment['precision']}, {environment['optimizer']}, {device}"
    if (goal := analysis.goal) is not None:
        text += f"; {counted(goal.epochs, 'epoch')} of {goal.dataset_length:,} samples"
        text += "" if goal.world_size == 1 else f", {goal.world_size} processes"
        text += "" if goal.noise_scale is None else f", noise scale {goal.noise_scale:g}"
    return text


def _memory_panel(picture: Picture, axes: Axes, mode: Mode, analysis: Analysis) -> None:
    """Measured peaks and the line through them, or predicted ones; the budgets and the sizes chosen."""
    rows, curve = analysis.sorted_rows(mode), analysis.curves.get(mode, [])
    if len(analysis.devices) > 1:
        rows = [row for row in analysis.chosen_rows() if row.mode == mode]
    decorate(axes, f"{mode}: memory", "batch size", "peak memory (GiB)")
    trials = {trial.size: trial.peak_bytes for row in rows for trial in row.trials}
    measured = [(size, peak / GIB) for size, peak in sorted(trials.items()) if peak is not None]
    points = [(size, peak / GIB) for size, peak in curve] or measured
    budgets = [(row.budget_bytes / GIB, row) for row in rows if row.budget_bytes is not None]
    refused = {
        trial.size: height for height, row in budgets for trial in row.trials if trial.peak_bytes is None
    }
    heights = [height for height, _ in (*budgets, *points)]
    if not heights:
        axes.text(0.5, 0.5, "no batch size is possible", ha="center", transform=axes.transAxes)
        return
    right = 1.08 * max([*(size for size, _ in points), *refused], default=1)
    if curve:
        axes.plot(*zip(*points, strict=True), "-", color=BLUE, zorder=3)
    elif len(points) > 1:
        slope, start = statistics.linear_regression(*zip(*points, strict=True))
        axes.plot([0, right], [start, start + slope * right], "-", color=BLUE, alpha=0.8, linewidth=1.6)
    for size, height in points:
        text = f"{mode}, batch size {size}: {'predicted ' if curve else ''}{height:.3f} GiB"
        picture.point(axes, size, height, "o", text, color=BLUE)
    for size, height in refused.items():
        text = f"{mode}, batch size {size}: out of memory"
        picture.point(axes, size, height, "x", text, color=VERMILION, markersize=7, markeredgewidth=2)
    for height, row in budgets:
        axes.axhline(height, color=VERMILION, linestyle=(0, (5, 3)), linewidth=1.3, zorder=2)
        _chosen_sizes(picture, axes, row)
    low, high = min(heights), max(heights)
    axes.set_xlim(0, right)
    axes.set_ylim(0 if low < 0.5 * high else low - 0.15 * (high - low), high + 0.12 * (high - low or high))
    labels = [(height, f"{row.memory}: {_size(row.safe_size)}") for height, row in budgets]
    label_heights(axes, labels, VERMILION)


def _chosen_sizes(picture: Picture, axes: Axes, row: Row) -> None:
    """The size to configure, and the one that fits if a prediction is exact: small and hollow."""
    look: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": GREEN, "zorder": 5}
    peak_bytes = row.peak_bytes
    if row.predicted is not None:
        peak_bytes = row.predicted.safe_peak_bytes
        if row.batch_size is not None and row.peak_bytes is not None:
            height = row.peak_bytes / GIB
            text = f"{row.mode}, {row.memory}, without margin: batch size {row.batch_size}, {height:.3f} GiB"
            picture.point(axes, row.batch_size, height, "s", text, **look, markersize=9)
    if row.safe_size is not None and peak_bytes is not None:
        speed = "" if row.samples_per_s is None else f", {row.samples_per_s:.4g} samples/s"
        height = peak_bytes / GIB
        text = f"{row.mode}, chosen for {row.memory}: batch size {row.safe_size}, {height:.3f} GiB{speed}"
        picture.point(axes, row.safe_size, height, "D", text, **look, markeredgewidth=2.2, markersize=11)


def _speed_panel(picture: Picture, axes: Axes, mode: Mode, speeds: Speeds) -> None:
    """Samples per second against batch size."""
    decorate(axes, f"{mode}: throughput", "batch size", "samples per second")
    points = [(size.batch_size, size.samples_per_s) for size in speeds.ascending()]
    texts = [f"{mode}, batch size {size}: {speed:.4g} samples/s" for size, speed in points]
    _curve(picture, axes, points, texts, PURPLE, speeds)


def _time_panel(picture: Picture, axes: Axes, speeds: Speeds) -> None:
    """Time of the run, or with a noise scale the predicted time to the same loss."""
    goal = speeds.recommended.goal
    assert goal is not None
    sizes = speeds.ascending()
    if goal.noise_scale is not None:
        decorate(axes, "train: time to the same loss", "batch size", "multiple of the recommended size's")
        times = [speeds.figures(size)["relative_time"] for size in sizes]
        texts = [
            f"batch size {size.batch_size}: {time:.2f} x the time"
            for size, time in zip(sizes, times, strict=True)
        ]
    else:
        longest = max(size.run_s or 0.0 for size in sizes)
        unit = next(unit for unit in ("d", "h", "m", "s") if unit == "s" or longest >= 2 * UNITS[unit])
        name = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}[unit]
        decorate(axes, "train: time of the run", "batch size", name)
        times = [(size.run_s or 0.0) / UNITS[unit] for size in sizes]
        texts = [f"batch size {size.batch_size}: {show_duration(size.run_s or 0.0)}" for size in sizes]
        if goal.time_budget_s is not None:
            height = goal.time_budget_s / UNITS[unit]
            axes.axhline(height, color=VERMILION, linestyle=(0, (5, 3)), gid="budget")
    points = [(size.batch_size, time) for size, time in zip(sizes, times, strict=True)]
    _curve(picture, axes, points, texts, BLUE, speeds)


def _curve(
    picture: Picture,
    axes: Axes,
    points: list[tuple[int, float]],
    texts: list[str],
    colour: str,
    speeds: Speeds,
) -> None:
    picture.line(axes, points, texts, colour)
    size_axis(axes, [size for size, _ in points])
    axes.set_ylim(0, 1.15 * max(height for _, height in points))
    mark_size(axes, speeds.recommended.batch_size, f"recommended: {speeds.recommended.batch_size}")


def _legend(picture: Picture, analysis: Analysis) -> None:
    """One legend below all panels, where it covers no point and no budget line."""
    from matplotlib.lines import Line2D

    hollow: dict[str, Any] = {"color": GREEN, "markerfacecolor": "none"}
    budget = {"color": VERMILION, "linestyle": "--"}
    diamond = {**hollow, "marker": "D", "markeredgewidth": 2}
    looks: dict[str, dict[str, Any]] = {
        "measured, and fitted line": {"color": BLUE, "linestyle": "-", "marker": "o", "alpha": 0.9},
        "budget: size chosen": budget,
        "size chosen": diamond,
    }
    small_print = None
    if analysis.margin is not None:
        looks = {
            "predicted": {"color": BLUE, "linestyle": "-", "marker": "o", "alpha": 0.9},
            "budget: size that fits with the margin": budget,
            "size that fits with the margin": diamond,
            "size that fits without": {**hollow, "marker": "s"},
        }
        small_print = (
            f"margin {analysis.margin - 1:.0%} of the predicted peak, which includes "
            f"{analysis.environment['base_bytes'] / GIB:.2f} GiB beside the allocator "
            f"({analysis.environment['base']})"
        )
    elif any(trial.peak_bytes is None for row in analysis.rows for trial in row.trials):
        looks["out of memory"] = {"color": VERMILION, "marker": "x", "markeredgewidth": 2}
    entries = [Line2D([], [], label=label, **{"linestyle": "", **look}) for label, look in looks.items()]
    columns = min(len(entries), 1 + 2 * len(picture.panels[0]))  # as many as one panel's width has room for
    picture.figure.legend(
        handles=entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=9,
        title=small_print, title_fontsize=9,
    )  # fmt: skip
