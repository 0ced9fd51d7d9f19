"""The folder of a run: who has it, which run it is and how it ended.

`run.json` names the run by an id, and says who has it or how it ended. Who has the folder is decided by the
files `.claims/N`. A claim is made at once and with its content, by linking a finished file to the next
number; that needs no locks and holds on network file systems. Claim N + 1 is made only after the holder of
claim N was seen dead, or handed its claim over. A holder deletes its own claim and no other.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import psutil

from linnaeus.errors import CheckpointError, ConfigError, LinnaeusError
from linnaeus.files import (
    AUTOBATCH,
    CHECKPOINTS,
    CONFIG,
    LOGS,
    METRICS,
    RESULT,
    STUDY,
    SWEEP,
    checkpoint_file,
    link_new,
    read_json,
    why_not_written,
    write_text_atomically,
)
from linnaeus.signals import SIGNALS

RUN = "run.json"
CLAIMS = ".claims"
RUN_FILES = (CONFIG, "model.json", METRICS, RESULT, AUTOBATCH, RUN)
"""Files that a run writes into its folder."""
HANDED_OVER = "LINNAEUS_CLAIM"
"""Environment variable of a run that a worker starts: the number of the worker's claim, handed over to it."""
TRIAL = "LINNAEUS_TRIAL"
"""Environment variable of a run that a search has started: the sweep's folder and the number of the trial."""
BEAT_S = 30.0
"""Seconds between two touches of a claim by its holder."""
DEAD_S = 600.0
"""A claim of another machine that nobody has touched for so long belongs to nobody."""
QUEUE_S = 20.0
"""An answer of SLURM is used for so long."""

RunStatus = Literal["not run", "running", "finished", "failed", "interrupted", "pruned"]


class FolderInUseError(ConfigError):
    """Another process has the folder."""


class LostFolderError(LinnaeusError):
    """The folder of this run was renamed or deleted, or another process has taken it."""


@dataclass(frozen=True)
class Holder:
    """A process that has a folder.

    Attributes:
        host: name of its machine.
        pid: its number there.
        start: when it began, in ticks after the start of the machine; empty where the system does not say.
        boot: the machine's id of this start.
        job: number of its job of SLURM; empty without one.
    """

    host: str
    pid: int
    start: str
    boot: str
    job: str

    @classmethod
    def this_process(cls) -> Holder:
        """The process that calls."""
        return cls(socket.gethostname(), os.getpid(), _start(os.getpid()), _boot_id(), own_job())

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine, since its last start."""
        return (self.host, self.boot) == (socket.gethostname(), _boot_id())

    def lives(self, silent_s: float) -> bool:
        """Whether the process has not ended, as far as can be seen from here.

        Args:
            silent_s: seconds since it has touched its claim.
        """
        if self.is_here:
            return self.start == _start(self.pid) != ""
        if self.job and (self.job == own_job() or not _is_queued(self.job)):
            return False  # the same job has been queued again, or it has ended
        return silent_s < DEAD_S

    def __str__(self) -> str:
        job = f"SLURM job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}"


def own_job() -> str:
    """The number of the SLURM job of this process, as squeue shows it; empty outside of jobs."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID", "")


def _start(pid: int) -> str:
    """The start of a process in ticks; empty where it has ended, or the system does not say."""
    try:  # a name may have any letters
        found = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
        with suppress(psutil.Error):  # a system without these files
            return str(psutil.Process(pid).create_time())
        return ""
    return "" if found[0] in (b"Z", b"X") else found[19].decode()


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return ""


def _is_queued(job: str) -> bool:
    """Whether SLURM has a job in its queue; True where it does not answer."""
    now = int(time.monotonic() / QUEUE_S)
    return job in (_squeue(now) or "").split() or _squeue(now, job) != ""


@functools.lru_cache(maxsize=1000)
def _squeue(now: int, job: str = "") -> str | None:
    """The numbers of this user's jobs, or of one job where it is in the queue; None for no answer.

    Args:
        now: an answer holds as long as this number is the same, so that many runs ask once.
        job: the one to ask for.
    """
    which = f"--jobs={job}" if job else f"--user={os.getuid()}"
    command = ("squeue", "--noheader", "--array", "--format=%i", which)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else "" if "Invalid job id" in done.stderr else None


@dataclass(frozen=True)
class State:
    """How far a run has come, as its folder says.

    Attributes:
        status: `interrupted` for a run that was stopped or killed, and can be resumed.
        holder: who has it, or had it last; None where nobody has begun it.
        exit_code: of its last process; None while it goes on or where nobody saw the end.
        reason: why it has not ended well.
        seconds: from start to end, summed over interruptions.
        claim: number of the claim to which this belongs.
    """

    status: RunStatus
    holder: Holder | None = None
    exit_code: int | None = None
    reason: str | None = None
    seconds: float | None = None
    claim: int = 0


NOT_RUN = State("not run")


def read_state(folder: Path, *, without: int = 0) -> State:
    """The state of a run. Nothing is written; a folder that cannot be read holds no run.

    Args:
        folder: the run's.
        without: number of a claim that does not count, such as the caller's own.
    """
    written = read_json(folder / RUN) or {}
    ended, number = written.get("ended"), written.get("claim", 0)
    newest = max({*_claims(folder)} - {without}, default=0)
    holder = _holder(read_json(folder / CLAIMS / str(newest)) or {})
    if newest and holder is not None and holder.lives(_silent_s(folder, newest, time.time())):
        return State("running", holder, claim=newest)
    if newest > number or (written and not ended):
        holder = holder or _holder(written)
        if (folder / RESULT).is_file():
            return State("finished", holder, 0, claim=newest)
        return State("interrupted", holder, None, f"{holder or 'its process'} was killed", claim=newest)
    if ended:
        code = ended.get("exit_code", 1)
        status: RunStatus = "failed"
        if code == 0 and (folder / RESULT).is_file():
            status = "finished"
        elif ended.get("pruned"):
            status = "pruned"
        elif code - 128 in SIGNALS or -code in SIGNALS:
            status = "interrupted"
        return State(status, _holder(written), code, ended.get("reason"), ended.get("seconds"), number)
    # Without a `run.json`: not begun, or of an older version.
    if (folder / RESULT).is_file():
        return State("finished", exit_code=0)
    if any((folder / CHECKPOINTS).glob("*.pt")):
        return State("interrupted")
    if (folder / METRICS).exists():
        return State("failed", reason="ended without a result and without a checkpoint")
    return NOT_RUN


def _holder(content: dict[str, Any]) -> Holder | None:
    try:
        return Holder(**{name.name: content[name.name] for name in fields(Holder)})
    except KeyError:
        return None


def _claims(folder: Path) -> list[int]:
    """The numbers of the claims of a folder; none where it cannot be read."""
    try:
        return [int(path.name) for path in (folder / CLAIMS).iterdir() if path.name.isdecimal()]
    except OSError:
        return []


def _silent_s(folder: Path, number: int, now: float) -> float:
    try:
        return now - (folder / CLAIMS / str(number)).stat().st_mtime
    except OSError:
        return 0.0


class Claim:
    """A folder that this process has, from construction to `release`. A thread touches the claim.

    Args:
        folder: of the run; made where there is none.
        handed_over: number of a claim whose holder lets this process take over.

    Attributes:
        id: the run's. `begin` writes it down.

    Raises:
        FolderInUseError: another process has the folder.
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path, handed_over: int | None = None) -> None:
        self.folder = folder
        self._since = time.time()
        self._is_over = threading.Event()
        self.number = self._take(handed_over)
        found = folder.stat()
        self._place = found.st_dev, found.st_ino
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _take(self, handed_over: int | None) -> int:
        """Make the next claim; returns its number."""
        while True:
            (self.folder / CLAIMS).mkdir(parents=True, exist_ok=True)
            finished = self.folder / CLAIMS / f"{uuid.uuid4().hex}.tmp"
            try:
                self._before = read_json(self.folder / RUN) or {}
                self.id: str = self._before.get("id") or uuid.uuid4().hex[:12]
                content = {"id": self.id, **asdict(Holder.this_process())}
                finished.write_text(json.dumps(content), encoding="utf-8")
                now = finished.stat().st_mtime  # by the clock of the file server
                before = _claims(self.folder)
                newest = max(before, default=0)
                self._check_free(newest, handed_over, now)
                number: int = max(newest, self._before.get("claim", 0)) + 1
                own = self.folder / CLAIMS / str(number)
                link_new(finished, own)
                if {*_claims(self.folder)} == {*before, number}:
                    return number
                own.unlink()  # somebody else made a claim at the same time: neither has the folder
                time.sleep(random.uniform(0, 0.1))
            except (FileExistsError, FileNotFoundError):
                continue  # another process was faster, or has deleted the empty folder
            finally:
                finished.unlink(missing_ok=True)

    def _check_free(self, newest: int, handed_over: int | None, now: float) -> None:
        """Raise `FolderInUseError` if the holder of the newest claim lives."""
        if newest in (0, handed_over):
            return
        holder = _holder(read_json(self.folder / CLAIMS / str(newest)) or {})
        silent_s = _silent_s(self.folder, newest, now)
        if holder.lives(silent_s) if holder is not None else silent_s < DEAD_S:
            raise FolderInUseError(
                f"EXPERIMENT.NAME: {self.folder} is in use by a run that is still going on "
                f"({holder or 'it does not say which'}); choose another name"
            )

    def _beat(self) -> None:
        """Touch the claim, with the time of the file server."""
        while not self._is_over.wait(BEAT_S):
            with suppress(OSError, LostFolderError):
                self.check()
                os.utime(self.folder / CLAIMS / str(self.number))

    @property
    def is_mine(self) -> bool:
        """Whether the folder is still the one that was claimed, and nobody has taken it over."""
        try:
            found = self.folder.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._place and max(
            _claims(self.folder), default=0
        ) == self.number

    def check(self) -> None:
        """To be called before anything is written into the folder.

        Raises:
            LostFolderError: the folder was renamed or deleted, or is another process's by now.
        """
        if not self.is_mine:
            holder = read_state(self.folder).holder
            raise LostFolderError(
                f"{self.folder} is not the folder of this run any more: it was renamed or deleted"
                f"{f', or taken over by {holder}' if holder else ''}; this run (id {self.id}) ends here"
            )

    def check_id(self, found: str | None, path: Path) -> None:
        """Make sure that a checkpoint is this run's; one of an older version has no id.

        Raises:
            CheckpointError: it is another run's.
        """
        if "id" not in self._before:
            self.id = found or self.id
        elif found not in (None, self.id):
            raise CheckpointError(
                f"{path} belongs to the run with the id {found}, and {self.folder / RUN} to the run with the "
                f"id {self.id}: two runs are mixed. Put the checkpoint back where it comes from, or choose "
                "another EXPERIMENT.NAME"
            )

    def begin(self) -> None:
        """Write down which run this is and who has it.

        Raises:
            LostFolderError, LinnaeusError, OSError: see `check` and `write_text_atomically`.
        """
        self._write(None)

    def end(self, exit_code: int, reason: str | None = None, *, pruned: bool = False) -> None:
        """Write down how the run has ended; nothing in a folder that is not this run's any more.

        Args:
            exit_code: of its process; negative for a signal.
            reason: why it has not ended well.
            pruned: whether a search has ended it.
        """
        seconds = round(self._seconds_before + time.time() - self._since, 3)
        ended = {"exit_code": exit_code, "reason": reason, "seconds": seconds} | (
            {"pruned": True} if pruned else {}
        )
        with suppress(OSError, LinnaeusError):
            self._write(ended)

    @property
    def _seconds_before(self) -> float:
        earlier = self._before.get("ended") or {}
        return float(earlier.get("seconds") or 0.0)

    def _write(self, ended: dict[str, Any] | None) -> None:
        self.check()
        content = {"id": self.id, "claim": self.number, **asdict(Holder.this_process()), "since": self._since}
        write_text_atomically(self.folder / RUN, json.dumps({**content, "ended": ended}, indent=1) + "\n")

    def move(self, folder: Path) -> None:
        """Rename the folder, whose claim is given back.

        Raises:
            OSError: it cannot be renamed.
        """
        self.folder.rename(folder)
        self.folder = folder
        self.release()

    def release(self) -> None:
        """Give the claim back; nothing happens the second time."""
        self._is_over.set()
        with suppress(OSError):  # renamed, deleted, not empty
            if self.is_mine:
                (self.folder / CLAIMS / str(self.number)).unlink()
                (self.folder / CLAIMS).rmdir()


def claim_run_folder(folder: Path) -> Claim:
    """Make the folder of a run, and claim it.

    Raises:
        ConfigError: it cannot be made or written to, or is in use.
    """
    given = os.environ.get(HANDED_OVER, "")
    check_run_folder(folder)
    try:
        return Claim(folder, int(given) if given else None)
    except OSError as error:
        raise _cannot_write(folder, why_not_written(error, folder)) from error


def move_aside(claim: Claim) -> tuple[Path | None, Claim]:
    """Rename the folder of an earlier run, and claim a new one of its name.

    Args:
        claim: of the folder.

    Returns:
        The new path of the earlier run, None where there was none; and the claim of the folder.

    Raises:
        ConfigError: the folder cannot be renamed, or made anew, or is in use; an earlier run is where it was.
    """
    folder = claim.folder
    if not check_run_folder(folder, keep=False):
        return None, claim
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    aside = next(path for path in names if not path.exists())
    try:
        claim.move(aside)
        return aside, Claim(folder)
    except OSError as error:
        raise _cannot_write(folder, why_not_written(error, folder)) from error


def holds_run(folder: Path) -> bool:
    """Whether a folder holds what an earlier run left, beside the logs of a start that failed."""
    return any((folder / name).exists() for name in (*RUN_FILES, CHECKPOINTS))


def check_run_folder(folder: Path, *, keep: bool = True) -> bool:
    """Check that the folder of a run can be made or written to, without touching anything.

    Args:
        folder: `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`.
        keep: whether an earlier run is to stay there.

    Returns:
        Whether it holds an earlier run.

    Raises:
        ConfigError: it is a sweep's or cannot be written to, or an earlier run cannot be moved aside.
    """
    if any((folder / name).exists() for name in (SWEEP, STUDY)):
        raise ConfigError(
            f"EXPERIMENT.NAME: {folder} is the folder of a sweep, which holds a folder for each of its runs; "
            "choose another name"
        )
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not nearest.is_dir():
            raise _cannot_write(folder, f"{nearest} is no folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise _cannot_write(folder, f"no permission for {nearest}")
        if not holds_run(folder):
            return False
        inner = None if keep else next(_runs_within(folder), None)
    except OSError as error:
        raise _cannot_write(folder, why_not_written(error, folder)) from error
    if inner is not None:
        raise ConfigError(
            f"EXPERIMENT.NAME: the earlier run in {folder} cannot be moved aside, because {inner} is the "
            "folder of another run; choose another name"
        )
    return True


def _runs_within(folder: Path) -> Iterator[Path]:
    """The folders below one that hold runs of other names, such as `group/one` below `group`."""
    for path in sorted(folder.iterdir()):
        if path.name not in (LOGS, CHECKPOINTS, CLAIMS) and path.is_dir() and not path.is_symlink():
            if holds_run(path) or (path / CLAIMS).exists():
                yield path
            yield from _runs_within(path)


def _cannot_write(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"EXPERIMENT.OUTPUT_DIR: {folder} cannot be written to: {reason}; choose another folder"
    )


# The output of a run that a worker has started.

OUTPUT = f"{LOGS}/output.txt"
REASON_LETTERS = 400
TAIL_BYTES = 1 << 16
"""Only this much of the end of a run's output is read for its last line."""
_LAUNCHER = re.compile(r"[EWI]\d{4} [\d:.]+ .*torch/distributed/elastic/|srun: |slurmstepd: ")
"""Begins what torchrun or SLURM say of a failure, after the run itself has given its reason."""


def last_line(folder: Path, begin: int = 0) -> str:
    """The last line that the run in a folder has written; empty before the first.

    Args:
        folder: the run's.
        begin: where in its output to begin, in bytes.
    """
    try:
        with (folder / OUTPUT).open("rb") as output:
            output.seek(max(output.seek(0, 2) - TAIL_BYTES, begin))
            lines = output.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    own = next((number for number, line in enumerate(lines) if _LAUNCHER.match(line)), len(lines))
    return next((line.strip() for line in reversed(lines[:own] or lines) if line.strip()), "")


def stopped_reason(folder: Path, number: int) -> str:
    """What is said of a run that a signal has stopped."""
    has_saved = checkpoint_file(folder, "last") is not None
    name = signal_name(number)
    return f"stopped by {name} {'after a checkpoint' if has_saved else 'before its first checkpoint'}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
