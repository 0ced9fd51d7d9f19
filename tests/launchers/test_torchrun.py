"""The torchrun of the launchers: what somebody has stopped ends without a traceback, what fails as ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from linnaeus.launchers import torchrun
from tests.helpers.runs import wait_until

pytestmark = pytest.mark.distributed

WAITS = "import pathlib, time; pathlib.Path('began').touch(); time.sleep(60)"


def start(module: str, code: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(code)
    command = [sys.executable, "-m", module, "--standalone", "--nproc-per-node=1", "program.py"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("module", "exit_code"), [(torchrun.__name__, 128 + signal.SIGTERM), ("torch.distributed.run", 1)]
)
def test_stopped_by_a_signal(module: str, exit_code: int, tmp_path: Path) -> None:
    process = start(module, WAITS, tmp_path)
    wait_until((tmp_path / "began").exists)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == exit_code, said
    assert ("Traceback" in said) == (exit_code == 1), said


def test_failed(tmp_path: Path) -> None:
    process = start(torchrun.__name__, "raise SystemExit(3)", tmp_path)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ChildFailedError" in said


SAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
pathlib.Path("began").touch()
signal.pause()
pathlib.Path("timeout").write_text(" ".join(sys.argv))
time.sleep(35)
pathlib.Path("saved").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("module", "saved"), [(torchrun.__name__, True), ("torch.distributed.run", False)])
def test_a_checkpoint_may_take_longer_than_torchruns_own_30_s(
    module: str, saved: bool, tmp_path: Path
) -> None:
    process = start(module, SAVES, tmp_path)
    wait_until((tmp_path / "began").exists)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert (tmp_path / "saved").exists() == saved, said
