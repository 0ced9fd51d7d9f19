"""The folder of a run: the process that holds it, the id of the run and its end.

`run.json` has the id of the run and its end. The lock is the highest-numbered file in `.claims/`. A
process claims the folder by linking a temporary file, with its content, to the next number. That needs no
locks of the file system, and holds on network file systems. The last holder must have died, or this process
must be its restart. A worker shares its claim with the run that it starts. Releasing renames `.claims/`,
which also discards claims in progress.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from linnaeus.runtime.errors import CheckpointError, ConfigError, LinnaeusError
from linnaeus.runtime.files import (
    AUTOBATCH,
    CHECKPOINTS,
    CONFIG,
    LOGS,
    METRICS,
    RESULT,
    STUDY,
    SWEEP,
    checkpoint_file,
    finite,
    link_new,
    read_json,
    why_not_written,
    write_text_atomically,
)
from linnaeus.runtime.log import LOGGER_NAME, close_logging, file_handler, set_up_logging
from linnaeus.runtime.signals import SIGNALS

if TYPE_CHECKING:
    from linnaeus.runtime.distributed import World

RUN = "run.json"
CLAIMS = ".claims"
RUN_FILES = (CONFIG, "model.json", "split.csv", METRICS, RESULT, AUTOBATCH, RUN)
"""Files that a run writes into its folder."""
SHARED_CLAIM = "LINNAEUS_CLAIM"
"""Environment variable of a run that a worker starts: the token of the worker's claim."""
TRIAL = "LINNAEUS_TRIAL"
"""Environment variable of a run that a search has started: the sweep's folder and the number of the trial."""
RESTART_TOKEN = "LINNAEUS_RESTART_TOKEN"
"""Environment variable that a container and its successor have in common, such as the uid of their job."""
BEAT_S = 30.0
"""Seconds between two touches of a claim by its holder."""
SILENT_S = 3 * BEAT_S
"""Seconds after which SLURM is asked about the job of a holder that has not touched its claim."""
DEAD_S = 600.0
"""A holder on another machine that has not touched its claim for this time is dead."""
ATTEMPTS = 50
"""Number of attempts to make a claim while other processes make theirs."""
QUEUE_S = 20.0
"""An answer of SLURM is used for this time."""

RunStatus = Literal["not run", "running", "finished", "failed", "interrupted", "pruned", "unknown"]
"""How far a run has come; `unknown` where another program has written the metrics."""


class FolderInUseError(ConfigError):
    """Another process has the folder."""


class LostFolderError(LinnaeusError):
    """The folder of this run was renamed or deleted, or another process has taken it."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a folder.

    Attributes:
        host: name of its machine.
        pid: its number there.
        start: when it began, in ticks after the start of the machine; empty where the system does not say.
        boot: the machine's id of this start, and the namespace of its process numbers.
        job: number of its job of SLURM; empty without one.
        restarts: how often this job was queued again.
        restart_token: equal in a process and its successor; empty where the launcher gives none.
    """

    host: str
    pid: int
    start: str
    boot: str
    job: str
    restarts: str = "0"
    restart_token: str = ""

    @classmethod
    def this_process(cls) -> Holder:
        """The process that calls."""
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "").removeprefix(
            "none"
        )  # torchrun's default
        token = os.environ.get(RESTART_TOKEN) or run_id
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _start(pid), _boot(), own_job(), restarts, token)

    def is_here(self) -> bool:
        """Whether the process runs, or ran, where this one can look for it."""
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    def is_alive(self, heartbeat_age_s: float, *, resumes: bool = False) -> bool:
        """Return a best guess; a process elsewhere is dead after `DEAD_S` without a heartbeat.

        Args:
            heartbeat_age_s: seconds since it has touched its claim.
            resumes: whether this process resumes its run, and so replaces one with its restart token.
        """
        if self.is_here():
            return self.start == _start(self.pid) != ""
        here = Holder.this_process()
        if resumes and self.restart_token and self.restart_token == here.restart_token:
            return False
        if self.job and self.job == here.job and self.restarts != here.restarts:
            return False  # the job has been queued again, and this is it
        if self.job and heartbeat_age_s > SILENT_S and not is_queued(self.job):
            return False
        return heartbeat_age_s < DEAD_S

    def __str__(self) -> str:
        job = f"SLURM job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}"


def own_job() -> str:
    """The number of the SLURM job of this process, as squeue shows it; empty outside of jobs."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID", "")


def is_queued(job: str, *, now: bool = False) -> bool:
    """Whether SLURM has a job, or one of an array's, in its queue; `now` asks again. True if unknown."""
    if now:
        _queue.cache_clear()
    queue = _queue(int(time.monotonic() / QUEUE_S))
    return queue is None or any(job in (each, each.partition("_")[0]) for each in queue)


@functools.lru_cache(maxsize=1)
def _queue(moment: int) -> list[str] | None:
    """The numbers of all jobs; None for no answer. One answer serves as long as `moment` is the same."""
    command = ("squeue", "--noheader", "--array", "--format=%i")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()


def _start(pid: int) -> str:
    """The start of a process in ticks of Linux; empty if it has ended."""
    try:  # a name may have any letters
        found = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if found[0] in (b"Z", b"X") else found[19].decode()


@functools.cache
def _boot() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


@dataclass(frozen=True)
class State:
    """State of a run, read from its folder.

    Attributes:
        status: `interrupted` for a run that was stopped or killed, and can be resumed.
        holder: who has it, or had it last; None where that is not known.
        exit_code: of its last process; None while it runs, or if the end was not seen.
        reason: why it has not ended well.
        seconds: from start to end, summed over interruptions.
    """

    status: RunStatus
    holder: Holder | None = None
    exit_code: int | None = None
    reason: str | None = None
    seconds: float | None = None


def read_state(folder: Path) -> State:
    """The state of a run. Nothing is written; a folder that cannot be read holds no run."""
    with suppress(OSError):
        number, last, heartbeat_age_s = _last_claim(folder)
        if number and (holder := _living_holder(folder, last, heartbeat_age_s)) is not None:
            return State("running", holder)
    with suppress(OSError):
        return _state_left(folder)
    return State("not run")


def _state_left(folder: Path) -> State:
    """Return the state in which the last process left a run."""
    written = read_json(folder / RUN) or {}
    holder, seconds, ended = (
        _holder(written),
        finite(written.get("seconds")),
        written.get("ended"),
    )
    if isinstance(ended, dict):
        code, reason = ended.get("exit_code"), ended.get("reason")
        code = code if type(code) is int else 1
        status: RunStatus = "failed"
        if code == 0 and (folder / RESULT).is_file():
            status = "finished"
        elif ended.get("pruned"):
            status = "pruned"
        elif code - 128 in SIGNALS or -code in SIGNALS:
            status = "interrupted"
        return State(status, holder, code, None if reason is None else str(reason), seconds)
    if (folder / RESULT).is_file():
        return State("finished", holder, 0, seconds=seconds)
    if written:
        return State("interrupted", holder, None, f"{holder or 'its process'} was killed", seconds)
    if not (folder / METRICS).exists():
        return State("not run")
    # run.json may be damaged. Other programs write metrics too.
    return State("interrupted" if (folder / CONFIG).exists() else "unknown")


def read_result(folder: Path) -> dict[str, Any]:
    """Read the numbers, `metrics`, `best` and `headline` of a run's `result.json`; leave out the rest."""
    content = read_json(folder / RESULT) or {}
    headline = content.get("headline")
    known: dict[str, Any] = {
        name: value for name, value in content.items() if finite(value) is not None
    }
    for name in ("metrics", "best"):
        if isinstance(metrics := content.get(name), dict):
            known[name] = {metric: finite(value) for metric, value in metrics.items()}
    return known | ({"headline": headline} if isinstance(headline, str) else {})


def _holder(content: dict[str, Any]) -> Holder | None:
    found = {each.name: content.get(each.name, each.default) for each in fields(Holder)}
    kinds = {"pid": int}
    if all(type(value) is kinds.get(name, str) for name, value in found.items()):
        return Holder(**found)
    return None


def _living_holder(
    folder: Path, claim: dict[str, Any], heartbeat_age_s: float, *, resumes: bool = False
) -> Holder | None:
    """Return the process that has claimed a folder, or else the run of a dead worker; None if it is dead."""
    written = read_json(folder / RUN) or {}
    holders = map(_holder, (claim, {} if written.get("ended") else written))
    living = (each for each in holders if each and each.is_alive(heartbeat_age_s, resumes=resumes))
    return next(living, None)


def _last_claim(folder: Path, now: float | None = None) -> tuple[int, dict[str, Any], float]:
    """The number of a folder's last claim, its content, and the seconds since it was touched; 0 for none."""
    claims = folder / CLAIMS
    try:
        number = max(
            (int(path.name) for path in claims.iterdir() if path.name.isdecimal()), default=0
        )
        path = claims / str(number)
        return number, read_json(path) or {}, (now or time.time()) - path.stat().st_mtime
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            raise
        return 0, {}, 0.0


class Claim:
    """A folder that this process holds, from construction to `release`. A thread touches the claim.

    Args:
        folder: the run directory; created if its parent exists.
        shared: token of a worker's claim that this process has too; only the worker gives it up.
        resumes: take the folder from a process with the same restart token at once.

    Attributes:
        id: the run's. `begin` writes it down.

    Raises:
        FolderInUseError: another process has the folder.
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path, shared: str | None = None, *, resumes: bool = False) -> None:
        self.folder, self.token = folder, shared or uuid.uuid4().hex
        self._is_shared, self._resumes = shared is not None, resumes
        self._since = time.time()
        if not self._is_shared:
            self._take()
        elif not self.is_mine:
            raise FolderInUseError(f"EXPERIMENT.NAME: the worker of this run has lost {folder}")
        self._earlier = read_json(folder / RUN) or {}
        self.id: str = self._earlier.get("id") or uuid.uuid4().hex[:12]
        self._is_over = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _take(self) -> None:
        """Make the next claim; retry while other processes make theirs."""
        for is_last in (*[False] * ATTEMPTS, True):
            try:
                self.folder.mkdir(exist_ok=True)
                (self.folder / CLAIMS).mkdir(exist_ok=True)
                return self._link()
            except (
                FileExistsError,
                FileNotFoundError,
            ):  # made, or given up, by another process just now
                if is_last or (os.path.lexists(self.folder) and not self.folder.is_dir()):
                    raise
                time.sleep(random.uniform(0, 0.1))

    def _link(self) -> None:
        """Make the next claim, unless the holder of the last one lives."""
        temporary = self.folder / CLAIMS / f"{uuid.uuid4().hex}.tmp"
        try:
            temporary.write_text(json.dumps({**asdict(Holder.this_process()), "token": self.token}))
            # By the server's clock.
            number, last, age_s = _last_claim(self.folder, temporary.stat().st_mtime)
            holder = _living_holder(self.folder, last, age_s, resumes=self._resumes)
            if number and (holder is not None or (_holder(last) is None and age_s < DEAD_S)):
                wait = ""
                if holder is None or not holder.is_here():
                    wait = (
                        f". Its last heartbeat was {age_s:.0f} s ago; without another one TRAIN.AUTO_RESUME "
                        f"takes over in {max(DEAD_S - age_s, 0):.0f} s, or at once where the new process has "
                        f"the same {RESTART_TOKEN}"
                    )
                raise FolderInUseError(
                    f"EXPERIMENT.NAME: {self.folder} is in use by a run that has not ended "
                    f"({holder or 'it does not say which'}); choose another name{wait}"
                )
            link_new(temporary, self.folder / CLAIMS / str(number + 1))
        finally:
            temporary.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Touch the claim, with the time of the file server."""
        while not self._is_over.wait(BEAT_S):
            with suppress(OSError):
                number, last, _ = _last_claim(self.folder)
                if last.get("token") == self.token:
                    os.utime(self.folder / CLAIMS / str(number))

    @property
    def is_mine(self) -> bool:
        """Whether the folder is still the one that was claimed, and this process has it."""
        try:
            return _last_claim(self.folder)[1].get("token") == self.token
        except OSError:  # such as too many open files: the next operation reports it
            return True

    @property
    def state(self) -> State:
        """State of the run before this process claimed it."""
        return _state_left(self.folder)

    def check(self) -> None:
        """Check the claim, before anything is written into the folder.

        Raises:
            LostFolderError: the folder was renamed or deleted, or is another process's by now.
        """
        if not self.is_mine:
            holder = read_state(self.folder).holder
            raise LostFolderError(
                f"{self.folder} no longer belongs to this run: it was renamed or deleted"
                f"{f', or taken over by {holder}' if holder else ''}; this run (id {self.id}) ends here"
            )

    def check_id(self, found: str, path: Path) -> None:
        """Make sure that a checkpoint is this run's.

        Raises:
            CheckpointError: it is another run's.
        """
        if "id" not in self._earlier:
            self.id = found
        elif found != self.id:
            raise CheckpointError(
                f"{path} belongs to the run with the id {found}, and {self.folder / RUN} to the run with the "
                f"id {self.id}: two runs are mixed. Restore the checkpoint's own file, or choose "
                "another EXPERIMENT.NAME"
            )

    def begin(self) -> None:
        """Write `run.json`: the id, and that the run has not ended.

        Raises:
            LostFolderError, LinnaeusError: see `check` and `write_text_atomically`.
        """
        self._write(None, self._earlier.get("seconds"))

    def end(self, exit_code: int, reason: str | None = None, *, pruned: bool = False) -> None:
        """Write the end of the run; nothing in a folder that it has lost.

        The exit code is negative for a signal; the reason says why the run has failed.
        """
        seconds = (finite(self._earlier.get("seconds")) or 0.0) + time.time() - self._since
        ended = {"exit_code": exit_code, "reason": reason, **({"pruned": True} if pruned else {})}
        with suppress(LinnaeusError):
            self._write(ended, round(seconds, 3))

    def _write(self, ended: dict[str, Any] | None, seconds: float | None) -> None:
        self.check()
        self.id = (read_json(self.folder / RUN) or {}).get(
            "id", self.id
        )  # a worker's run has begun since
        holder = asdict(Holder.this_process())
        content = {
            "id": self.id,
            **holder,
            "since": self._since,
            "seconds": seconds,
            "ended": ended,
        }
        write_text_atomically(self.folder / RUN, json.dumps(content, indent=1) + "\n")

    def release(self) -> None:
        """Release the claim, unless a worker shares it. A second call does nothing."""
        self._is_over.set()
        with suppress(OSError):  # renamed, deleted
            if self.is_mine and not self._is_shared:
                given_up = (self.folder / CLAIMS).rename(self.folder / f"{CLAIMS}.{self.token}")
                shutil.rmtree(given_up)


class RunFolder:
    """The folder of a run, with its claim and the log of this process, inside the context.

    Until `begin`, the run owns the folder by its claim only, which rank 0 holds: nothing of an earlier run is
    touched, and the log goes to the console and is kept in memory for the file. Every rank must enter the
    context and call `begin`.

    Args:
        path: `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`.
        world: the ranks.
        keep: use the directory of an earlier run unchanged; otherwise `begin` renames it.

    Attributes:
        path: the folder.
        console: rank 0's console.
        has_begun: whether `begin` was called.
        claim: rank 0's; None on the other ranks.
        pruned: why a search ends the run; empty if it does not.

    Raises:
        ConfigError: on entering: the folder cannot be written to, or is in use; the same on every rank.
    """

    def __init__(self, path: Path, world: World, *, keep: bool) -> None:
        from linnaeus.runtime.console import make_console  # completion does without rich

        self.console = make_console()
        self.has_begun = False
        self.claim: Claim | None = None
        self.pruned = ""
        self.path, self._world, self._keep = path, world, keep
        self._new_folders: list[Path] = []
        self._early_lines = MemoryHandler(
            capacity=sys.maxsize, flushLevel=sys.maxsize, flushOnClose=False
        )

    def __enter__(self) -> RunFolder:
        set_up_logging(None, rank=self._world.rank, console=self.console).addHandler(
            self._early_lines
        )
        try:
            self._world.on_main(self._take)
        except BaseException as error:  # also of another rank, while this one has the folder
            self.__exit__(None, error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            code, cause = getattr(error, "exit_code", 1), error
            if isinstance(error, SystemExit):
                code = error.code if isinstance(error.code, int) else 1
                cause = error.__cause__ or error  # a rank ends so, when it has told its error
            self.end(code, " ".join(str(cause).split()) or type(cause).__name__)
        close_logging()
        if self.claim is not None:
            self.claim.release()
            with suppress(OSError):  # it is not empty
                for folder in self._new_folders:
                    folder.rmdir()

    def _take(self) -> None:
        with suppress(OSError):  # which the claim says
            self._new_folders = [
                path for path in (self.path, *self.path.parents) if not path.exists()
            ]
        self.claim = claim_run_folder(self.path, resumes=self._keep)

    def check(self) -> None:
        """Check the claim, before anything is written into the folder.

        Raises:
            LostFolderError: it is not this run's any more.
        """
        if self.claim is not None:
            self.claim.check()

    def begin(self) -> str:
        """Move an earlier run aside, and write the log to its file from now on.

        Returns:
            The run's id.

        Raises:
            ConfigError, LostFolderError: see `move_aside` and `check`; the same on every rank.
        """
        run_id, aside = self._world.on_main(self._begin)
        self.has_begun = True
        logger, handler = (
            logging.getLogger(LOGGER_NAME),
            file_handler(self.path / LOGS, self._world.rank),
        )
        self._early_lines.setTarget(handler)
        self._early_lines.flush()
        logger.removeHandler(self._early_lines)
        logger.addHandler(handler)
        if aside is not None:
            logging.getLogger("linnaeus.run").info(
                "an earlier run of this name is now in %s", aside
            )
        return run_id

    def _begin(self) -> tuple[str, Path | None]:
        assert self.claim is not None
        self.claim.check()
        aside = None
        if not self._keep:
            aside, self.claim = move_aside(self.claim)
        self.claim.begin()
        return self.claim.id, aside

    def end(self, exit_code: int, reason: str | None = None) -> None:
        """Write down how the run has ended, if it has begun."""
        if self.claim is not None and self.has_begun:
            self.claim.end(exit_code, self.pruned or reason, pruned=bool(self.pruned))


def claim_run_folder(folder: Path, *, resumes: bool = False) -> Claim:
    """Make the folder of a run, `<EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>`, and claim it; see `Claim`.

    Raises:
        ConfigError: it cannot be made or written to, is in use, or is a sweep's.
    """
    token = os.environ.pop(SHARED_CLAIM, None)  # not with what this process starts
    try:
        if any((folder / name).exists() for name in (SWEEP, STUDY)):
            raise ConfigError(
                f"EXPERIMENT.NAME: {folder} is the folder of a sweep, which holds a folder for each of its "
                "runs; choose another name"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Claim(folder, token, resumes=resumes)
    except OSError as error:
        raise cannot_write(folder, error) from error


def move_aside(claim: Claim) -> tuple[Path | None, Claim]:
    """Rename the folder of an earlier run, and claim a new one of its name.

    Returns:
        The new path of the earlier run, None where there was none; and the claim of the folder.

    Raises:
        ConfigError: the folder cannot be renamed, or created again, or is in use.
    """
    folder = claim.folder
    if not holds_run(folder):
        return None, claim
    aside = free_name(folder)
    try:
        claim.folder = folder.rename(aside)
        claim.release()
        return aside, Claim(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def free_name(folder: Path) -> Path:
    """The first of NAME.1, NAME.2, ... that is not there."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def holds_run(folder: Path) -> bool:
    """Whether a folder holds files of an earlier run, beside the logs of a failed start."""
    return any((folder / name).exists() for name in (*RUN_FILES, CHECKPOINTS))


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    """The error for the user when the folder of a run or a sweep cannot be made or written to."""
    is_file = isinstance(error, FileExistsError)
    reason = f"{error.filename} is not a folder" if is_file else why_not_written(error, folder)
    return ConfigError(
        f"EXPERIMENT.OUTPUT_DIR: {folder} cannot be written to: {reason}; choose another folder"
    )


OUTPUT = f"{LOGS}/output.txt"
TAIL_BYTES = 1 << 16
"""Only this much of the end of a run's output is read for its last line."""
_LAUNCHER = re.compile(r"[EWI]\d{4} [\d:.]+ .*torch/distributed/elastic/|srun: |slurmstepd: ")
"""First words of a later report by torchrun or SLURM, after the run itself gave the reason."""


def last_line(folder: Path, begin: int = 0) -> str:
    """The last line in the output of a run, from byte `begin` on; empty before the first."""
    try:
        with (folder / OUTPUT).open("rb") as output:
            output.seek(max(output.seek(0, 2) - TAIL_BYTES, begin))
            lines = output.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    own = next((number for number, line in enumerate(lines) if _LAUNCHER.match(line)), len(lines))
    return next((line.strip() for line in reversed(lines[:own] or lines) if line.strip()), "")


def stopped_reason(folder: Path, number: int) -> str:
    """Return the reason of a run that a signal has stopped."""
    has_saved = checkpoint_file(folder, "last") is not None
    when = "after a checkpoint" if has_saved else "before its first checkpoint"
    return f"stopped by {signal.Signals(number).name} {when}"
