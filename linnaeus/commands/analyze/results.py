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
    """The measured or predicted effect of one change of the configuration on the memory of one size.

    Attributes:
        name: `bf16`, `gradient_checkpointing` or `accumulation`; if predicted, `optimizer` and `image_size`
            too.
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


@dataclass(frozen=True)
class Predicted:
    """What a row has that was predicted and not measured.

    Attributes:
        device: name of the GPU, or its memory, such as `24 GiB`.
        device_bytes: its memory.
        margin: factor on the predicted peak, under which nearly all measured peaks are.
        safe_batch_size: the largest size whose peak times the margin fits; None when there is none.
    """

    device: str
    device_bytes: int
    margin: float
    safe_batch_size: int | None = None

    def figures(self) -> dict[str, Any]:
        """The entries that all files have."""
        return {"predicted": True, **asdict(self)}


@dataclass
class Row:
    """One mode at one fraction of the memory.

    Attributes:
        batch_size: the largest size that fits; None when none was found.
        certified: whether the next candidate ran and did not fit, or there is none.
        limited_by: as in `AutoBatchResult`, and `interrupted`.
        peak_bytes: peak of a trial at that size; if predicted, that of the device, with its base.
        budget_bytes: bytes that the process may hold; if predicted, bytes of the device that may be in use.
        held_bytes: bytes that the process held between the trials.
        samples_per_s: speed at that size.
        trials: those run for this row; sizes measured for earlier rows are not repeated.
        reason: why there is no size.
        breakdown: parts of the peak.
        remedies: at that size, with `--remedies`.
        predicted: what a predicted row has beside these; None for a measured one.
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
    predicted: Predicted | None = None

    @property
    def device(self) -> str:
        """Name of the device that a prediction is for; empty if measured, on the one device that there is."""
        return "" if self.predicted is None else self.predicted.device

    @property
    def memory(self) -> str:
        """The part of the memory, for people: `90%`, or `90% of rtx-4090`."""
        share = f"{self.memory_fraction:.0%}"
        return f"{share} of {self.device}" if self.device else share

    @property
    def safe_size(self) -> int | None:
        """The size to configure: the measured one, or the one predicted with the margin."""
        return self.batch_size if self.predicted is None else self.predicted.safe_batch_size

    def figures(self) -> dict[str, Any]:
        """The entries that all files have."""
        return {
            **({} if self.predicted is None else self.predicted.figures()),
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
        curves: predicted peaks, as (batch size, bytes), by mode; empty where sizes were measured.
    """

    rows: list[Row] = field(default_factory=list)
    speeds: dict[Mode, Speeds] = field(default_factory=dict)
    curves: dict[Mode, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def is_predicted(self) -> bool:
        """Whether the figures are predicted."""
        return any(row.predicted is not None for row in self.rows)

    @property
    def has_sizes(self) -> bool:
        """Whether any size was found."""
        return any(row.batch_size is not None for row in self.rows)

    @property
    def reasons(self) -> list[str]:
        """Why there is no size: for each mode and device at the largest fraction where nothing fits."""
        found: dict[tuple[Mode, str], str] = {}
        for row in self.rows:  # of each mode, the largest fraction comes first
            if row.reason is not None:
                found.setdefault((row.mode, row.device), row.reason)
        return list(dict.fromkeys(found.values()))

    def sorted_rows(self, mode: Mode | None = None) -> list[Row]:
        """The rows of one mode, or of all in the order measured; by device and fraction within a mode."""
        modes, devices = list(self.speeds), self.devices
        rows = [row for row in self.rows if mode in (None, row.mode)]
        return sorted(
            rows, key=lambda row: (modes.index(row.mode), devices.index(row.device), row.memory_fraction)
        )

    @property
    def devices(self) -> list[str]:
        """The devices that predictions are for, in the order asked for; one without a name if measured."""
        return list(dict.fromkeys(row.device for row in self.rows))

    @property
    def columns(self) -> list[str]:
        """Columns of the table."""
        rows = self.scalars()
        return list(rows[0] if rows else Row("train", 1.0).scalars())

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
        curves = {
            mode: [{"batch_size": size, "peak_bytes": peak_bytes} for size, peak_bytes in curve]
            for mode, curve in self.curves.items()
        }
        return {
            "environment": self.environment,
            "results": [row.as_dict() for row in self.sorted_rows()],
            **({"throughput": throughput} if throughput else {}),
            **({"curves": curves} if curves else {}),
            "interrupted": self.interrupted,
        }
