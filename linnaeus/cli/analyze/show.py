"""An analysis for people: the table of each mode, what to know of it, YAML to paste, and the picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.prediction import MARGIN
from linnaeus.autobatch.result import Mode
from linnaeus.cli.analyze.measure import settings_sentence
from linnaeus.cli.analyze.options import CONFIGURED
from linnaeus.cli.analyze.results import Analysis, Row
from linnaeus.cli.plots import BLUE, GREEN, VERMILION, decorate, drawing, label_heights
from linnaeus.cli.tables import cell, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

KEYS = {"train": "BATCH_SIZE", "val": "BATCH_SIZE_VAL"}
MARGIN_NOTE = f"predicted with {100 * (MARGIN - 1):.3g} % margin"


def show(analysis: Analysis, console: Console) -> None:
    """Print the table of each mode, with its notes, and YAML to paste."""
    parts: list[Any] = [
        sizes_table(analysis, mode) for mode in dict.fromkeys(row.mode for row in analysis.rows)
    ]
    parts += _notes(analysis)
    if text := yaml_blocks(analysis):
        parts.append(f"To paste into a configuration:\n\n{text}")
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def sizes_table(analysis: Analysis, mode: Mode) -> Table:
    """One line for each variant and device: the maximum batch size at each fraction, and its speed."""
    rows = {
        (row.variant, row.device, row.memory_fraction): row
        for row in analysis.sorted_rows()
        if row.mode == mode
    }
    fractions = sorted({row.memory_fraction for row in analysis.rows})
    chosen = analysis.chosen_fraction()
    lines = []
    for variant, device in dict.fromkeys(place[:2] for place in rows):
        of_line = [rows.get((variant, device, fraction)) for fraction in fractions]
        sizes = [_size(row) for row in of_line]
        row = rows.get((variant, device, chosen))
        peak_bytes = None if row is None else row.peak_bytes
        lines.append(
            {
                "variant": variant,
                "device": device,
                **{
                    f"{fraction:.0%}": size for fraction, size in zip(fractions, sizes, strict=True)
                },
                "peak GiB": "" if peak_bytes is None else f"{peak_bytes / GIB:.2f}",
                "samples/s": cell(row.samples_per_s if row else None, ",.1f"),
                "speed": cell(row.relative_speed if row else None, ".2f"),
            }
        )
    headings = [heading for heading in lines[0] if any(line[heading] for line in lines)]
    title = f"Maximum batch size, {mode}" + (f", {MARGIN_NOTE}" if lines[0]["device"] else "")
    cells = [[line[heading] for heading in headings] for line in lines]
    return table(title, headings, cells, left=("variant", "device"))


def _size(row: Row | None) -> str:
    if row is None or row.batch_size is not None:
        return "" if row is None else str(row.batch_size)
    return "failed" if row.limited_by == "failed" else "none"


def _notes(analysis: Analysis) -> list[str]:
    """Where nothing fits, what other than memory bounds a size, and which fraction the peaks are of."""
    rows = analysis.sorted_rows()
    has_sizes = any(row.batch_size is not None for row in rows)
    found = analysis.reasons if has_sizes else []  # otherwise the reasons are the command's error
    bounds: dict[tuple[Mode, str], dict[str, None]] = {}
    for row in rows:
        if row.batch_size is not None and row.limited_by not in (None, "memory", "failed"):
            bounds.setdefault((row.mode, row.limited_by or ""), {})[row.memory] = None
    for (mode, limit), places in bounds.items():
        found.append(f"{mode}: {limit}, not memory, bounds the size at {', '.join(places)}")
    if len({row.memory_fraction for row in rows}) > 1:
        found.append(f"peak and speed: at {analysis.chosen_fraction():.0%}")
    return found


def yaml_blocks(analysis: Analysis) -> str:
    """YAML with the sizes of the unchanged configuration to paste: one block for each device."""
    fraction, blocks = analysis.chosen_fraction(), dict[str, list[str]]()
    for row in analysis.sorted_rows():
        if (
            row.variant == CONFIGURED
            and row.memory_fraction == fraction
            and row.batch_size is not None
        ):
            heading = (
                f"# {row.memory}, {MARGIN_NOTE}" if row.device else f"# {row.memory} of the memory"
            )
            lines = blocks.setdefault(row.device, [heading, "DATA:"])
            lines.append(f"  {KEYS[row.mode]}: {row.batch_size}")
    return "\n\n".join("\n".join(lines) for lines in blocks.values())


# The picture.


def save_plot(analysis: Analysis, path: Path) -> None:
    """Draw the memory of the unchanged configuration, and write the picture."""
    modes = list(dict.fromkeys(row.mode for row in analysis.rows))
    environment = analysis.environment
    gib = environment["memory_limit_gb"] or environment["total_bytes"] / GIB
    title = f"{settings_sentence(environment)}; {environment['device']} with {gib:.3g} GiB"
    with drawing(path, title, analysis, analysis.columns, num_columns=len(modes)) as [places]:
        for axes, mode in zip(places, modes, strict=True):
            _memory_panel(analysis, mode, axes)
        # One legend below all panels, where it covers no point and no budget line.
        entries = [axes.get_legend_handles_labels() for axes in places]
        looks = {label: handle for each in entries for handle, label in zip(*each, strict=True)}
        places[0].figure.legend(
            looks.values(),
            looks.keys(),
            loc="outside lower center",
            ncols=1 + 2 * len(modes),
            frameon=False,
            fontsize=9,
        )


def _memory_panel(analysis: Analysis, mode: Mode, axes: Axes) -> None:
    """Measured peaks and the line through them, the budgets and the sizes chosen."""
    decorate(axes, f"{mode}: memory", "batch size", "peak memory (GiB)")
    rows = [row for row in analysis.sorted_rows() if row.mode == mode and row.variant == CONFIGURED]
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
    labels = [(height, f"{row.memory}: {_size(row)}") for height, row in budgets]
    label_heights(axes, labels, VERMILION)
