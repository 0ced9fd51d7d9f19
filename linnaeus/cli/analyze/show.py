"""An analysis for people: tables with what to know of them, YAML to paste, and the picture."""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.prediction import MARGIN
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.throughput import TOLERANCE
from linnaeus.cli.analyze.measure import settings_sentence
from linnaeus.cli.analyze.results import Analysis, Breakdown, Goal, Speeds, TimedSize
from linnaeus.cli.plots import (
    BLUE,
    GREEN,
    PURPLE,
    VERMILION,
    decorate,
    drawing,
    label_heights,
    size_axis,
)
from linnaeus.cli.tables import cell, show_duration, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

KEYS = {"train": "BATCH_SIZE", "val": "BATCH_SIZE_VAL"}
COLUMNS = (
    "mode",
    "memory_fraction",
    "batch_size",
    "limited_by",
    "peak_bytes",
    "budget_bytes",
    "samples_per_s",
    "epoch_s",
    "run_s",
    "in_time",
    "relative_time",
    "learning_rate",
    "marks",
)
MARGIN_NOTE = f"predicted with {100 * (MARGIN - 1):.3g} % margin"
"""Of the table in the HTML file, as far as there are such figures."""


def show(analysis: Analysis, console: Console) -> None:
    """Print the tables of sizes, speeds and remedies, each with its notes, and YAML to paste."""
    parts = [sizes_table(analysis), *_notes(analysis), *filter(None, [parts_table(analysis)])]
    if analysis.speeds.sizes:
        parts += [speeds_table(analysis.speeds), *_speed_notes(analysis.speeds, analysis.goal)]
    if any(row.remedies for row in analysis.rows):
        parts.append(remedies_table(analysis))
    if text := yaml_blocks(analysis):
        parts.append(f"To paste into a configuration:\n\n{text}")
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def sizes_table(analysis: Analysis) -> Table:
    """One line for each device and fraction, with the sizes of all modes."""
    predicted, modes = analysis.is_predicted, analysis.modes
    rows = {(row.device, row.memory_fraction, row.mode): row for row in analysis.sorted_rows()}
    figures = ("without margin",) if predicted else ("peak GiB", "samples/s")
    lines = []
    for device, fraction in dict.fromkeys(place[:2] for place in rows):
        of_place = [rows.get((device, fraction, mode)) for mode in modes]
        budgets = [
            row.budget_bytes for row in of_place if row is not None and row.budget_bytes is not None
        ]
        cells = [device] * predicted + [f"{fraction:.0%}", _gib(max(budgets, default=None))]
        for row in of_place:
            if row is None:
                cells += [""] * (1 + len(figures))
            elif predicted:
                cells += [_size(row.safe_batch_size), _size(row.batch_size)]
            else:
                cells += [
                    _size(row.batch_size),
                    _gib(row.peak_bytes),
                    cell(row.samples_per_s, ",.1f"),
                ]
        lines.append(cells)
    headings = ["device"] * predicted + ["memory", "budget GiB"]
    headings += [heading for mode in modes for heading in (mode, *figures)]
    title = f"Batch sizes, {MARGIN_NOTE}" if predicted else "Batch sizes"
    return table(title, headings, lines, left=("device",))


def _size(size: int | None) -> str:
    return "none" if size is None else str(size)


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def _notes(analysis: Analysis) -> list[str]:
    """Where nothing fits, and what other than memory bounds a size."""
    rows = analysis.sorted_rows()
    has_sizes = any(row.batch_size is not None for row in rows)
    found = analysis.reasons if has_sizes else []  # otherwise the reasons are the command's error
    bounds: dict[tuple[Mode, str], list[str]] = {}
    for row in rows:
        if row.batch_size is not None and row.limited_by not in (None, "memory"):
            bounds.setdefault((row.mode, row.limited_by or ""), []).append(row.memory)
    for (mode, limit), places in bounds.items():
        found.append(f"{mode}: {limit}, not memory, bounds the size at {', '.join(places)}")
    return found


def parts_table(analysis: Analysis) -> Table | None:
    """What takes the memory at each size to paste; None where the process itself takes most, as on a CPU."""
    lines, shown = list[dict[str, str]](), {"batch size"}
    for row in analysis.chosen_rows():
        parts = Counter(
            {
                name.replace("_", " "): part
                for name, part in vars(row.breakdown or Breakdown()).items()
            }
        )
        total = parts.total()
        if 2 * parts["rest"] < total:
            shown |= {name for name, part in parts.items() if part > total / 100}
            shown |= {"device", "mode"} if row.device else {"mode"}
            places = {
                "device": row.device,
                "mode": row.mode,
                "batch size": str(row.batch_size or 1),
            }
            lines.append(places | {name: _gib(part) for name, part in parts.most_common()})
    headings = [heading for heading in dict.fromkeys(chain(*lines)) if heading in shown]
    rows = ([line[heading] for heading in headings] for line in lines)
    return (
        table("What takes the memory, in GiB", headings, rows, left=("device", "mode"))
        if lines
        else None
    )


def speeds_table(speeds: Speeds) -> Table:
    """One line for each training size that was timed; a column that is empty in all lines is not shown."""
    lines = [_cells(size, speeds) for size in speeds.ascending()]
    shown = [heading for heading in lines[0] if any(line[heading] for line in lines)]
    rows = ([line[heading] for heading in shown] for line in lines)
    return table("Speed and time of training", shown, rows, left=("",))


def _cells(size: TimedSize, speeds: Speeds) -> dict[str, str]:
    figures = speeds.figures(size)
    steps, time = size.relative_steps, figures["relative_time"]
    return {
        "batch size": str(size.batch_size),
        "effective": "" if size.effective_batch == size.batch_size else str(size.effective_batch),
        "samples/s": f"{size.samples_per_s:,.1f}",
        "epoch": show_duration(size.epoch_s),
        "run": show_duration(size.run_s),
        "in time": "" if size.in_time is None else "yes" if size.in_time else "no",
        "steps": "" if steps is None else f"{steps:.3g} x",
        "to loss": "" if time is None else f"{time:.2f} x",
        "rate": cell(size.learning_rate, ".3g"),
        "": figures["marks"].replace(" ", ", "),
    }


def _speed_notes(speeds: Speeds, goal: Goal | None) -> list[str]:
    """Sizes left out, what the columns mean, warnings, the time budget, and the recommended size."""
    best = speeds.recommended
    found = [f"batch size {size} is left out: {reason}" for size, reason in speeds.left_out.items()]
    why = f"the smallest within {100 * TOLERANCE:g} % of the best samples per second"
    if goal is not None and best.relative_steps is not None:
        why = "the least predicted time to the same loss"
        found.append(
            f"steps and time to the same loss: predicted for a noise scale of {goal.noise_scale:g} samples; "
            "steps as a multiple of the fewest possible, time as a multiple of the recommended size's"
        )
    found += [f"batch size {best.batch_size}: {warning}" for warning in best.warnings]
    if best.in_time is False:
        found.append("no size ends the run in time: lower TRAIN.EPOCHS or take more processes")
    return [*found, f"recommended: DATA.BATCH_SIZE={best.batch_size}, {why}"]


def remedies_table(analysis: Analysis) -> Table:
    """The memory that each remedy saves at the sizes to paste, and what it brings on each device."""
    predicted = analysis.is_predicted
    how = "predicted" if predicted else "measured"
    gain = "then fits with margin" if predicted else "samples/s"
    headings = ("remedy", "batch size", "before GiB", "after GiB", "saved", gain)
    rows = [row for row in analysis.chosen_rows() if row.remedies]
    lines = []
    for effects in zip(
        *(row.remedies for row in rows), strict=False
    ):  # of one remedy on each device
        row, remedy = rows[0], effects[0]
        items = remedy.keys.items()
        keys = " ".join(
            key if key == "--checkpointing" else f"{key}={value}" for key, value in items
        )
        size = str(row.batch_size or 1)
        if remedy.reason is not None:
            lines.append([f"{keys}: {remedy.reason}", size])
            continue
        before, saved = remedy.peak_bytes_before or 0, remedy.saved_bytes
        share = "" if saved is None or not before else f"{saved / before:.1%}"
        gains = [cell(remedy.samples_per_s, ",.1f")]
        if predicted:
            pairs = zip(rows, effects, strict=True)
            gains = [f"{_size(each.safe_batch_size)} in {place.memory}" for place, each in pairs]
        peaks = [_gib(remedy.peak_bytes_before), _gib(remedy.peak_bytes)]
        lines.append([keys, size, *peaks, share, "\n".join(gains)])
    return table(f"Remedies in training, {how}", headings, lines, left=("remedy",))


def yaml_blocks(analysis: Analysis) -> str:
    """YAML to paste into a configuration: one block for each device."""
    chosen, blocks = analysis.chosen_rows(), []
    for device in dict.fromkeys(
        row.device for row in chosen
    ):  # one without a name where sizes were measured
        rows = [row for row in chosen if row.device == device]
        heading = f"{rows[0].memory_fraction:.0%} of {device or 'the memory'}"
        sizes = {row.mode: row.safe_batch_size if device else row.batch_size for row in rows}
        if device:
            heading += f", {MARGIN_NOTE}"
        if analysis.speeds.sizes:
            heading = "recommended"
            sizes["train"] = analysis.speeds.recommended.batch_size
        lines = [f"  {KEYS[mode]}: {size}" for mode, size in sizes.items() if size is not None]
        if lines:
            blocks.append("\n".join([f"# {heading}", "DATA:", *lines]))
    return "\n\n".join(blocks)


# The picture.


def save_plot(analysis: Analysis, path: Path) -> None:
    """Draw the picture and write it, atomically, in the format that the ending names."""
    panels = [partial(_memory_panel, analysis, mode) for mode in analysis.modes]
    if analysis.speeds.sizes:
        panels.append(partial(_speed_panel, analysis.speeds))
    columns = [name for name in COLUMNS if name in analysis.columns]
    environment = analysis.environment
    gib = environment["memory_limit_gb"] or environment["total_bytes"] / GIB
    title = f"{settings_sentence(environment)}; {environment['device']} with {gib:.3g} GiB"
    with drawing(path, title, analysis, columns, num_columns=len(panels)) as [places]:
        for axes, draw in zip(places, panels, strict=True):
            draw(axes)
        # One legend below all panels, where it covers no point and no budget line.
        entries = [axes.get_legend_handles_labels() for axes in places]
        looks = {label: handle for each in entries for handle, label in zip(*each, strict=True)}
        places[0].figure.legend(
            looks.values(),
            looks.keys(),
            loc="outside lower center",
            ncols=1 + 2 * len(panels),
            frameon=False,
            fontsize=9,
        )


def _memory_panel(analysis: Analysis, mode: Mode, axes: Axes) -> None:
    """Measured peaks and the line through them, the budgets and the sizes chosen."""
    decorate(axes, f"{mode}: memory", "batch size", "peak memory (GiB)")
    rows = [row for row in analysis.sorted_rows() if row.mode == mode]
    trials = sorted({(trial.size, trial.peak_bytes) for row in rows for trial in row.trials})
    measured = {size: peak / GIB for size, peak in trials if peak is not None}
    budgets = [(row.budget_bytes / GIB, row) for row in rows if row.budget_bytes is not None]
    refused = {
        trial.size: height
        for height, row in budgets
        for trial in row.trials
        if trial.peak_bytes is None
    }
    chosen = {
        row.batch_size: row.peak_bytes / GIB
        for _, row in budgets
        if row.batch_size and row.peak_bytes
    }
    heights = [height for height, _ in budgets] + [*measured.values()]
    if not heights:
        axes.text(0.5, 0.5, "no batch size is possible", ha="center", transform=axes.transAxes)
        return
    if len(measured) > 1:
        slope, start = statistics.linear_regression([*measured], [*measured.values()])
        axes.axline((0, start), slope=slope, color=BLUE, alpha=0.8, label="fitted line")
    ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 2, "markersize": 9}
    for places, look in (
        (measured, {"marker": "o", "color": BLUE, "label": "measured"}),
        (refused, {"marker": "x", "color": VERMILION, "label": "out of memory"}),
        (chosen, {"marker": "D", "color": GREEN, "label": "size chosen", **ring}),
    ):
        if places:
            axes.plot([*places], [*places.values()], linestyle="", zorder=4, **look)
    for height, _ in budgets:
        axes.axhline(
            height, color=VERMILION, linestyle=(0, (5, 3)), label="budget, with the size chosen"
        )
    low, high = min(heights), max(heights)
    axes.set_xlim(0, 1.08 * max([*measured, *refused], default=1))
    axes.set_ylim(
        0 if low < 0.5 * high else low - 0.15 * (high - low), high + 0.12 * (high - low or high)
    )
    labels = [(height, f"{row.memory}: {_size(row.batch_size)}") for height, row in budgets]
    label_heights(axes, labels, VERMILION)


def _speed_panel(speeds: Speeds, axes: Axes) -> None:
    """Samples per second of training against batch size."""
    best = speeds.recommended.batch_size
    sizes = [size.batch_size for size in speeds.ascending()]
    decorate(axes, "train: throughput", "batch size", "samples per second")
    size_axis(axes, sizes)
    axes.plot(sizes, [speeds.sizes[size].samples_per_s for size in sizes], "o-", color=PURPLE)
    axes.set_ylim(0, 1.15 * speeds.fastest.samples_per_s)
    axes.axvline(best, color=GREEN, linestyle=":", label=f"recommended for training: {best}")
