"""An analysis for people: the table of each mode, what to know of it, and YAML to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.prediction import MARGIN
from linnaeus.autobatch.result import Mode
from linnaeus.cli.analyze.options import CONFIGURED
from linnaeus.cli.analyze.results import Analysis
from linnaeus.cli.tables import cell, table

if TYPE_CHECKING:
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
        sizes = ["" if row is None else row.size for row in of_line]
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
