"""The template of the tests' child processes outlives the processes that use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import wait_until

DIES_AT_ONCE = """
import os, signal, socket, sys
from pathlib import Path
from tests.helpers import forks

pid = Path(sys.argv[1])
with open(os.devnull, "w") as nothing:
    program = f"import os, pathlib, signal; pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))"
    program += "; signal.pause()"
    forks.start(["-c", program], cwd=pid.parent, stdout=nothing, stderr=nothing)
    while not pid.exists() or not pid.read_text():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_client_that_is_killed_ends_its_forks_alone(tmp_path: Path) -> None:
    assert forks.python("-c", "print(1)", cwd=tmp_path).out == "1\n"
    pid = tmp_path / "pid"
    client = subprocess.run(
        [sys.executable, "-c", DIES_AT_ONCE, pid], env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False, timeout=50,
    )  # fmt: skip
    assert client.returncode == -9
    wait_until(lambda: not Path(f"/proc/{pid.read_text()}").exists())
    assert forks.python("-c", "print(2)", cwd=tmp_path).out == "2\n"
