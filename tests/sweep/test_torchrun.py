"""The torchrun of the launchers: what somebody has stopped ends without a traceback."""

import signal
from pathlib import Path

from linnaeus.sweep import torchrun
from tests.helpers import children
from tests.helpers.runs import wait_until

PROGRAM = """
import ctypes, pathlib, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives torchrun
pathlib.Path("begun").touch()
signal.pause()
"""


def test_a_run_that_is_stopped_ends_without_a_traceback(tmp_path):
    """It is stopped as soon as it says that it has begun."""
    (tmp_path / "program.py").write_text(PROGRAM)
    log = tmp_path / "log.txt"
    command = ["-m", torchrun.__name__, "--standalone", "--nproc-per-node=1", "program.py"]
    with log.open("w") as output:
        process = children.start(command, cwd=tmp_path, stdout=output, stderr=output)
    wait_until((tmp_path / "begun").exists, process, log)
    # Before torchrun sleeps between two looks at its processes, it may lose the signal.
    wait_until(lambda: "nanosleep" in Path(f"/proc/{process.pid}/wchan").read_text(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(50) == 128 + signal.SIGTERM, log.read_text()
    assert "Traceback" not in log.read_text()
