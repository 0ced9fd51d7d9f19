"""The result of a search, as an object and as an entry of `autobatch.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from linnaeus.autobatch.search import TrialRecord

Mode = Literal["train", "val"]


@dataclass(frozen=True)
class Timing:
    """Speed of one batch size.

    Attributes:
        batch_size: samples per rank and forward pass.
        seconds_per_step: median over the timed steps.
        samples_per_s: samples per second of one rank.
    """

    batch_size: int
    seconds_per_step: float
    samples_per_s: float


@dataclass(frozen=True)
class AutoBatchResult:
    """Result of a search: the batch size, the bound that limits it, and every trial.

    Attributes:
        mode: `train` or `val`.
        batch_size: the largest size that ran within the budget, or a smaller one that is about as fast.
        certified: the next candidate above the largest size that fits was run and does not fit, or there is
            no such candidate.
        within: upper bound of (largest size that may fit - size) / size, for the largest size that ran within
            the budget; 0.0 if certified.
        limited_by: why the size is not larger: `memory`, `kernel` (takes no larger size), `max_batch_size`,
            `dataset`, `effective_batch`, `host_memory`, `checkpoint` (a resumed run tries no more),
            `unread_samples` (unread samples may be larger), `max_trials` or `timeout`;
            `throughput` for a size below the largest that fits.
        target_memory_fraction: fraction of the device's memory that may be in use.
        budget_bytes: most bytes that this process may hold on the device.
        held_bytes: bytes that it held between two trials when the search ended; peaks contain them.
        total_bytes: the device's memory, or the limit set for it if that is less.
        strategy: name of the search strategy.
        seconds: duration of the search.
        trials: every trial, in order. The size found may be there twice: tried, and confirmed.
        timings: the sizes that were timed, ascending; empty unless the objective is throughput.
        ran_on_every_rank: the sizes that fit on every one of several ranks, which have all run them; `trials`
            has only the trials of rank 0.
        total_is_limit: whether `total_bytes` is the limit.
        tolerance: as requested, like the next three.
        multiple_of: as requested.
        min_batch_size: as requested.
        max_batch_size: as requested.
        fit: the attempts of `DATA.AUTOBATCH.FIT`, each with its remedy, the size found and the wanted one.
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
    held_bytes: int = 0
    timings: tuple[Timing, ...] = ()
    ran_on_every_rank: tuple[int, ...] = ()
    within: float = 0.0
    total_is_limit: bool = False
    tolerance: float | None = None
    multiple_of: int | None = None
    min_batch_size: int | None = None
    max_batch_size: int | None = None
    fit: tuple[dict[str, Any], ...] = ()

    @property
    def peaks_bytes(self) -> tuple[int, ...]:
        """Peak of each of rank 0's trials at the size found, in order."""
        trials = (trial for trial in self.trials if trial.size == self.batch_size)
        return tuple(trial.peak_bytes for trial in trials if trial.peak_bytes is not None)

    @property
    def peak_bytes(self) -> int | None:
        """Largest of `peaks_bytes`; None where an earlier search ran the size."""
        return max(self.peaks_bytes, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for `autobatch.json`."""
        content = asdict(self)
        del content["mode"]
        content["seconds"] = round(self.seconds, 3)
        content["trials"] = [trial.as_dict() for trial in self.trials]
        for name in ("timings", "ran_on_every_rank", "total_is_limit", "fit"):
            if not content[name]:
                del content[name]
        return {name: value for name, value in content.items() if value is not None}

    @classmethod
    def from_dict(cls, mode: Mode, entry: Mapping[str, Any]) -> AutoBatchResult:
        """Read the result of `as_dict`."""
        trials = tuple(
            TrialRecord(trial["batch_size"], trial["status"], trial["peak_bytes"], trial["seconds"])
            for trial in entry["trials"]
        )
        timings = tuple(Timing(**timing) for timing in entry.get("timings", ()))
        ran = tuple(entry.get("ran_on_every_rank", ()))
        changed: dict[str, Any] = {"trials": trials, "timings": timings, "ran_on_every_rank": ran}
        changed["fit"] = tuple(entry.get("fit", ()))
        return cls(mode=mode, **{**entry, **changed})
