"""Python command lines in processes that are forks of one process with the heavy modules loaded.

A new interpreter takes seconds of CPU time to import torch and timm; a fork takes milliseconds. The process
that is forked, the template, only imports: it starts no threads and computes nothing. A fork is a real
process with its own signals, environment, working directory, limits and memory. It differs from a new
interpreter in two ways: the modules are loaded already, and all forks hash strings alike.

`start` and `python` are for the tests. `python tests/helpers/children.py ...` stands for `python ...` where a
program wants an interpreter's path, as pytest-xdist does for its workers.
"""

import atexit
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import suppress
from itertools import pairwise
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MESSAGE_BYTES = 1 << 20
limit_s = 230.0
"""How long a test waits for processes and threads: a little less than pytest lets it last."""

ADDRESS = "LINNAEUS_TESTS_TEMPLATE"
"""The environment variable with the path of the socket that the template of this test run listens at."""


# The side of the tests.


class Outcome(NamedTuple):
    """How a command line ended; negative codes are signals."""

    code: int
    out: str
    err: str

    def ok(self):
        """The outcome of a command line that must succeed."""
        assert self.code == 0, self.out + self.err
        return self


class _Connection(socket.socket):
    """Closes without a warning when nothing refers to it, and so ends its process."""

    def __del__(self):
        self.close()


class Process:
    """A running command line, with the methods of `subprocess.Popen` that the tests need.

    It is killed when its object, or the process that has started it, is gone.
    """

    def __init__(self, connection):
        self.returncode = None
        self._connection = connection
        self.pid = self._receive()

    def poll(self):
        """The exit code, None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout):
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after so many seconds.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = self._receive()
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
        return self.returncode

    def send_signal(self, number):
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def _receive(self):
        message = b""
        with suppress(ConnectionResetError):
            message = self._connection.recv(100)
        assert message, "the template of the child processes has died"
        return int(message)


def share_template():
    """Start a template that this process and those that it starts use; it ends with this process."""
    folder = tempfile.TemporaryDirectory()  # only this user may enter it
    address = str(Path(folder.name) / "template")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        template = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.children", "serve", str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # which closes when this process ends, and that ends the template
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches the tests alone
        )
    os.environ[ADDRESS] = address
    atexit.register(folder.cleanup)
    atexit.register(template.communicate)


def start(
    argv,
    *,
    cwd,
    env=None,
    stdin=None,
    stdout,
    stderr,
    new_session=False,
    finalize=False,
    children_fork=True,
):
    """Start what `python *argv` would run.

    Args:
        argv: what follows the interpreter's name; of its options only `-u`, `-W`, `-c` and `-m` are known.
        cwd: working directory.
        env: changes to this process's environment.
        stdin: an open file; without it nothing can be read.
        stdout: an open file.
        stderr: an open file.
        new_session: lead a session, so that `os.killpg` reaches the process and its children.
        finalize: take the interpreter down as a new process does, which takes a second.
        children_fork: Python programs that the process starts are forks of it in place of new interpreters.
    """
    request = {
        "argv": [str(token) for token in argv],
        "cwd": str(cwd),
        "env": {**os.environ, **(env or {})},
        "new_session": new_session,
        "finalize": finalize,
        "children_fork": children_fork,
    }
    if ADDRESS not in os.environ:
        share_template()
    connection = _Connection(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.environ[ADDRESS])
    with Path(os.devnull).open() as nothing:
        streams = [stream.fileno() for stream in (stdin or nothing, stdout, stderr)]
        socket.send_fds(connection, [json.dumps(request).encode()], streams)
        return Process(connection)


def python(*argv, cwd, env=None):
    """Run what `python *argv` would run, to its end.

    Raises:
        AssertionError: it takes longer than `limit_s` seconds; it is killed, and its output shown.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(argv, cwd=cwd, env=env, stdout=stdout, stderr=stderr)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            process.kill()
        for file in (stdout, stderr):
            file.seek(0)
        out, err = stdout.read(), stderr.read()
        assert process.returncode is not None, f"still there after {limit_s} s:\n{out}\n{err}"
        return Outcome(process.returncode, out, err)


# The template.


def serve(listener):
    """Fork a keeper for each connection until standard input closes. Returns in the keepers' forks."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        try:
            connection, _ = listener.accept()
        except ConnectionError:  # the client has died
            continue
        if os.fork() == 0:
            listener.close()
            return keep(connection)
        connection.close()
        with suppress(ChildProcessError):  # the keepers that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def keep(connection):
    """Start one process, kill it when the connection closes, and say how it has ended. Returns in it."""
    message = b""
    with suppress(ConnectionError):
        message, descriptors, *_ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
    if not message:  # the client has died
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    if pid == 0:
        connection.close()
        request = json.loads(message)
        return request
    with suppress(OSError):  # the client has died
        connection.send(str(pid).encode())
    if connection in select.select([connection, os.pidfd_open(pid)], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.send(str(code).encode())
    os._exit(0)


def become(request, path):
    """Take on the session, directory, environment, search path and command line of a new process."""
    if request["new_session"]:
        os.setsid()
    atexit.register(gc.unfreeze)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    os.chdir(request["cwd"])
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    os.environ.update(request["env"])
    tempfile.tempdir = None  # the imports have asked for the template's
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv[:] = request["argv"]
    if sys.argv[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
    if sys.argv[0] == "-u":
        del sys.argv[0]
    sys.modules[
        "numpy"
    ].random.seed()  # random does so by itself, and torch begins with a fixed seed


def execute():
    """Run the command line in `sys.argv` as the interpreter does."""
    while sys.argv[0] == "-W":
        warnings.simplefilter(sys.argv[1])
        del sys.argv[:2]
    kind, *rest = sys.argv
    if kind == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(rest[0], None)  # else runpy warns that it is loaded
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        text, sys.argv[:] = rest[0], ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(text, "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


class ForkingPopen(subprocess.Popen):
    """Lets Python programs that a fork starts be forks too: the ranks of torchrun, the runs of a sweep."""

    search_path = None
    """The interpreter's own search path; None starts new interpreters."""

    def __init__(self, args, **options):
        if self.search_path is not None and args[0] == sys.executable and "-c" not in args:
            request = {
                "argv": args[1:],
                "cwd": ".",
                "env": dict(options.get("env") or os.environ),
                "new_session": False,
            }
            kept = [2, *sorted(options.get("pass_fds", ())), os.sysconf("SC_OPEN_MAX")]
            sys.stdout.flush()
            sys.stderr.flush()
            options["preexec_fn"] = lambda: run_in_place_of_exec(request, kept)
        super().__init__(args, **options)


def run_in_place_of_exec(request, kept):
    """Run a command line in a child that has its streams, folder and session, with few open files."""
    gc.enable()
    for before, after in pairwise(kept):
        os.closerange(before + 1, after)
    run_to_the_end(request, ForkingPopen.search_path)


def run_to_the_end(request, path):
    """Run a command line and end the process, without going back to the frames below this one.

    Those are the template's, or those of a process that started this one and may not go on in two places.
    """
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        atexit._clear()  # what the parent wants done at its end
        atexit.register(util._exit_function)
        atexit.register(logging.shutdown)
        become(request, path)
        try:
            execute()
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            if isinstance(ending.code, str):
                print(ending.code, file=sys.stderr)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


PRELOADED = (
    "linnaeus.run",
    "linnaeus.main",
    "torch.distributed.run",
    "matplotlib.figure",
    "pytest",
    "hypothesis",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.utils.serialization.config",
    "antlr4.LL1Analyzer",
    "rich._emoji_codes",
    "encodings.idna",
    "wandb",
    "sklearn.linear_model",
)
"""The last ones are modules that the others would import later."""


def main():
    if sys.argv[1] != "serve":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        streams = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
        return start(sys.argv[1:], cwd=Path.cwd(), children_fork=False, **streams).wait(None)
    listener = socket.socket(fileno=int(sys.argv[2]))
    own = {str(ROOT), ""}
    path = [folder for folder in sys.path if folder not in own]
    subprocess.Popen = ForkingPopen
    for name in PRELOADED:
        importlib.import_module(name)
    # torchrun names its methods in a log through `inspect`, which takes seconds with so many modules.
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda *_: "method"
    # A fork that takes its interpreter down would delete the folder that all of them share.
    shared = importlib.import_module("wandb.sdk.data_types._private").MEDIA_TMP
    shared._finalizer.detach()
    atexit.unregister(shared.cleanup)
    gc.collect()
    gc.freeze()  # collections in the forks leave these pages alone
    request = serve(listener)
    if request["children_fork"]:
        ForkingPopen.search_path = path
    if not request["finalize"]:
        run_to_the_end(request, path)
    become(request, path)
    execute()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
