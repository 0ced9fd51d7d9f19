"""The message where no batch size fits: what was tried, the budget, and the settings that would help."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.observer import SearchLimits, gib
from linnaeus.autobatch.predict.gpus import ASSUMED_BASE_BYTES, device_that_would_do
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import TrialRecord
from linnaeus.autobatch.settings import Names


def nothing_fits(
    mode: Mode, limits: SearchLimits, device: torch.device, *, trials: Sequence[TrialRecord],
    limited_by: str, min_batch_size: int, held_bytes: int, outside: str, names: Names,
    predicted_bytes: int | None,
) -> str:  # fmt: skip
    """The message of a search without a result.

    Args:
        trials: all trials of the finder.
        limited_by: why the search ended.
        min_batch_size: the smallest size asked for; with BatchNorm, the smallest size tried may be larger.
        held_bytes: what the process holds between two trials.
        outside: says what is held outside the allocator.
        names: what the message calls the settings.
        predicted_bytes: what the process is predicted to hold with the smallest size; None if unknown.
    """
    settings = {"timeout": ("time", names.timeout_minutes), "max_trials": ("trials", names.max_trials)}
    what, setting = settings.get(limited_by, ("", ""))
    reason = f"the {what} ran out ({setting}) before a batch size fitted" if what else "no batch size fits"
    origin = f"({names.memory_limit_gb})" if limits.total_name else f"on {device}"
    sizes = limits.budget_bytes, limits.total_bytes, held_bytes
    budget, total, held = (f"{num_bytes / GIB:.2f} GiB" for num_bytes in sizes)
    others_bytes = int(limits.target_memory_fraction * limits.total_bytes) - limits.budget_bytes
    has_others = others_bytes > GIB // 100
    others = f", less {others_bytes / GIB:.2f} GiB for others or a cap of the allocator ({outside})"
    tried = ", ".join(f"{trial.size} ({_outcome(trial)})" for trial in trials)
    remedies = [f"raise {setting}"] if setting else []
    if held_bytes < limits.budget_bytes:  # else no size is small enough
        smallest = f"{names.min_batch_size} or " if min_batch_size > 1 else ""
        checkpointing = f"{names.checkpointing} or " if mode == "train" else ""
        remedies += [f"lower {smallest}{names.sample_size}", f"use {checkpointing}{names.half_precision}"]
    remedies.append(f"choose a smaller {names.model}")
    raised = [names.target_memory_fraction] if limits.target_memory_fraction < 1 else []
    raised += [names.memory_limit_gb] if limits.total_name else []
    if raised:
        remedies.append(f"raise {' or '.join(raised)}")
    if has_others:
        remedies.append(f"free memory on {device}")
    return (
        f"AutoBatch ({mode}): {reason}. Budget {budget} for this process: "
        f"{limits.target_memory_fraction:.0%} of {total} {origin}{others if has_others else ''}; "
        f"{held} are held before the first sample. Tried: {tried or 'nothing'}."
        f"{_predicted(limits, predicted_bytes)} What helps: {'; '.join(remedies)}."
    )


def _predicted(limits: SearchLimits, num_bytes: int | None) -> str:
    """What the smallest size would need, where that is known and more than the budget."""
    if num_bytes is None or num_bytes <= limits.budget_bytes:
        return ""
    needed = f" Batch size {limits.min_size} is predicted to need {num_bytes / GIB:.2f} GiB"
    if limits.total_name:
        return f"{needed}."
    device_bytes = (num_bytes + ASSUMED_BASE_BYTES) / limits.target_memory_fraction
    return f"{needed}: {device_that_would_do(device_bytes)}, with nothing else on it."


def _outcome(trial: TrialRecord) -> str:
    return trial.status if trial.peak_bytes is None else f"{trial.status}, {gib(trial.peak_bytes)} GiB"
