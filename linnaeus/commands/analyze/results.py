"""The results of an analysis, as objects and as plain data for files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.commands.analyze.breakdown import Breakdown
from linnaeus.commands.measure import Speeds
from linnaeus.commands.tables import Measurement


@dataclass(frozen=True)
class Remedy:
    """The measured effect of one change of the configuration on the memory of one size.

    Attributes:
        name: `bf16`, `gradient_checkpointing` or `accumulation`.
        keys: the changed keys and their new values.
        batch_size: micro-batch size with the change.
        peak_bytes_before: peak without the change, measured like the one with it.
        peak_bytes: peak with the change; None when it was skipped or did not fit.
        samples_per_s: speed with the change.
        reason: why there is no peak.
    """

    name: str
    keys: dict[str, Any]
    batch_size: int
    peak_bytes_before: int | None = None
    peak_bytes: int | None = None
    samples_per_s: float | None = None
    reason: str | None = None

    @property
    def saved_bytes(self) -> int | None:
        """Reduction of the peak; negative when it is higher."""
        if self.peak_bytes is None or self.peak_bytes_before is None:
            return None
        return self.peak_bytes_before - self.peak_bytes

    @property
    def saved_percent(self) -> float | None:
        """`saved_bytes` in percent of the peak without the change."""
        if self.saved_bytes is None or not self.peak_bytes_before:
            return None
        return 100 * self.saved_bytes / self.peak_bytes_before

    def as_dict(self) -> dict[str, Any]:
        """The entry of a file."""
        percent = None if self.saved_percent is None else round(self.saved_percent, 2)
        return {**asdict(self), "saved_bytes": self.saved_bytes, "saved_percent": percent}


@dataclass
class Row:
    """One mode at one fraction of the memory.

    Attributes:
        batch_size: the largest size that fits; None when none was found.
        certified: whether the next candidate ran and did not fit, or there is none.
        limited_by: as in `AutoBatchResult`, and `interrupted`.
        peak_bytes: peak of a trial at that size.
        budget_bytes: bytes that the process may hold.
        held_bytes: bytes that the process held between the trials.
        samples_per_s: speed at that size.
        trials: those run for this row; sizes measured for earlier rows are not repeated.
        reason: why there is no size.
        breakdown: parts of the peak.
        remedies: measured at that size, with `--remedies`.
    """

    mode: Mode
    memory_fraction: float
    batch_size: int | None = None
    certified: bool = False
    limited_by: str | None = None
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    held_bytes: int = 0
    samples_per_s: float | None = None
    trials: tuple[TrialRecord, ...] = ()
    reason: str | None = None
    breakdown: Breakdown | None = None
    remedies: list[Remedy] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """The entries that all files have."""
        return {
            "mode": self.mode,
            "memory_fraction": self.memory_fraction,
            "batch_size": self.batch_size,
            "certified": self.certified,
            "limited_by": self.limited_by,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
            "samples_per_s": None if self.samples_per_s is None else round(self.samples_per_s, 3),
        }

    def scalars(self) -> dict[str, Any]:
        """The row of a table: its figures, and the parts of the breakdown in bytes."""
        parts = self.breakdown.parts() if self.breakdown is not None else dict.fromkeys(PARTS)
        sizes = {f"{name}_bytes": num_bytes for name, num_bytes in parts.items()}
        return {**self.figures(), "num_trials": len(self.trials), **sizes}

    def as_dict(self) -> dict[str, Any]:
        """The entry of the JSON file."""
        return {
            **self.figures(),
            "trials": [trial.as_dict() for trial in self.trials],
            "reason": self.reason,
            "breakdown": self._breakdown(),
            "remedies": [remedy.as_dict() for remedy in self.remedies],
        }

    def _breakdown(self) -> dict[str, dict[str, float]] | None:
        if self.breakdown is None or not self.peak_bytes:
            return None
        return {
            name: {"bytes": num_bytes, "percent": round(100 * num_bytes / self.peak_bytes, 2)}
            for name, num_bytes in self.breakdown.parts().items()
        }


PARTS = tuple(Breakdown.__dataclass_fields__)


@dataclass
class Analysis(Measurement):
    """Sizes and speeds.

    Attributes:
        rows: in the order measured.
        speeds: of the sizes that were timed, by mode; the knee is known with `--throughput` only.
    """

    rows: list[Row] = field(default_factory=list)
    speeds: dict[Mode, Speeds] = field(default_factory=dict)

    @property
    def has_sizes(self) -> bool:
        """Whether any size was found."""
        return any(row.batch_size is not None for row in self.rows)

    @property
    def reasons(self) -> list[str]:
        """Why there is no size: for each mode at the largest fraction where nothing fits."""
        found: dict[Mode, str] = {}
        for row in self.rows:  # of each mode, the largest fraction comes first
            if row.reason is not None:
                found.setdefault(row.mode, row.reason)
        return list(found.values())

    def sorted_rows(self, mode: Mode | None = None) -> list[Row]:
        """The rows of one mode, or of all in the order measured; by fraction within a mode."""
        modes = list(self.speeds)
        rows = [row for row in self.rows if mode in (None, row.mode)]
        return sorted(rows, key=lambda row: (modes.index(row.mode), row.memory_fraction))

    @property
    def columns(self) -> list[str]:
        """Columns of the table."""
        return list(Row("train", 1.0).scalars())

    def scalars(self) -> list[dict[str, Any]]:
        """One row for each mode and fraction."""
        return [row.scalars() for row in self.sorted_rows()]

    def as_dict(self) -> dict[str, Any]:
        """Content of the JSON file."""
        throughput = {
            mode: {"knee": speeds.knee, "timings": [asdict(timing) for timing in speeds.ascending()]}
            for mode, speeds in self.speeds.items()
            if speeds.knee is not None
        }
        return {
            "environment": self.environment,
            "results": [row.as_dict() for row in self.sorted_rows()],
            **({"throughput": throughput} if throughput else {}),
            "interrupted": self.interrupted,
        }
