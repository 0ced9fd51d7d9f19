"""A run's folder, and SLURM without a cluster: stand-ins for its commands, and a clock that waits advance."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from linnaeus.launchers import slurm
from linnaeus.launchers.outcome import Outcome, read_outcome
from linnaeus.launchers.record import write_record
from linnaeus.launchers.slurm_job import SlurmJob

UNCONFIGURED = """\
squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
squeue: error: fetch_config: DNS SRV lookup failed
squeue: fatal: Could not establish a configuration source
"""
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def fails(said: str) -> str:
    """The text of a shell command that fails with these words."""
    return f"cat >&2 <<'EOF'\n{said}\nEOF\nexit 1"


JOB = (
    "JobId=5 ArrayJobId=2 ArrayTaskId=0 JobName=x|y %j.sh UserId=root(0) JobState=RUNNING "
    "Reason=None Dependency=(null) Requeue=1 Restarts=0 TimeLimit=UNLIMITED SubmitTime=2026-11-22T12:05:22 "
    "EligibleTime=2026-11-22T12:05:22 StartTime=2026-11-22T12:05:24 EndTime=Unknown "
    "PreemptEligibleTime=2026-11-22T12:05:24 PreemptTime={} SuspendTime=None Partition=low NodeList=vm"
)
"""What `scontrol --oneliner show job` prints, with the time of a preemption."""


class Clock:
    """Stands for the module `time`: a wait takes no time, and advances the clock."""

    strftime = staticmethod(time.strftime)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Commands:
    """SLURM's commands, each a script in a folder that is searched first."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock

    def __call__(self, name: str, text: str, interpreter: str = "/bin/bash") -> None:
        path = self.folder / name
        path.write_text(f"#!{interpreter}\n{text}\n")
        path.chmod(0o700)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """No command of SLURM yet."""
    made = Commands(tmp_path / "bin", Clock())
    made.folder.mkdir()
    monkeypatch.setenv("PATH", f"{made.folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "time", made.clock)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's, with its logs."""
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    return path


Submission = Callable[..., None]


@pytest.fixture
def submission() -> Submission:
    """Writes the record of a run whose job is about to be submitted."""

    def write(folder: Path, script: Path, index: int, **more: object) -> None:
        record = {"launcher": "slurm", "script": str(script), "index": index, "seconds": 5.0, **more}
        folder.mkdir(exist_ok=True)
        write_record(folder, record)

    return write


SRUN = """\
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill({pid}, {number})
if {number} == signal.SIGUSR1:
    signal.sigwait([signal.SIGTERM])
{does}
sys.exit(143)"""
"""Sends a signal to the job; on the one that says that time is nearly over, waits for the job's SIGTERM."""


class Started:
    """A job that this process plays: the environment of SLURM, with an srun that does what a test says."""

    def __init__(
        self, folder: Path, commands: Commands, submission: Submission, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder, self.script = folder, folder.parent / "s.sh"
        self._commands, self._submission, self._env = commands, submission, monkeypatch
        self._requeued = folder.parent / "requeued"
        self.save = f"open({str(folder / 'checkpoints/last.pt')!r}, 'w').close()"
        (folder / "checkpoints").mkdir()
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
        commands("scontrol", f"[ $1 = requeue ] && echo >> '{self._requeued}'; echo '{JOB.format(None)}'")
        self.job = SlurmJob(("train",), str(folder))

    def run(self, does: str = "", restarts: int = 0, number: int = signal.SIGUSR1) -> int:
        """Run the job, whose srun gives this process the signal and then does something; its exit code."""
        self._env.setenv("SLURM_RESTART_COUNT", str(restarts))
        program = SRUN.format(pid=os.getpid(), number=int(number), does=does)
        self._commands("srun", program, f"{sys.executable} -IS")
        return self.begin()

    def begin(self) -> int:
        """Run the job with the srun that is there."""
        self._submission(self.folder, self.script, 0)
        self.script.with_suffix(".0").unlink(missing_ok=True)
        return self.job.run(self.script, 0)

    @property
    def num_requeues(self) -> int:
        return len(self._requeued.read_text()) if self._requeued.exists() else 0

    @property
    def outcome(self) -> Outcome:
        found = read_outcome(self.folder)
        assert found is not None
        return found


@pytest.fixture
def started(
    folder: Path, commands: Commands, submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> Started:
    return Started(folder, commands, submission, monkeypatch)
