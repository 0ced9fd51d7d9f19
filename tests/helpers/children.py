"""Python command lines in processes of their own."""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
limit_s = 230.0
"""How long a test waits for processes and threads: a little less than pytest lets it last."""


class Outcome(NamedTuple):
    """How a command line ended; negative codes are signals."""

    code: int
    out: str
    err: str

    def ok(self):
        """The outcome of a command line that must succeed."""
        assert self.code == 0, self.out + self.err
        return self


class Process(subprocess.Popen):
    """A running command line, which is killed when nothing refers to its object."""

    def __del__(self):
        if hasattr(self, "pid"):
            self.kill()
            self.wait()


def start(argv, *, cwd, env=None, stdout, stderr, new_session=False):
    """Start `python *argv`, with changes to this process's environment and files for its output."""
    return Process(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
    )


def python(*argv, cwd, env=None):
    """Run `python *argv` to its end.

    Raises:
        AssertionError: it takes longer than `limit_s` seconds; it is killed, and its output shown.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(argv, cwd=cwd, env=env, stdout=stdout, stderr=stderr)
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
        process.kill()
        for file in (stdout, stderr):
            file.seek(0)
        out, err = stdout.read(), stderr.read()
        assert process.returncode is not None, f"still there after {limit_s} s:\n{out}\n{err}"
        return Outcome(process.returncode, out, err)
