"""The results of an analysis: objects, files, the table of each mode, and YAML to paste."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.prediction import MARGIN
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.cli.analyze.options import CONFIGURED
from linnaeus.cli.tables import cell, save_figures, table

KEYS = {"train": "BATCH_SIZE", "val": "BATCH_SIZE_VAL"}
MARGIN_NOTE = f"predicted with {100 * (MARGIN - 1):.3g} % margin"


@dataclass
class Row:
    """One variant in one mode at one fraction of the memory.

    Attributes:
        variant: what is changed; `CONFIGURED` if nothing is.
        batch_size: the maximum batch size, if predicted with the margin; None when nothing fits.
        certified: whether the next candidate ran and did not fit, or there is none.
        limited_by: as in `AutoBatchResult`; `interrupted`; `failed` for a variant that cannot run.
        peak_bytes: peak at that size; if predicted, that of the device, with its base.
        budget_bytes: bytes that the process may hold; if predicted, bytes of the device that may be in use.
        samples_per_s: speed of one rank at that size; None if predicted.
        relative_speed: that speed over the speed of the unchanged configuration.
        trials: those run for this row; sizes measured for earlier rows are not repeated.
        reason: why there is no size.
        device: GPU that the row is predicted for, or its memory, such as `24 GiB`; empty if measured.
        base_bytes: in use on that device beside the allocator.
        size_without_margin: the maximum batch size predicted without the margin.
    """

    mode: Mode
    memory_fraction: float
    variant: str = CONFIGURED
    batch_size: int | None = None
    certified: bool = False
    limited_by: str | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    samples_per_s: float | None = None
    relative_speed: float | None = None
    trials: tuple[TrialRecord, ...] = ()
    reason: str | None = None
    device: str = ""
    device_bytes: int = 0
    base_bytes: int = 0
    size_without_margin: int | None = None

    @property
    def memory(self) -> str:
        """The fraction and of what: `90%`, or `90% of rtx-4090`."""
        return f"{self.memory_fraction:.0%}" + (f" of {self.device}" if self.device else "")

    @property
    def size(self) -> str:
        """The batch size for people."""
        return cell(self.batch_size, "d") or ("failed" if self.limited_by == "failed" else "none")

    def figures(self) -> dict[str, Any]:
        """The entries that all files have."""
        left_out = {"trials"}
        if not self.device:
            left_out |= {"device", "device_bytes", "base_bytes", "size_without_margin"}
        return {name: value for name, value in vars(self).items() if name not in left_out}


@dataclass
class Analysis:
    """Sizes and speeds; filled while they are measured, so that an interruption loses nothing.

    Attributes:
        environment: where the results hold; empty until there is something to measure.
        interrupted: whether Ctrl-C or an error ended the measuring early.
        fraction: that of the sizes to paste, where it is among those asked for.
        rows: in the order measured.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = True
    fraction: float = 0.8
    rows: list[Row] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Why there is no size, each reason once, that of the largest fraction first."""
        found: dict[tuple[str, str, str], str] = {}
        for row in sorted(self.rows, key=lambda row: -row.memory_fraction):
            if row.reason is not None:
                found.setdefault((row.mode, row.device, row.variant), row.reason)
        return list(dict.fromkeys(found.values()))

    def sorted_rows(self) -> list[Row]:
        """The rows by mode, variant and device, each in the order asked for, and fraction."""
        places = {(row.mode, row.variant, row.device): n for n, row in enumerate(self.rows)}
        modes = list(dict.fromkeys(row.mode for row in self.rows))
        return sorted(
            self.rows,
            key=lambda row: (
                modes.index(row.mode),
                places[row.mode, row.variant, row.device],
                row.memory_fraction,
            ),
        )

    def chosen_fraction(self) -> float:
        """The fraction of the sizes to paste: `fraction`, else the largest."""
        fractions = {row.memory_fraction for row in self.rows}
        return self.fraction if self.fraction in fractions else max(fractions, default=1.0)

    def compare_speeds(self) -> None:
        """Fill `relative_speed` of all rows."""
        places = {(row.mode, row.memory_fraction, row.variant): row for row in self.rows}
        for row in self.rows:
            first = places.get((row.mode, row.memory_fraction, CONFIGURED))
            if row.samples_per_s and first is not None and first.samples_per_s:
                row.relative_speed = row.samples_per_s / first.samples_per_s

    def save(self, path: Path) -> None:
        """Write the results; the ending is the format. Only JSON has the trials."""
        rows = self.sorted_rows()
        trials = [[trial.as_dict() for trial in row.trials] for row in rows]
        found = zip(rows, trials, strict=True)
        content = {
            "environment": self.environment,
            "results": [{**row.figures(), "trials": of_row} for row, of_row in found],
            "interrupted": self.interrupted,
        }
        table_rows = [{**row.figures(), "num_trials": len(row.trials)} for row in rows]
        save_figures(path, content, table_rows)

    def show(self, console: Console) -> None:
        """Print the table of each mode, with its notes, and YAML to paste."""
        for mode in dict.fromkeys(row.mode for row in self.rows):
            self._show_sizes(mode, console)
        parts = self._notes()
        if text := self.yaml_blocks():
            parts.append(f"To paste into a configuration:\n\n{text}")
        for part in parts:
            console.print(part, soft_wrap=True)

    def _show_sizes(self, mode: Mode, console: Console) -> None:
        """Print a line for each variant and device: maximum batch size at each fraction, and its speed."""
        rows = [row for row in self.sorted_rows() if row.mode == mode]
        lines: dict[tuple[str, str], dict[str, str]] = {}
        chosen = self.chosen_fraction()
        for row in rows:
            names = {"variant": row.variant, "device": row.device}
            line = lines.setdefault((row.variant, row.device), names)
            line[f"{row.memory_fraction:.0%}"] = row.size
        for row in rows:
            if row.memory_fraction == chosen:
                peak = None if row.peak_bytes is None else row.peak_bytes / GIB
                lines[row.variant, row.device] |= {
                    "peak GiB": cell(peak, ".2f"),
                    "samples/s": cell(row.samples_per_s, ",.1f"),
                    "speed": cell(row.relative_speed, ".2f"),
                }
        found = list(lines.values())
        headings = [name for name in found[0] if any(line.get(name) for line in found)]
        title = f"Maximum batch size, {mode}" + (f", {MARGIN_NOTE}" if rows[0].device else "")
        cells = [[line.get(name, "") for name in headings] for line in found]
        console.print(table(title, headings, cells, left=("variant", "device")))

    def _notes(self) -> list[str]:
        """Where nothing fits, what other than memory bounds a size, and which fraction the peaks are of."""
        rows = self.sorted_rows()
        has_sizes = any(row.batch_size is not None for row in rows)
        found = self.reasons if has_sizes else []  # otherwise the reasons are the command's error
        bounds: dict[tuple[Mode, str], dict[str, None]] = {}
        for row in rows:
            if row.batch_size is not None and row.limited_by not in (None, "memory", "failed"):
                bounds.setdefault((row.mode, row.limited_by), {})[row.memory] = None
        for (mode, limit), places in bounds.items():
            found.append(f"{mode}: {limit}, not memory, bounds the size at {', '.join(places)}")
        if len({row.memory_fraction for row in rows}) > 1:
            found.append(f"peak and speed: at {self.chosen_fraction():.0%}")
        return found

    def yaml_blocks(self) -> str:
        """YAML with the sizes of the unchanged configuration to paste: one block for each device."""
        chosen = (CONFIGURED, self.chosen_fraction())
        blocks: dict[str, str] = {}
        for row in self.sorted_rows():
            if (row.variant, row.memory_fraction) == chosen and row.batch_size is not None:
                origin = f", {MARGIN_NOTE}" if row.device else " of the memory"
                block = blocks.setdefault(row.device, f"# {row.memory}{origin}\nDATA:")
                blocks[row.device] = f"{block}\n  {KEYS[row.mode]}: {row.batch_size}"
        return "\n\n".join(blocks.values())
