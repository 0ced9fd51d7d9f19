"""Python command lines in processes that are forks of one process with the heavy modules loaded.

A new interpreter takes seconds of CPU time to import torch and timm; a fork takes milliseconds. The process
that is forked, the template, only imports: it starts no threads and computes nothing. A fork is a real
process with its own signals, environment, working directory, limits and memory. It differs from a new
interpreter in two ways: the modules are loaded already, and all forks hash strings alike.

`python -m tests.helpers.forks` is the template; `start` and `python` are for the tests.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).parents[2]
MESSAGE_BYTES = 1 << 20

ADDRESS = "LINNAEUS_TESTS_TEMPLATE"
"""The environment variable with the path of the socket that the template of this test run listens at."""


# The side of the tests.


class Outcome(NamedTuple):
    """How a command line ended; negative codes are signals."""

    code: int
    out: str
    err: str


class Process:
    """A running command line, with the methods of `subprocess.Popen` that the tests need."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template

    def poll(self) -> int | None:
        """The exit code, None while the process runs."""
        if self.returncode is None:
            self.returncode = self._template.exit_code(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after so many seconds.
        """
        if self.returncode is None:
            self.returncode = self._template.exit_code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that is forked, seen from the tests."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)
        self._codes: dict[int, int] = {}

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> Process:
        """Fork a process; `descriptors` become its standard streams."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        while True:
            answer = self._receive()
            if "code" not in answer:
                return Process(self, answer["pid"])

    def exit_code(self, pid: int, timeout: float) -> int | None:
        """The exit code of a fork; None while it runs, for at least `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while pid not in self._codes:
            self._socket.settimeout(max(deadline - time.monotonic(), 0))
            try:
                self._receive()
            except (BlockingIOError, TimeoutError):
                return None
            finally:
                self._socket.settimeout(None)
        return self._codes[pid]

    def _receive(self) -> dict[str, int]:
        """The next answer: the process that was forked, or how one has ended."""
        message = self._socket.recv(MESSAGE_BYTES)
        assert message, "the template of the child processes has died"
        answer: dict[str, int] = json.loads(message)
        if "code" in answer:
            self._codes[answer["pid"]] = answer["code"]
        return answer


def share_template() -> None:
    """Start a template that this process and those that it starts use; it ends with this process."""
    folder = tempfile.TemporaryDirectory()  # only this user may enter it
    address = str(Path(folder.name) / "template")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        template = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.forks", str(listener.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # which closes when this process ends, and that ends the template
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches the tests alone
        )
    os.environ[ADDRESS] = address
    atexit.register(folder.cleanup)
    atexit.register(template.communicate)


@functools.cache
def _template() -> Template:
    if ADDRESS not in os.environ:
        share_template()
    return Template(os.environ[ADDRESS])


def start(
    argv: Sequence[str | Path],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any],
    stderr: IO[Any],
    new_session: bool = False,
    finalize: bool = False,
) -> Process:
    """Start what `python *argv` would run.

    Args:
        argv: what follows the interpreter's name; of its options only `-W`, `-c` and `-m` are known.
        cwd: working directory.
        env: changes to this process's environment.
        stdout: an open file.
        stderr: an open file.
        new_session: lead a session, so that `os.killpg` reaches the process and its children.
        finalize: take the interpreter down as a new process does, which takes a second.
    """
    request = {
        "argv": [str(token) for token in argv], "cwd": str(cwd), "env": {**os.environ, **(env or {})},
        "new_session": new_session, "finalize": finalize,
    }  # fmt: skip
    with Path(os.devnull).open() as stdin:
        return _template().start(request, [stdin.fileno(), stdout.fileno(), stderr.fileno()])


def python(
    *argv: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 240
) -> Outcome:
    """Run what `python *argv` would run, to its end.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout` seconds; it is killed.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = start(argv, cwd=cwd, env=env, stdout=stdout, stderr=stderr)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for file in (stdout, stderr):
            file.seek(0)
        return Outcome(code, stdout.read(), stderr.read())


# The template.


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork a process for each request, and say how it ends. Returns in the forks, with the request.

    Forks of a connection that closes are killed; the template ends with its standard input.
    """
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}
    connections: list[socket.socket] = []
    while True:
        for key, _ in selector.select():
            source = key.fileobj
            if source is listener:
                connections.append(listener.accept()[0])
                selector.register(connections[-1], selectors.EVENT_READ)
            elif isinstance(source, socket.socket):
                try:
                    message, descriptors, *_ = socket.recv_fds(source, MESSAGE_BYTES, 3)
                except ConnectionError:
                    message = b""
                if not message:
                    _kill(pid for pid, connection in running.values() if connection is source)
                    selector.unregister(source)
                    connections.remove(source)
                    source.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for number, descriptor in enumerate(descriptors):
                        os.dup2(descriptor, number)
                    selector.close()
                    for one in (listener, *connections):
                        one.close()
                    for descriptor in [*descriptors, *running]:
                        os.close(descriptor)
                    request: dict[str, Any] = json.loads(message)
                    return request
                for descriptor in descriptors:
                    os.close(descriptor)
                watched = os.pidfd_open(pid)
                running[watched] = pid, source
                selector.register(watched, selectors.EVENT_READ)
                with suppress(OSError):  # the client has died: its next event closes the connection
                    source.send(json.dumps({"pid": pid}).encode())
            elif key.fd in running:
                pid, connection = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError):  # likewise, or closed already
                    connection.send(json.dumps({"pid": pid, "code": code}).encode())
            else:
                _kill(pid for pid, _ in running.values())
                os._exit(0)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def become(request: dict[str, Any], path: list[str]) -> None:
    """Take on the session, directory, environment, search path and command line of a new process."""
    if request["new_session"]:
        os.setsid()
    atexit.register(gc.unfreeze)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    os.chdir(request["cwd"])
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    os.environ.update(request["env"])
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv[:] = request["argv"]
    if sys.argv[0] == "-u":
        del sys.argv[0]
        unbuffered = True
    else:
        unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    if unbuffered:
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115
            setattr(sys, name, io.TextIOWrapper(stream, write_through=True))
    sys.modules["numpy"].random.seed()  # random does so by itself, and torch begins with a fixed seed


def execute() -> None:
    """Run the command line in `sys.argv` as the interpreter does."""
    while sys.argv[0] == "-W":
        warnings.simplefilter(sys.argv[1])  # type: ignore[arg-type]
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


def fork_in_place_of_exec(path: list[str]) -> None:
    """Let Python processes that a fork starts be forks too: the ranks of torchrun, the runs of a sweep."""
    execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_or_fork(
        self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Sequence[int],
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
        c2pread: int, c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any,
        uid: Any, umask: Any, start_new_session: bool, *more: Any,
    ) -> None:  # fmt: skip
        if isinstance(args, str) or args[0] != sys.executable or "-c" in args:
            execute_child(
                self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids,
                uid, umask, start_new_session, *more,
            )  # fmt: skip
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            for number, descriptor in enumerate((p2cread, c2pwrite, errwrite)):
                if descriptor != -1:
                    os.dup2(descriptor, number)
            first = 3
            for kept in sorted(pass_fds):
                os.closerange(first, kept)
                first = kept + 1
            os.closerange(first, os.sysconf("SC_OPEN_MAX"))
            request = {
                "argv": args[1:], "cwd": cwd or ".", "env": dict(os.environ if env is None else env),
                "new_session": start_new_session,
            }  # fmt: skip
            run_to_the_end(request, path)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    subprocess.Popen._execute_child = execute_or_fork  # type: ignore[attr-defined]


def run_to_the_end(request: dict[str, Any], path: list[str]) -> None:
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
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


PRELOADED = (
    "linnaeus.run", "linnaeus.main", "torch.distributed.run", "matplotlib.figure", "pytest",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.utils.serialization.config",
    "antlr4.LL1Analyzer", "rich._emoji_codes", "encodings.idna", "wandb",
)  # fmt: skip
"""With what they would import later."""


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    own = {str(ROOT), ""}
    path = [folder for folder in sys.path if folder not in own]
    for name in PRELOADED:
        importlib.import_module(name)
    # torchrun names its methods in a log through `inspect`, which takes seconds with so many modules.
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda *_: "method"  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # collections in the forks leave these pages alone
    request = serve(listener)
    fork_in_place_of_exec(path)
    if request["finalize"]:
        become(request, path)
        execute()
    else:
        run_to_the_end(request, path)


if __name__ == "__main__":
    main()
