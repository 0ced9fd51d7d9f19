"""The template of the tests' child processes outlives the processes that use it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.helpers import forks
from tests.helpers.runs import wait_until

WAITS = (
    "import os, pathlib, signal; pathlib.Path('pid').write_text(str(os.getpid())); signal.pause()"
)


def test_a_client_that_is_killed_ends_its_fork_alone(tmp_path):
    assert forks.python("-c", "print(1)", cwd=tmp_path).out == "1\n"
    client = subprocess.Popen([sys.executable, forks.__file__, "-c", WAITS], cwd=tmp_path)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    client.kill()
    assert client.wait(forks.limit_s) == -9
    wait_until(lambda: not Path("/proc", (tmp_path / "pid").read_text()).exists())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[forks.ADDRESS])  # a client that dies before it has asked
    assert forks.python("-c", "print(2); raise SystemExit(3)", cwd=tmp_path)[:2] == (3, "2\n")
