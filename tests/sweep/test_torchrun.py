"""The torchrun of the launchers: what somebody has stopped ends without a traceback, what fails as ever."""

import signal
from pathlib import Path

import pytest

from linnaeus.sweep import torchrun
from tests.helpers import children
from tests.helpers.runs import wait_until

PROGRAM = """
import ctypes, pathlib, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives torchrun
begun = pathlib.Path("begun")
if len(sys.argv) == 1:
    raise SystemExit(3)
begun.touch()
signal.pause()
"""
"""Fails without an argument; with one it ends with SIGTERM."""


def run(module, folder, *words):
    """The exit code and the output of the program, which is stopped as soon as it says that it has begun."""
    (folder / "program.py").write_text(PROGRAM)
    command = ["-m", module, "--standalone", "--nproc-per-node=1", "program.py", *words]
    with (folder / "log.txt").open("w") as log:
        process = children.start(command, cwd=folder, stdout=log, stderr=log)
    if words:
        wait_until((folder / "begun").exists, process, folder / "log.txt")
        # Before torchrun sleeps between two looks at its processes, it may lose the signal.
        wait_until(lambda: "nanosleep" in Path(f"/proc/{process.pid}/wchan").read_text(), process)
        process.send_signal(signal.SIGTERM)
    return process.wait(50), (folder / "log.txt").read_text()


def test_a_run_that_is_stopped_ends_without_a_traceback(tmp_path):
    code, said = run(torchrun.__name__, tmp_path, "waits")
    assert code == 128 + signal.SIGTERM, said
    assert "Traceback" not in said


@pytest.mark.e2e
def test_a_run_that_fails_is_told_as_ever(tmp_path):
    code, said = run(torchrun.__name__, tmp_path)
    assert code == 1
    assert "ChildFailedError" in said
