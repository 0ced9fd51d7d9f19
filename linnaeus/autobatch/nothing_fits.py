"""The error where no batch size fits: what was tried, the budget, and the keys that would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from linnaeus.autobatch.observer import SearchLimits, gib
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.memory.device import GIB
from linnaeus.memory.interface import DeviceMemory

_REASONS = {"timeout": ("time", "TIMEOUT_MINUTES"), "max_trials": ("trials", "MAX_TRIALS")}
"""What ran out, and its key, where a search has ended early."""


@dataclass(frozen=True)
class NothingFits:
    """A search without a result; `str` gives the message.

    Attributes:
        mode: `train` or `val`.
        limits: bounds and budget of the search.
        memory: the device's memory.
        trials: all trials of the finder.
        limited_by: why the search ended.
        min_batch_size: the smallest size asked for; with BatchNorm, the smallest size tried may be larger.
        held_bytes: what the process holds between two trials.
        outside: says what is held outside the allocator.
    """

    mode: Mode
    limits: SearchLimits
    memory: DeviceMemory
    trials: Sequence[TrialRecord]
    limited_by: str
    min_batch_size: int
    held_bytes: int
    outside: str

    def __str__(self) -> str:
        limits, fraction = self.limits, f"{self.limits.target_memory_fraction:.0%}"
        tried = ", ".join(f"{trial.size} ({_outcome(trial)})" for trial in self.trials)
        reason = "no batch size fits"
        if self.limited_by in _REASONS:
            what, key = _REASONS[self.limited_by]
            reason = f"the {what} ran out (DATA.AUTOBATCH.{key}) before a batch size fitted"
        key = " (DATA.AUTOBATCH.MEMORY_LIMIT_GB)" if limits.total_is_limit else f" on {self.memory.device}"
        sizes = limits.budget_bytes, limits.total_bytes, self.held_bytes
        budget, total, held = (f"{num_bytes / GIB:.2f} GiB" for num_bytes in sizes)
        cap = self._own_cap()
        others = "" if cap else self._used_by_others()
        return (
            f"AutoBatch ({self.mode}): {reason}. Budget {budget} for this process: {fraction} of {total}{key}"
            f"{cap}{others}; {held} are held before the first sample. Tried: {tried or 'nothing'}. "
            f"What helps: {'; '.join(self._remedies(are_others=bool(others)))}."
        )

    def _own_cap(self) -> str:
        """A cap that the caller has set, where it bounds the budget."""
        # Nothing but a cap bounds twice the device: what others use may change between two readings.
        cap_bytes = self.memory.budget(2.0, None)
        if cap_bytes >= self.memory.total_bytes or cap_bytes > self.limits.budget_bytes:
            return ""
        return f", and no more than the {cap_bytes / GIB:.2f} GiB of the allocator's own cap"

    def _used_by_others(self) -> str:
        limits = self.limits
        others_bytes = int(limits.target_memory_fraction * limits.total_bytes) - limits.budget_bytes
        if others_bytes <= GIB // 100:
            return ""
        return f", less {others_bytes / GIB:.2f} GiB that others use ({self.outside})"

    def _remedies(self, *, are_others: bool) -> Iterator[str]:
        """What the user can do so that a size fits; only what would have an effect here."""
        suffix = "_VAL" if self.mode == "val" else ""
        if self.limited_by in _REASONS:
            yield f"raise DATA.AUTOBATCH.{_REASONS[self.limited_by][1]}"
        if self.held_bytes < self.limits.budget_bytes:  # otherwise no sample is small enough
            sizes = [f"DATA.AUTOBATCH.MIN_BATCH_SIZE{suffix}"] if self.min_batch_size > 1 else []
            yield f"lower {' or '.join([*sizes, 'DATA.IMG_SIZE'])}"
            checkpointing = ["TRAIN.GRADIENT_CHECKPOINTING True"] if self.mode == "train" else []
            yield f"set {' or '.join([*checkpointing, 'TRAIN.AMP bf16'])}"
        yield "choose a smaller MODEL.NAME"
        can_rise = self.limits.target_memory_fraction < 1
        raised = [f"DATA.AUTOBATCH.TARGET_MEMORY_FRACTION{suffix}"] if can_rise else []
        raised += ["DATA.AUTOBATCH.MEMORY_LIMIT_GB"] if self.limits.total_is_limit else []
        if raised:
            yield f"raise {' or '.join(raised)}"
        if are_others:
            yield f"free memory on {self.memory.device}"


def _outcome(trial: TrialRecord) -> str:
    return trial.status if trial.peak_bytes is None else f"{trial.status}, {gib(trial.peak_bytes)} GiB"
