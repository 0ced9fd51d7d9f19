"""How a run ended, as its files say."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from linnaeus.files import OUTCOME, RESULT
from linnaeus.launchers.outcome import OUTPUT, Outcome, last_line, outcome_of, read_outcome


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"exit_code": 1}', '{"exit_code": 1, "seconds": 1, "reason": 3}']
)
def test_a_damaged_outcome_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / OUTCOME).write_text(content)
    assert read_outcome(tmp_path) is None
    for seconds in (None, "1", 7.0):  # the first two are odd, and the result counts all the same
        (tmp_path / RESULT).write_text(json.dumps(result := {"training_s": seconds}))
        assert read_outcome(tmp_path) == Outcome(0, 7.0 if seconds == 7.0 else 0.0, None, result)


def test_the_reason_is_what_the_run_has_said_last(folder: Path) -> None:
    assert not outcome_of(folder, 0, 1.0).finished, "there is no result"
    before = outcome_of(folder, 130, 1.0).reason
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/last.pt").touch()
    assert outcome_of(folder, 130, 1.0).reason != before, "a checkpoint makes a difference"
    stopped = "stopped by SIGTERM at step 3"
    (folder / OUTPUT).write_text(f"epoch 1\n{stopped}\nsrun: error: node7\n")
    assert outcome_of(folder, 130, 1.0).reason == last_line(folder) == stopped


@pytest.mark.parametrize(
    ("exit_code", "name", "is_interrupted"),
    [(-signal.SIGSEGV, "SIGSEGV", False), (-37, "37", False), (-signal.SIGKILL, "SIGKILL", True),
     (-signal.SIGTERM, "SIGTERM", True), (-signal.SIGHUP, "SIGHUP", True)],
)  # fmt: skip
def test_a_crash_is_a_failure_and_being_ended_is_none(
    tmp_path: Path, exit_code: int, name: str, is_interrupted: bool
) -> None:
    outcome = outcome_of(tmp_path, exit_code, 1.0)
    assert name in str(outcome.reason)
    assert outcome.was_interrupted == is_interrupted


def test_a_run_that_somebody_has_finished_by_hand(tmp_path: Path) -> None:
    (tmp_path / OUTCOME).write_text('{"exit_code": 130, "seconds": 1}')
    (tmp_path / RESULT).write_text('{"training_s": 5}')
    for name, written, other in ((OUTCOME, 130, RESULT), (RESULT, 0, OUTCOME)):
        os.utime(tmp_path / name, (20, 20))
        os.utime(tmp_path / other, (10, 10))
        outcome = read_outcome(tmp_path)
        assert outcome is not None
        assert outcome.exit_code == written, f"{name} is the later one"
