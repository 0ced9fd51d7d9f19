"""What a user sees on the terminal when a process with loader workers is interrupted."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import wait_until
from tests.helpers.small_runs import PLAIN


@pytest.mark.e2e
def test_interrupted_processes_end_quietly(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    argv = ["-W", "error", "-m", "linnaeus.main", *PLAIN, "DATA.NUM_WORKERS=2", "TRAIN.EPOCHS=100000"]
    with log.open("w") as file:
        process = forks.start(
            argv, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stdout=file, stderr=file, finalize=True,
            new_session=True,  # Ctrl-C reaches all processes of the terminal's group, workers too
        )  # fmt: skip
    wait_until((tmp_path / "runs/plain/metrics.jsonl").exists, process, log)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(50) == 130
    assert not re.search("Traceback|Exception|Error|Warning", log.read_text())
