"""What launchers say to their users, word by word."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from linnaeus.launchers import jobs, slurm
from linnaeus.launchers.interface import LaunchOptions, Task
from linnaeus.launchers.jobs import cancel, lost_outcome
from linnaeus.launchers.local import Local, Share
from linnaeus.launchers.outcome import OUTPUT, Outcome, outcome_of, read_outcome, save_outcome
from linnaeus.launchers.record import RECORD, open_locked
from linnaeus.launchers.slurm import Slurm, submit_command
from linnaeus.launchers.slurm_job import SlurmJob
from tests.helpers.messages import Golden, error_of
from tests.launchers.conftest import JOB, TIMED_OUT, UNCONFIGURED, Commands, Started, Submission, fails
from tests.launchers.test_options import launched

MISTAKES = (
    "--launcher slrum", "--launcher=", "--slurm nodes=2", "--dry-run", "--launcher slurm --dry-run=yes",
    "--launcher slurm --slurm", "--launcher slurm --slurm photos", "--launcher slurm --slurm ntasks=8",
    "--launcher slurm --slurm chd=/", "--launcher slurm --slurm gpus=2",
    "--launcher slurm --slurm no-requeue", "--launcher slurm --slurm clusters=a",
    "--launcher slurm --slurm help", "--launcher slurm --slurm arr=1",
    "--launcher slurm --slurm signal=USR1@60", "--launcher slurm --slurm signal=B:TERM@60",
    "--launcher slurm --slurm signal=B:USR1@0", "--launcher slurm --slurm time=6",
    "--launcher slurm --slurm time=1 signal=B:USR1@30", "--launcher slurm --slurm time=2 signal=B:USR1",
    "--launcher slurm --slurm time=60 time-min=2",
)  # fmt: skip
"""Command lines with one problem."""


def ends() -> dict[str, str]:
    """How runs end that say nothing of it themselves."""
    numbers = {"SIGKILL": -9, "SIGSEGV": -11, "signal 37": -37, "0 without a result": 0, "3": 3, "130": 130}
    found = {
        f"ended: {name}": outcome_of(Path("missing"), code, 1.0).reason for name, code in numbers.items()
    }
    return {title: str(reason) for title, reason in found.items()}


def local(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(jobs, "START_S", 0.0)
    start = Local([Share()]).submit
    said = {"a folder that is missing": error_of(start, [Task(folder.parent / "missing", ())], [])}
    record = {"launcher": "local", "host": "node7", "slot": 0, "supervisor": [12, "1"]}
    with os.fdopen(open_locked(folder, record)):
        said["cancel on another machine"] = error_of(cancel, [folder])
        (folder / RECORD).write_text('{"launcher": "lo')
        said["cancel what has just begun"] = error_of(cancel, [folder])
    (folder / RECORD).write_text(json.dumps(record))
    return {**said, "lost": str(lost_outcome(folder).reason)}  # type: ignore[union-attr]


NUMBER = '[ "$1" = --test-only ] || echo 12'


def on_slurm(
    folder: Path, commands: Commands, submission: Submission, caplog: pytest.LogCaptureFixture
) -> dict[str, str]:
    made, plugin = Slurm(folder / "slurm", {}, "name"), {"gpus-per-node": "2", "x-option": "1"}
    said = {"a folder with %": error_of(Slurm(folder / "a%b", {}, "name").dry_run, 1)}
    options = LaunchOptions("slurm", slurm=plugin)
    for title, sbatch in {
        "tried again": f"[ -e asked ] || {{ touch asked; echo '{TIMED_OUT}' >&2; exit 1; }}; {NUMBER}",
        "refused": fails("sbatch: error: invalid account"), "out of reach": fails(TIMED_OUT),
        "of no cluster": fails(UNCONFIGURED),
    }.items():  # fmt: skip
        caplog.clear()
        commands("sbatch", sbatch)
        commands("squeue", "")
        if title == "tried again":
            said[title] = submit_command(options, "plan", (), with_torchrun=False, resumed_in=None)
        else:
            said[f"{title}: check"] = error_of(made.check, 1)
            said[f"{title}: submission"] = error_of(made.submit_jobs, [SlurmJob(("train",))])
        said[f"{title}: warnings"] = "\n".join(dict.fromkeys(record.message for record in caplog.records))
    commands("squeue", fails("squeue: error: Unable to contact slurm controller"))
    submission(folder, folder / "s.sh", 0)
    said["cancel a job without a number"] = error_of(cancel, [folder])
    submission(folder, folder / "s.sh", 0, id="7")
    commands("scancel", fails("scancel: error: Invalid job id 7"))
    said["cancel a job that SLURM refuses"] = error_of(cancel, [folder])
    for title, shown in (("gone", JOB.replace("RUNNING", "CANCELLED")), ("forgotten", "")):
        commands("scontrol", f"echo '{shown.format(None)}'")
        said[f"a job that is {title}"] = str(lost_outcome(folder).reason)  # type: ignore[union-attr]
    return said


def a_job(folder: Path, started: Started) -> dict[str, str]:
    """What is written to the output of a run, and what its outcome says."""
    said = {}
    for title, number, does in (
        ("nothing saved", signal.SIGUSR1, ""), ("nothing saved again", signal.SIGUSR1, ""),
        ("saved", signal.SIGUSR1, started.save), ("cancelled", signal.SIGTERM, ""),
    ):  # fmt: skip
        (folder / OUTPUT).unlink(missing_ok=True)
        started.run(does, number=number)
        said[f"a job: {title}"] = f"{(folder / OUTPUT).read_text()}{started.outcome.reason}"
    return said


def test_messages(
    golden: Golden, folder: Path, commands: Commands, submission: Submission, started: Started,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(slurm, "SUBMIT_S", 12)
    mistakes = {line: "\n".join(launched(line)[2]) for line in MISTAKES}
    found = {**mistakes, **ends(), **a_job(folder, started)}
    capfd.readouterr()
    save_outcome(folder, Outcome(0, 1.0, None, {}))
    assert started.begin() == 0
    found["a job whose run has ended"] = capfd.readouterr().out
    save_outcome(folder, Outcome(130, 1.0))
    submission(folder, started.script, 0, id="8")
    started.job.run(started.script, 0)
    found["a job whose run is another's"] = capfd.readouterr().out
    assert not read_outcome(folder).finished  # type: ignore[union-attr]
    found |= on_slurm(folder, commands, submission, caplog)
    commands("squeue", "")
    monkeypatch.setenv("PATH", str(folder))
    found["without sbatch"] = error_of(Slurm(folder, {}, "name").check, 1)
    found["a misspelled option"] = error_of(Slurm(folder, {"partitoin": "a"}, "name").dry_run, 1)
    monkeypatch.setitem(sys.modules, "submitit", None)
    found["without submitit"] = error_of(slurm._submitit)
    for name in ("job.json", "outcome.json"):
        (folder / name).unlink()
    found |= local(folder, monkeypatch)
    golden("launchers", found, FOLDER=folder, PARENT=folder.parent)
