"""The results of an analysis, as objects and as plain data for files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.cli.analyze.breakdown import Breakdown
from linnaeus.cli.measure import Speeds
from linnaeus.cli.tables import Measurement


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
        safe_batch_size: with the change, the largest micro-batch size predicted to fit with the margin; None
            where it was measured, or none fits.
    """

    name: str
    keys: dict[str, Any]
    batch_size: int
    peak_bytes_before: int | None = None
    peak_bytes: int | None = None
    samples_per_s: float | None = None
    reason: str | None = None
    safe_batch_size: int | None = None

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
        safe_peak_bytes: peak at that size, without the margin.
        memory_limit_gb: `DATA.AUTOBATCH.MEMORY_LIMIT_GB` where it bounds the budget, else None.
    """

    device: str
    device_bytes: int
    margin: float
    safe_batch_size: int | None = None
    safe_peak_bytes: int | None = None
    memory_limit_gb: float | None = None

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
        notes: sentences on the size for people.
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
    notes: list[str] = field(default_factory=list)
    breakdown: Breakdown | None = None
    remedies: list[Remedy] = field(default_factory=list)
    predicted: Predicted | None = None

    @property
    def device(self) -> str:
        """Name of the device that a prediction is for; empty if measured, on the one device that there is."""
        return "" if self.predicted is None else self.predicted.device

    @property
    def share(self) -> str:
        """The part of the memory, for people: `90%`, or `90% of 2 GiB limit` where a limit bounds it."""
        limit_gb = None if self.predicted is None else self.predicted.memory_limit_gb
        return f"{self.memory_fraction:.0%}" + ("" if limit_gb is None else f" of {limit_gb:g} GiB limit")

    @property
    def memory(self) -> str:
        """The part and of what: `90%`, `90% of rtx-4090` or `90% of 2 GiB limit on rtx-4090`."""
        if self.predicted is None:
            return self.share
        return f"{self.share} {'of' if self.predicted.memory_limit_gb is None else 'on'} {self.device}"

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
            "notes": self.notes,
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


def limit_words(environment: Mapping[str, Any]) -> str:
    """What `DATA.AUTOBATCH.MEMORY_LIMIT_GB` does in a prediction, to follow the names of the devices."""
    limit_gb = environment["memory_limit_gb"]
    if limit_gb is None:
        return ""
    needed_bytes = limit_gb * GIB + environment["base_bytes"]
    if all(needed_bytes >= device["total_bytes"] for device in environment["devices"]):
        return f" (the limit of {limit_gb:g} GiB is above that and bounds nothing)"
    return f", each process limited to {limit_gb:g} GiB"


PARTS = tuple(Breakdown.__dataclass_fields__)
SETTINGS = ("model", "precision", "optimizer", "image_size", "base_bytes", "base")
"""What each row of a table says of the environment."""


@dataclass
class Analysis(Measurement):
    """Sizes and speeds.

    Attributes:
        rows: in the order measured.
        speeds: of the sizes that were timed, by mode; the knee is known with `--throughput` only.
        curves: predicted peaks, as (batch size, bytes), by mode; empty where sizes were measured.
        is_shown: whether all but the remedies has been shown.
    """

    rows: list[Row] = field(default_factory=list)
    speeds: dict[Mode, Speeds] = field(default_factory=dict)
    curves: dict[Mode, list[tuple[int, int]]] = field(default_factory=dict)
    is_shown: bool = False

    @property
    def is_predicted(self) -> bool:
        """Whether the figures are predicted."""
        return any(row.predicted is not None for row in self.rows)

    @property
    def has_sizes(self) -> bool:
        """Whether any size was found."""
        return any(row.batch_size is not None for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """What there is to say of sizes, each once."""
        return list(dict.fromkeys(note for row in self.sorted_rows() for note in row.notes))

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

    def one_per_device(self, rows: Sequence[Row]) -> list[Row]:
        """For tables with a line or column per row: of several devices, each one's largest fraction."""
        if len(self.devices) == 1:
            return list(rows)
        return [row for row in rows if row.memory_fraction == max(row.memory_fraction for row in rows)]

    @property
    def columns(self) -> list[str]:
        """Columns of the table."""
        rows = self.scalars()
        return list(rows[0] if rows else self._row(Row("train", 1.0)))

    def scalars(self) -> list[dict[str, Any]]:
        """One row for each mode and fraction."""
        return [self._row(row) for row in self.sorted_rows()]

    def _row(self, row: Row) -> dict[str, Any]:
        """A row, and what it holds for; without lists."""
        found = {name: self.environment[name] for name in SETTINGS if name in self.environment}
        if found.get("image_size") is not None:
            found["image_size"] = "x".join(map(str, found["image_size"]))
        return {**row.scalars(), "reason": row.reason, **found}

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
