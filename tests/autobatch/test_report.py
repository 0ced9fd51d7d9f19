"""The sentence that a run prints about each search."""

from __future__ import annotations

from typing import Any

import pytest

from linnaeus.autobatch.report import summary
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.autobatch.search import Status, TrialRecord, find_largest
from linnaeus.memory.device import GIB


def trial(size: int, status: Status = "fits") -> TrialRecord:
    return TrialRecord(size, status, None if status == "oom" else size, 0.5)


def result(*trials: TrialRecord, mode: Mode = "train", **more: Any) -> AutoBatchResult:
    fields: dict[str, Any] = {"batch_size": 16, "certified": False, "limited_by": "max_trials"} | more
    return AutoBatchResult(
        mode=mode, target_memory_fraction=0.8, budget_bytes=GIB, total_bytes=2 * GIB, strategy="guided",
        seconds=0.9, trials=trials, **fields,
    )  # fmt: skip


def test_one_trial_and_several() -> None:
    assert "; 1 trial in 0.9 s, " in summary(result(trial(16)))
    assert "; 2 trials in 0.9 s, " in summary(result(trial(16), trial(32, "oom")))


def test_without_a_larger_trial_there_is_no_bound_to_report() -> None:
    """A search of one trial knows nothing about the 31 times as many sizes above it."""
    found = find_largest(lambda n: n, budget_bytes=100, min_size=1, max_size=512, start=16, max_trials=1)
    assert (found.size, found.within) == (16, 31.0)
    sentence = summary(result(*found.trials, within=found.within))
    assert "limited by MAX_TRIALS, not certified (no larger size was tried); " in sentence
    assert "%" not in sentence


def test_a_larger_trial_that_failed_bounds_the_largest_size() -> None:
    close = summary(result(trial(16), trial(20, "oom"), within=3 / 16))
    assert "not certified (the largest is at most 18.8% larger)" in close
    far = summary(result(trial(16), trial(129, "oom"), within=7.0))
    assert "not certified (the largest is at most 8 times as large)" in far


def test_what_is_certified_needs_no_bound() -> None:
    assert "the memory budget, certified; " in summary(
        result(trial(16), trial(17, "over"), certified=True, limited_by="memory")
    )


@pytest.mark.parametrize(("mode", "key"), [("train", "MAX_BATCH_SIZE"), ("val", "MAX_BATCH_SIZE_VAL")])
def test_the_key_that_limits_is_that_of_the_mode(mode: Mode, key: str) -> None:
    sentence = summary(result(trial(16), mode=mode, certified=True, limited_by="max_batch_size"))
    assert f"limited by {key}, " in sentence
