"""A worker: claims runs of a sweep, trains each in a process, and records its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from linnaeus.runtime.errors import EXIT_SOME_FAILED, ConfigError, LinnaeusError
from linnaeus.runtime.files import (
    AUTOBATCH,
    RESULT,
    checkpoint_file,
    read_json,
    write_text_atomically,
)
from linnaeus.runtime.run_folder import (
    OUTPUT,
    RUN,
    SHARED_CLAIM,
    TRIAL,
    Claim,
    FolderInUseError,
    last_line,
    read_state,
    stopped_reason,
)
from linnaeus.runtime.signals import SIGNALS, handled
from linnaeus.sweep.folder import ASKED, Sweep, SweepRun

TRIES = 3
"""A worker takes a run that is killed up to this number of times."""
ENDED = ("finished", "failed", "pruned")
STARTS = {"START": "train", "START_VAL": "val"}
"""The keys with the sizes that a search tries first, and their modes."""
REASON_LETTERS = 400


class Child:
    """The process of a run, to which stop signals are passed on: also those that come before it exists.

    The first signal lets the run save a checkpoint; a second one kills it.

    Args:
        is_step: whether it is srun: SLURM itself sends SIGTERM to processes of srun.

    Attributes:
        received: the signals so far.
    """

    def __init__(self, *, is_step: bool) -> None:
        self.received: list[int] = []
        self._is_step = is_step
        self._to_pass_on: deque[int] = deque()
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the context."""
        with handled(SIGNALS, self._handle):
            yield

    def run(
        self, command: Sequence[str], env: Mapping[str, str], output: Path | None, cwd: Path
    ) -> int:
        """Run a command to its end; returns its exit code, negative for a signal.

        Args:
            command: command line of the process.
            env: its environment.
            output: file to which its output is appended; None for this process's.
            cwd: the folder that it runs in.
        """
        with open(output or os.devnull, "ab") as file:  # noqa: PTH123
            stream = None if output is None else file
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream and subprocess.STDOUT,
                env={**env, "PYTHONUNBUFFERED": "1"},
                cwd=cwd,
                start_new_session=True,
            )
            self._pass_on()
            try:
                code = self._process.wait()
            finally:
                self._process = None
        if self._is_step and not self.received and code - 128 in SIGNALS:
            self.received.append(
                code - 128
            )  # SLURM has signalled the step alone, as before a preemption
        return code

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._to_pass_on.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        """Each signal once, although another one may interrupt this at any point."""
        while self._process is not None:
            try:
                number = self._to_pass_on.popleft()
            except IndexError:
                return
            if self._is_step:
                if number != signal.SIGTERM:
                    self._process.send_signal(signal.SIGTERM)
            elif len(self.received) == 1:
                self._process.send_signal(signal.SIGINT)
            else:
                with suppress(psutil.Error):
                    for process in psutil.Process(self._process.pid).children(recursive=True):
                        with suppress(psutil.Error):
                            process.kill()
                self._process.kill()


class Worker:
    """Trains the unclaimed runs of a sweep until none is left.

    Args:
        sweep: whose runs.
        prefix: returns the launcher of each rank of a run, before `linnaeus.main`.
        env: the environment of a run.
        child: passes signals on.

    Attributes:
        progress: runs that have ended, or have saved a checkpoint here.
    """

    def __init__(
        self,
        sweep: Sweep,
        prefix: Callable[[], Sequence[str]],
        env: Mapping[str, str],
        child: Child,
    ) -> None:
        self.progress = 0
        self._sweep, self._prefix, self._env, self._child = sweep, prefix, env, child
        self._tries: Counter[Path] = Counter()
        self._cwd = Path(sweep.cwd) if Path(sweep.cwd).is_dir() else Path.cwd()
        self._study = None
        sweep.folder = sweep.folder.resolve()
        if sweep.trials is not None:
            from linnaeus.sweep.search import Study

            self._study = Study(sweep)
            os.chdir(self._cwd)  # the files of the command are read for each trial
            self._study.check_configuration()

    def work(self) -> int:
        """Train the free runs; returns the exit code: 0 all ended well, 1 some did not, 128 + signal.

        Raises:
            ConfigError: the runs of a search do not have its metric.
            LinnaeusError: the sweep's folder cannot be written to, or was renamed or deleted.
        """
        try:
            while not self._child.received and (taken := self._take()):
                claim, run, trial = taken
                try:
                    self._train(claim, run, trial)
                finally:
                    claim.release()
                self._sweep.check_is_there()
                if self._study is not None:
                    self._study.tell_ended()
                state = read_state(run.folder)
                print(
                    f"{run.title}: {state.status}{f': {state.reason}' if state.reason else ''}",
                    flush=True,
                )
                if state.status == "failed" and "--metric:" in (state.reason or ""):
                    raise ConfigError(f"--metric: {run.title}: {state.reason}")
        except OSError as error:
            raise LinnaeusError(f"{self._sweep.folder} cannot be written to: {error}") from error
        if self._child.received:
            return 128 + self._child.received[0]
        states = Counter(
            read_state(run.folder).status for run in self._sweep.known_runs(self._study)
        )
        print(
            "no run is left to take:",
            ", ".join(f"{number} {name}" for name, number in states.items()),
        )
        mine = (read_state(folder).status for folder in self._tries)
        return EXIT_SOME_FAILED if {*mine} & {"failed", "interrupted"} else 0

    def _take(self) -> tuple[Claim, SweepRun, int | None] | None:
        """Claim an unclaimed run; None if there is none."""
        self._sweep.check_is_there()
        for trial, run in self._open():
            if self._tries[run.folder] >= TRIES or read_state(run.folder).status in ENDED:
                continue
            try:
                claim = Claim(run.folder)
            except FolderInUseError:
                continue
            if claim.state.status not in ENDED:  # another worker ended it since this process looked
                self._tries[run.folder] += 1
                return claim, run, trial
            claim.release()
        return None

    def _open(self) -> Iterator[tuple[int | None, SweepRun]]:
        """Yield the runs that may not have ended; runs of a search come last."""
        if self._study is None:
            yield from ((None, run) for run in self._sweep.grid())
            return
        yield from self._study.open_trials()
        while (asked := self._study.ask()) is not None:
            yield asked
            self._study.tell_ended()  # a point that was requested before

    def _train(self, claim: Claim, run: SweepRun, trial: int | None) -> None:
        """Train a run to its end or until this process is asked to stop."""
        folder, env = run.folder, {**self._env, SHARED_CLAIM: claim.token}
        output = folder / OUTPUT
        output.parent.mkdir(exist_ok=True)
        try:
            text = run.config or (self._study and self._study.config_of(run)) or ""
        except ConfigError as error:
            claim.end(error.exit_code, "; ".join(error.problems))
            return
        write_text_atomically(folder / ASKED, text)
        if trial is not None:
            env[TRIAL] = f"{self._sweep.folder}:{trial}"
        where = [f"EXPERIMENT.OUTPUT_DIR={self._sweep.folder}", f"EXPERIMENT.NAME={folder.name}"]
        command = [*self._prefix(), "linnaeus.main", "--cfg", str(folder / ASKED), *where]
        print(f"{run.title}: started; output in {output}", flush=True)
        begin = output.stat().st_size if output.exists() else 0
        saved, before = saved_at(folder), read_json(folder / RUN)
        code = self._child.run([*command, *_newest_sizes(folder)], env, output, self._cwd)
        self.progress += saved_at(folder) != saved or (folder / RESULT).exists()
        if not claim.is_mine:
            return  # it was renamed or deleted
        now = read_json(folder / RUN) or before or {}
        has_begun = now != (before or {})
        if has_begun and now.get("ended"):
            return  # as it has noted itself
        is_killed = has_begun or code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        if self._child.received and code != 0:
            claim.end(
                128 + self._child.received[0], stopped_reason(folder, self._child.received[0])
            )
        elif code == 0 and (folder / RESULT).is_file():
            claim.end(0)
        elif not is_killed or self._tries[folder] >= TRIES:
            claim.end(code or 1, _reason(folder, code, begin))


def _reason(folder: Path, code: int, begin: int) -> str:
    """Why a run has failed: the last line that it wrote, or the signal that has ended it."""
    if code < 0:
        lack = ", often for lack of host memory" if code == -signal.SIGKILL else ""
        return f"ended by signal {-code} ({signal.strsignal(-code)}){lack}"
    last = last_line(folder, begin).removeprefix("- ")
    return last[:REASON_LETTERS] or f"ended with exit code {code}" + (
        "" if code else f" and without {RESULT}"
    )


def saved_at(folder: Path) -> int | None:
    """Return the time of a run's last checkpoint in ns; None if there is none."""
    path = checkpoint_file(folder, "last")
    return None if path is None else path.stat().st_mtime_ns


def _newest_sizes(folder: Path) -> list[str]:
    """Return overrides that start a size search at the result of the sweep's newest run."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # there is none, or it is damaged
        newest = max(folder.parent.glob(f"*/{AUTOBATCH}"), key=lambda file: file.stat().st_mtime)
        found = json.loads(newest.read_text(encoding="utf-8"))
        return [
            f"DATA.AUTOBATCH.{key}={found[mode]['batch_size']}"
            for key, mode in STARTS.items()
            if found[mode]
        ]
    return []


def work_here(folder: Path, num_processes: int = 1) -> int:
    """Take the runs of a sweep on this machine; returns the exit code, see `Worker.work`.

    Args:
        folder: of the sweep.
        num_processes: ranks of each run.

    Raises:
        ConfigError: it is no sweep's, or a search cannot be resumed.
    """
    ranks = ["linnaeus.sweep.torchrun", "--standalone", f"--nproc-per-node={num_processes}", "-m"]
    prefix = [sys.executable, "-m", *(ranks if num_processes > 1 else [])]
    child = Child(is_step=False)
    with child.listening():
        return Worker(Sweep.read(folder), lambda: prefix, os.environ, child).work()
