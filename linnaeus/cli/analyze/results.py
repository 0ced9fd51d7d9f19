"""The results of an analysis: objects, files, and the table for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.prediction import MARGIN
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.cli.analyze.options import CONFIGURED, MODES
from linnaeus.cli.tables import cell, save_figures, table

_TEXTS = "mode", "variant", "device", "limited by"
"""Columns of texts."""


@dataclass
class Row:
    """One variant in one mode at one fraction of the memory.

    Attributes:
        variant: the changed setting; `CONFIGURED` without a change.
        batch_size: the maximum batch size, if predicted with the margin; None when nothing fits.
        certified: whether the next candidate ran and did not fit, or there is none.
        limited_by: as in `AutoBatchResult`; `interrupted`; `failed` for a variant that cannot run.
        peak_bytes: peak at that size; if predicted, the device's peak including its base.
        budget_bytes: bytes that the process may hold; if predicted, bytes of the device that may be in use.
        samples_per_s: speed of one rank at that size; None if predicted.
        relative_speed: that speed over the speed of the unchanged configuration.
        trials: those run for this row; sizes measured for earlier rows are not repeated.
        reason: why there is no size.
        device: GPU that the row is predicted for, or its memory, such as `24 GiB`; empty if measured.
        size_without_margin: the maximum batch size predicted without the margin.
        img_size: the largest side of the images for this batch size; None where the batch size was searched.
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
    size_without_margin: int | None = None
    img_size: int | None = None

    @property
    def memory(self) -> str:
        """The fraction with its device: `90%`, or `90% of rtx-4090`."""
        return f"{self.memory_fraction:.0%}" + (f" of {self.device}" if self.device else "")

    @property
    def size(self) -> str:
        """The batch size for people; with its upper bound if predicted."""
        if self.batch_size is None:
            return "none"
        if self.img_size is not None:
            return f"{self.img_size} pixels"
        bounds = dict.fromkeys((self.batch_size, self.size_without_margin or self.batch_size))
        return " to ".join(map(str, bounds))

    def figures(self) -> dict[str, Any]:
        """Return the entries that all files have."""
        return {name: value for name, value in vars(self).items() if name != "trials"}


@dataclass
class Analysis:
    """Sizes and speeds; filled while they are measured, so that an interruption loses nothing.

    Attributes:
        environment: where the results hold; empty until there is something to measure.
        interrupted: whether Ctrl-C or an error ended the measuring early.
        rows: in the order measured.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = True
    rows: list[Row] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Reasons why there is no size, each once, starting with the largest fraction."""
        found: dict[tuple[str, str, str], str] = {}
        for row in sorted(self.rows, key=lambda row: -row.memory_fraction):
            if row.reason is not None:
                found.setdefault((row.mode, row.device, row.variant), row.reason)
        return list(dict.fromkeys(found.values()))

    def sorted_rows(self) -> list[Row]:
        """Return the rows by mode, variant and device, each in the requested order, and fraction."""
        places = list(dict.fromkeys((row.variant, row.device) for row in self.rows))
        return sorted(
            self.rows,
            key=lambda row: (
                MODES.index(row.mode),
                places.index((row.variant, row.device)),
                row.memory_fraction,
            ),
        )

    def compare_speeds(self) -> None:
        """Fill `relative_speed` of all rows."""
        places = {(row.mode, row.memory_fraction, row.variant): row for row in self.rows}
        for row in self.rows:
            first = places[row.mode, row.memory_fraction, CONFIGURED].samples_per_s
            if row.samples_per_s and first:
                row.relative_speed = row.samples_per_s / first

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
        """Print the maximum batch size at each fraction; its peak and speed are at the largest one."""
        rows = self.sorted_rows()
        lines: dict[tuple[str, str, str], dict[str, str]] = {}
        for row in rows:  # by ascending fraction: the entry of the largest one stays
            names = {"mode": row.mode, "variant": row.variant, "device": row.device}
            line = lines.setdefault((row.mode, row.variant, row.device), names)
            peak = None if row.peak_bytes is None else row.peak_bytes / GIB
            line |= {
                f"{row.memory_fraction:.0%}": row.size,
                "peak GiB": cell(peak, ".2f"),
                "samples/s": cell(row.samples_per_s, ",.1f"),
                "speed": cell(row.relative_speed, ".2f"),
                "limited by": row.limited_by or "",
            }
        fractions = [f"{part:.0%}" for part in sorted({row.memory_fraction for row in rows})]
        columns = [*_TEXTS[:3], *fractions, "peak GiB", "samples/s", "speed", "limited by"]
        headings = [name for name in columns if any(line.get(name) for line in lines.values())]
        cells = [[line.get(name, "") for name in headings] for line in lines.values()]
        how = f", predicted with and without {MARGIN - 1:.0%} margin" if rows[0].device else ""
        sides = [row.batch_size for row in rows if row.img_size is not None]
        what = f"Largest side of {sides[0]} images" if sides else "Maximum batch size"
        title = f"{what}{how}; the last columns are at {fractions[-1]}"
        console.print(table(title, headings, cells, left=_TEXTS))
        if any(row.batch_size is not None for row in rows):  # else it is the command's error
            for reason in self.reasons:
                console.print(reason, soft_wrap=True)

    def too_small(self, required: int) -> list[str]:
        """Name the devices whose largest fraction does not hold the required size."""
        most = max(row.memory_fraction for row in self.rows)
        rows = [
            row for row in self.rows if (row.variant, row.memory_fraction) == (CONFIGURED, most)
        ]
        return [
            f"--require: {required} {'samples do' if required > 1 else 'sample does'} not fit in "
            f"{row.memory}, {row.mode}: {row.size}, limited by {row.limited_by or 'memory'}"
            for row in rows
            if row.mode == rows[0].mode and (row.batch_size or 0) < required
        ]
