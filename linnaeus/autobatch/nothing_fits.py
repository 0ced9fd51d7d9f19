"""The error where no batch size fits: what was tried, the budget, and the settings that would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.memory.interface import DeviceMemory
from linnaeus.autobatch.names import Names
from linnaeus.autobatch.observer import SearchLimits, gib
from linnaeus.autobatch.predict.gpus import ASSUMED_BASE_BYTES, device_that_would_do
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord

MODEL_GROWTH = 4
"""With gradients and two moments for each parameter, a model takes up to this many times its own size."""


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
        state_bytes: the part of it that model, optimizer and average held before the search.
        outside: says what is held outside the allocator.
        names: what the message calls the settings.
        predicted_bytes: what the process is predicted to hold with the smallest size; None if unknown.
    """

    mode: Mode
    limits: SearchLimits
    memory: DeviceMemory
    trials: Sequence[TrialRecord]
    limited_by: str
    min_batch_size: int
    held_bytes: int
    state_bytes: int
    outside: str
    names: Names
    predicted_bytes: int | None = None

    def __str__(self) -> str:
        limits, fraction = self.limits, f"{self.limits.target_memory_fraction:.0%}"
        tried = ", ".join(f"{trial.size} ({_outcome(trial)})" for trial in self.trials)
        reason = "no batch size fits"
        if self._ran_out:
            what, setting = self._ran_out
            reason = f"the {what} ran out ({setting}) before a batch size fitted"
        name = self.names.memory_limit_gb if limits.total_is_limit else limits.total_name
        origin = f" ({name})" if name else f" on {self.memory.device}"
        sizes = limits.budget_bytes, limits.total_bytes, self.held_bytes
        budget, total, held = (f"{num_bytes / GIB:.2f} GiB" for num_bytes in sizes)
        cap = self._own_cap()
        others = "" if cap else self._used_by_others()
        return (
            f"AutoBatch ({self.mode}): {reason}. Budget {budget} for this process: {fraction} of "
            f"{total}{origin}{cap}{others}; {held} are held before the first sample. "
            f"Tried: {tried or 'nothing'}.{self._predicted(cap)} "
            f"What helps: {'; '.join(self._remedies(are_others=bool(others)))}."
        )

    def _predicted(self, cap: str) -> str:
        """What the smallest size would need, where that is known and more than the budget.

        Args:
            cap: says that the allocator's own cap bounds the budget; a larger device would not change it.
        """
        limits = self.limits
        if self.predicted_bytes is None or self.predicted_bytes <= limits.budget_bytes:
            return ""
        needed = f" Batch size {limits.min_size} is predicted to need {self.predicted_bytes / GIB:.2f} GiB"
        if cap or limits.total_is_limit:
            return f"{needed}."
        device_bytes = (self.predicted_bytes + ASSUMED_BASE_BYTES) / limits.target_memory_fraction
        return f"{needed}: {device_that_would_do(device_bytes)}, with nothing else on it."

    @property
    def _ran_out(self) -> tuple[str, str] | None:
        """What ran out, and the setting for it, where the search has ended early."""
        settings = {
            "timeout": ("time", self.names.timeout_minutes), "max_trials": ("trials", self.names.max_trials)
        }  # fmt: skip
        return settings.get(self.limited_by)

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

    @property
    def _is_full(self) -> bool:
        """What is held before the first sample is the whole budget: no sample is small enough."""
        return self.held_bytes >= self.limits.budget_bytes

    def _remedies(self, *, are_others: bool) -> Iterator[str]:
        """What the user can do so that a size fits; only what would have an effect here."""
        names = self.names
        if self._ran_out:
            yield f"raise {self._ran_out[1]}"
        if not self._is_full:
            sizes = [names.min_batch_size] if self.min_batch_size > 1 else []
            yield f"lower {' or '.join([*sizes, names.sample_size])}"
            checkpointing = [names.checkpointing] if self.mode == "train" else []
            yield f"use {' or '.join([*checkpointing, names.half_precision])}"
        raised = list(self._raised())
        if self._model_matters or not (raised or are_others):
            yield f"choose a smaller {names.model}"
        if raised:
            yield f"raise {' or '.join(raised)}"
        if are_others:
            yield f"free memory on {self.memory.device}"

    @property
    def _model_matters(self) -> bool:
        """Whether the process would hold less than the budget with the smallest of models."""
        return self.held_bytes - MODEL_GROWTH * self.state_bytes < self.limits.budget_bytes

    def _raised(self) -> Iterator[str]:
        """The settings of the budget that leave room for samples if raised, with the value to exceed."""
        limits, fraction = self.limits, self.limits.target_memory_fraction
        missing_bytes = max(self.held_bytes - limits.budget_bytes, 0)
        needed = fraction + missing_bytes / limits.total_bytes
        limit_bytes = limits.total_bytes if limits.total_is_limit else None
        if fraction < 1 and needed <= 0.99 and self._leaves_room(1.0, limit_bytes):
            yield self.names.target_memory_fraction + (f" above {_ceil(needed)}" if self._is_full else "")
        if limits.total_is_limit and self._leaves_room(fraction, None):
            needed_gb = self.held_bytes / fraction / GIB
            yield self.names.memory_limit_gb + (f" above {_ceil(needed_gb)}" if self._is_full else "")

    def _leaves_room(self, fraction: float, limit_bytes: int | None) -> bool:
        return self.memory.budget(fraction, limit_bytes) > self.held_bytes


def _ceil(number: float) -> str:
    """Two decimals, rounded up."""
    return f"{math.ceil(number * 100) / 100:.2f}"


def _outcome(trial: TrialRecord) -> str:
    return trial.status if trial.peak_bytes is None else f"{trial.status}, {gib(trial.peak_bytes)} GiB"
