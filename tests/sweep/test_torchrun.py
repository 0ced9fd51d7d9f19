"""The torchrun of the launchers: what somebody has stopped ends without a traceback, what fails as ever."""

import signal
from pathlib import Path

import pytest

from linnaeus.sweep import torchrun
from tests.helpers import forks
from tests.helpers.runs import wait_until

pytestmark = pytest.mark.distributed

PROGRAM = """
import ctypes, pathlib, signal, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives torchrun
begun = pathlib.Path("begun")
if len(sys.argv) == 1:
    raise SystemExit(3)
if sys.argv[1] == "saves":
    signal.signal(signal.SIGTERM, lambda *_: None)
begun.touch()
signal.pause()
time.sleep(35)
pathlib.Path("saved").touch()
"""
"""Fails without an argument; with `waits` it ends with SIGTERM, with `saves` 35 s later."""


def run(module, folder, *words, timeout=50):
    """The exit code and the output of the program, which is stopped as soon as it says that it has begun."""
    (folder / "program.py").write_text(PROGRAM)
    command = ["-m", module, "--standalone", "--nproc-per-node=1", "program.py", *words]
    with (folder / "log.txt").open("w") as log:
        process = forks.start(command, cwd=folder, stdout=log, stderr=log)
    if words:
        wait_until((folder / "begun").exists, process, folder / "log.txt")
        # Before torchrun sleeps between two looks at its processes, it may lose the signal.
        wait_until(lambda: "nanosleep" in Path(f"/proc/{process.pid}/wchan").read_text(), process)
        process.send_signal(signal.SIGTERM)
    return process.wait(timeout), (folder / "log.txt").read_text()


def test_a_run_that_is_stopped_ends_without_a_traceback(tmp_path):
    code, said = run(torchrun.__name__, tmp_path, "waits")
    assert code == 128 + signal.SIGTERM, said
    assert "Traceback" not in said


@pytest.mark.e2e
def test_a_run_that_fails_is_told_as_ever(tmp_path):
    code, said = run(torchrun.__name__, tmp_path)
    assert code == 1
    assert "ChildFailedError" in said


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("module", "saved"), [(torchrun.__name__, True), ("torch.distributed.run", False)]
)
def test_a_checkpoint_may_take_longer_than_torchruns_own_30_s(module, saved, tmp_path):
    _, said = run(module, tmp_path, "saves", timeout=100)
    assert (tmp_path / "saved").exists() == saved, said
