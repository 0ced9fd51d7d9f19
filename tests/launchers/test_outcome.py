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
    "content",
    [
        "{}", "1", "[]", "{", '{"exit_code": 1}', '{"exit_code": "0", "seconds": 1}',
        '{"exit_code": 0, "seconds": null}',
        '{"exit_code": 1, "seconds": 1, "reason": 3}', '{"exit_code": 0, "seconds": 1, "result": 3}',
    ],
)  # fmt: skip
def test_a_damaged_outcome_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / OUTCOME).write_text(content)
    assert read_outcome(tmp_path) is None
    (tmp_path / RESULT).write_text('{"metrics": {}}')
    assert read_outcome(tmp_path) == Outcome(0, 0.0, None, {"metrics": {}})


def test_an_outcome_of_another_version_is_read(tmp_path: Path) -> None:
    (tmp_path / OUTCOME).write_text('{"exit_code": 1, "seconds": 2, "machine": "node7"}')
    assert read_outcome(tmp_path) == Outcome(1, 2)


@pytest.mark.parametrize("seconds", [None, "1", [1]])
def test_a_result_with_odd_seconds_is_a_result(tmp_path: Path, seconds: object) -> None:
    (tmp_path / RESULT).write_text(json.dumps({"training_s": seconds}))
    outcome = read_outcome(tmp_path)
    assert outcome is not None
    assert (outcome.finished, outcome.seconds) == (True, 0.0)


def test_a_run_that_was_stopped_without_a_word(tmp_path: Path) -> None:
    assert outcome_of(tmp_path, 130, 1.0).reason == "stopped before its first checkpoint"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.pt").touch()
    assert outcome_of(tmp_path, 130, 1.0).reason == "stopped after a checkpoint"
    (tmp_path / "logs").mkdir()
    (tmp_path / OUTPUT).write_text("epoch 1\nstopped by SIGTERM at step 3\nsrun: error: node7\n")
    assert outcome_of(tmp_path, 130, 1.0).reason == "stopped by SIGTERM at step 3"
    assert last_line(tmp_path) == "stopped by SIGTERM at step 3"


@pytest.mark.parametrize(
    ("exit_code", "name", "is_interrupted"),
    [
        (-signal.SIGSEGV, "SIGSEGV", False), (-signal.SIGABRT, "SIGABRT", False), (-37, "signal 37", False),
        (-signal.SIGKILL, "SIGKILL, often for lack of host memory", True), (-signal.SIGTERM, "SIGTERM", True),
        (-signal.SIGHUP, "SIGHUP", True),
    ],
)  # fmt: skip
def test_a_crash_is_a_failure_and_being_ended_is_none(
    tmp_path: Path, exit_code: int, name: str, is_interrupted: bool
) -> None:
    outcome = outcome_of(tmp_path, exit_code, 1.0)
    assert (outcome.reason, outcome.was_interrupted) == (f"ended by {name}", is_interrupted)


def test_a_run_that_somebody_has_finished_by_hand(tmp_path: Path) -> None:
    (tmp_path / OUTCOME).write_text('{"exit_code": 130, "seconds": 1}')
    (tmp_path / RESULT).write_text('{"training_s": 5}')
    for name, written, other in ((OUTCOME, 130, RESULT), (RESULT, 0, OUTCOME)):
        os.utime(tmp_path / name, (20, 20))
        os.utime(tmp_path / other, (10, 10))
        outcome = read_outcome(tmp_path)
        assert outcome is not None
        assert outcome.exit_code == written, f"{name} is the later one"
