"""The results of an analysis, as objects and as plain data for files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.cli.analyze.options import CONFIGURED
from linnaeus.cli.tables import Figures
from linnaeus.training.out_of_memory import StateBytes


@dataclass
class Breakdown(StateBytes):
    """The parts of a peak, in bytes; they add up to it.

    Attributes:
        activations: the peak less all other parts: activations, the batch, workspaces of kernels.
        rest: all else that the process holds between steps: runtime and libraries on the CPU, workspaces and
            rounding of the caching allocator on an accelerator.
    """

    activations: int = 0
    rest: int = 0


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
        samples_per_s: speed of one process at that size; None if predicted.
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
    breakdown: Breakdown | None = None
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
        if self.batch_size is None:
            return "failed" if self.limited_by == "failed" else "none"
        return str(self.batch_size)

    def figures(self) -> dict[str, Any]:
        """The entries that all files have."""
        left_out = {"trials", "breakdown"}
        if not self.device:
            left_out |= {"device", "device_bytes", "base_bytes", "size_without_margin"}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def as_dict(self) -> dict[str, Any]:
        """The entry of the JSON file."""
        return {
            **self.figures(),
            "trials": [trial.as_dict() for trial in self.trials],
            "breakdown": None if self.breakdown is None else asdict(self.breakdown),
        }


@dataclass
class Analysis(Figures):
    """Sizes and speeds; filled while they are measured, so that an interruption loses nothing.

    Attributes:
        environment: where the figures hold; empty until there is something to measure.
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
        rows = sorted(self.rows, key=lambda row: -row.memory_fraction)
        found: dict[tuple[str, str, str], str] = {}
        for row in rows:
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
        fractions: Collection[float] = {row.memory_fraction for row in self.rows}
        return self.fraction if self.fraction in fractions else max(fractions, default=1.0)

    def compare_speeds(self) -> None:
        """Fill `relative_speed` of all rows."""
        places = {(row.mode, row.memory_fraction, row.variant): row for row in self.rows}
        for row in self.rows:
            first = places.get((row.mode, row.memory_fraction, CONFIGURED))
            if row.samples_per_s and first is not None and first.samples_per_s:
                row.relative_speed = row.samples_per_s / first.samples_per_s

    def scalars(self) -> list[dict[str, Any]]:
        """One row for each mode, variant, device and fraction."""
        rows = []
        for row in self.sorted_rows():
            parts = asdict(row.breakdown or Breakdown())
            sizes = {
                f"{name}_bytes": row.breakdown and num_bytes for name, num_bytes in parts.items()
            }
            rows.append({**row.figures(), "num_trials": len(row.trials), **sizes})
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        return {
            "environment": self.environment,
            "results": [row.as_dict() for row in self.sorted_rows()],
            "interrupted": self.interrupted,
        }
