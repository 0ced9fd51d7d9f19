"""What a search found, as an object and as the entry of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from linnaeus.autobatch.search import TrialRecord

Mode = Literal["train", "val"]


@dataclass(frozen=True)
class Timing:
    """How fast one size runs.

    Attributes:
        batch_size: the size.
        seconds_per_step: median.
        samples_per_s: of one process.
    """

    batch_size: int
    seconds_per_step: float
    samples_per_s: float


@dataclass(frozen=True)
class AutoBatchResult:
    """What a search found.

    Attributes:
        mode: `train` or `val`.
        batch_size: the largest size that ran within the budget, or a smaller one that is about as fast.
        certified: the candidate after the largest that fits ran and did not fit, or there is none.
        limited_by: `memory`, `max_batch_size`, `dataset`, `effective_batch`, `host_memory`, `max_trials` or
            `timeout`; `throughput` for a size below the largest.
        target_memory_fraction: fraction of the device's memory that may be in use.
        budget_bytes: what this process may hold on the device.
        total_bytes: the device's memory.
        strategy: how sizes were chosen.
        seconds: length of the search.
        trials: every trial, in order.
        timings: the sizes that were timed, ascending; none where the objective is memory.
    """

    mode: Mode
    batch_size: int
    certified: bool
    limited_by: str
    target_memory_fraction: float
    budget_bytes: int
    total_bytes: int
    strategy: str
    seconds: float
    trials: tuple[TrialRecord, ...]
    timings: tuple[Timing, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the last trial at the size found; None where an earlier search of the finder ran it."""
        peaks = [trial.peak_bytes for trial in self.trials if trial.size == self.batch_size]
        return peaks[-1] if peaks else None

    def as_dict(self) -> dict[str, Any]:
        """The entry of `autobatch.json`."""
        timings = {"timings": [asdict(timing) for timing in self.timings]} if self.timings else {}
        return {
            "batch_size": self.batch_size,
            "certified": self.certified,
            "limited_by": self.limited_by,
            "target_memory_fraction": self.target_memory_fraction,
            "budget_bytes": self.budget_bytes,
            "total_bytes": self.total_bytes,
            "strategy": self.strategy,
            "seconds": round(self.seconds, 3),
            "trials": [
                {
                    "batch_size": trial.size,
                    "status": trial.status,
                    "peak_bytes": trial.peak_bytes,
                    "seconds": round(trial.seconds, 3),
                }
                for trial in self.trials
            ],
            **timings,
        }

    @classmethod
    def from_dict(cls, mode: Mode, entry: Mapping[str, Any]) -> AutoBatchResult:
        """The inverse of `as_dict`."""
        trials = tuple(
            TrialRecord(trial["batch_size"], trial["status"], trial["peak_bytes"], trial["seconds"])
            for trial in entry["trials"]
        )
        timings = tuple(Timing(**timing) for timing in entry.get("timings", ()))
        return cls(mode=mode, **{**entry, "trials": trials, "timings": timings})
