"""What SLURM prints and is given, without a cluster: recorded output of SLURM 22.05, and stand-ins.

`tests/slurm` has a real one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from linnaeus.errors import LinnaeusError
from linnaeus.launchers import slurm
from linnaeus.launchers.jobs import cancel, cancel_command
from linnaeus.launchers.outcome import OUTPUT, Outcome, save_outcome
from linnaeus.launchers.record import read_record
from linnaeus.launchers.slurm import Slurm
from linnaeus.launchers.slurm_commands import parse_queue
from linnaeus.launchers.slurm_job import NOTHING_SAVED, RESUME, SlurmJob, was_preempted
from tests.launchers.conftest import JOB, TIMED_OUT, Commands, Started, Submission, fails

SQUEUE = """\
CLUSTER: linnaeus
8|PENDING|Resources|(null)
2_1|PENDING|JobArrayTaskLimit|/home/me/x|y %j.sh
2_2|PENDING|Nodes required for job are DOWN, DRAINED or reserved|/home/me/x|y %j.sh
2_0|RUNNING|None|/home/me/x|y %j.sh
4|COMPLETING|None|/home/me/a.sh
"""


def test_the_queue() -> None:
    found = parse_queue(SQUEUE)
    assert (found.jobs["2_0"].kind, found.jobs["2_1"].kind) == ("running", "pending")
    assert found.jobs["4"].kind == "running"
    assert found.jobs["2_1"].reason == "JobArrayTaskLimit"
    assert "DRAINED" in found.jobs["2_2"].reason
    assert len(found.jobs) == 5
    assert found.submitted["/home/me/x|y %j.sh", 2] == "2_2"
    assert found.submitted["/home/me/a.sh", 0] == "4"


def test_a_preemption_before_the_last_start_is_over() -> None:
    times = "2026-11-22T12:05:24", "2026-11-22T12:05:23", "None"
    assert [was_preempted(JOB.format(time)) for time in times] == [True, False, False]


# -- submission


def submitted(folder: Path) -> str:
    (job_id,) = Slurm(folder, {"nodes": "2"}, "name").submit_jobs([SlurmJob(("train",))])
    return job_id


def test_options_win_over_the_environment(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what it says of the job in which linnaeus was called, and of options that cannot be given."""
    left = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT")
    for name in (*left, "SBATCH_ACCOUNT", "SLURM_CONF"):
        monkeypatch.setenv(name, "4")
    commands("sbatch", f"{{ printf '%s\\n' \"$@\"; env; }} > '{tmp_path}/given'; echo '42;cluster'")
    assert submitted(tmp_path / "a 'b") == "42"
    given = (tmp_path / "given").read_text().splitlines()
    for option in ("--nodes=2", "--requeue", "--signal=B:USR1@180", f"--output={tmp_path}/a 'b/%j.out"):
        assert option in given
    assert {"SBATCH_ACCOUNT=4", "SLURM_CONF=4"} <= {*given}
    assert not [line for line in given if line.startswith(left)]


def test_a_controller_that_does_not_answer_sbatch_is_tried_again(commands: Commands, tmp_path: Path) -> None:
    commands("squeue", f"[ -e '{tmp_path}/asked' ] || {{ touch '{tmp_path}/asked'; echo no >&2; exit 1; }}")
    commands("sbatch", f"[ -e '{tmp_path}/asked' ] && echo 43 || {{ echo '{TIMED_OUT}' >&2; exit 1; }}")
    assert submitted(tmp_path / "slurm") == "43"


TAKES = f"echo \"44_0|RUNNING|None|${{@: -1}}\" > queue; echo >> calls; echo '{TIMED_OUT}' >&2; exit 1"
"""An sbatch that submits a job, and does not learn of it."""


@pytest.mark.parametrize("limit_s", [slurm.SUBMIT_S, 0])
def test_a_job_that_the_controller_has_taken_is_not_submitted_again(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: int
) -> None:
    """The queue is asked also after an sbatch that has hung for all the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "SUBMIT_S", limit_s)
    commands("sbatch", TAKES)
    commands("squeue", "cat queue")
    assert submitted(tmp_path / "slurm") == "44"
    assert (tmp_path / "calls").read_text() == "\n"


def test_a_controller_that_never_answers_sbatch_is_given_up(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above: the queue does not have the job."""
    monkeypatch.setattr(slurm, "SUBMIT_S", 12.0)
    commands("squeue", "")
    commands("sbatch", fails(TIMED_OUT))
    with pytest.raises(LinnaeusError, match="squeue --me"):
        submitted(tmp_path / "slurm")
    assert commands.clock.now == 3 * slurm.RETRY_S


def test_what_sbatch_refuses_is_not_tried_again(commands: Commands, tmp_path: Path) -> None:
    commands("sbatch", fails("sbatch: error: invalid account"))
    with pytest.raises(LinnaeusError, match="invalid"):
        submitted(tmp_path / "slurm")
    assert commands.clock.now == 0


# -- looks at jobs, and their end


@pytest.mark.parametrize(
    ("options", "log"),
    [({}, "{}/12.out"), ({"output": "logs/%x-%j.out"}, "logs/name-12.out"),
     ({"output": "%x.%j", "job-name": "%j"}, "%j.12"), ({"output": "%5j.out"}, None)],
)  # fmt: skip
def test_the_log_of_a_job(tmp_path: Path, options: dict[str, str | None], log: str | None) -> None:
    assert Slurm(tmp_path, options, "name").log("12") == (log and log.format(tmp_path))


def test_jobs_whose_number_nobody_has_noted_are_cancelled(
    commands: Commands, tmp_path: Path, submission: Submission
) -> None:
    """Whoever has submitted them was killed before it learned their numbers."""
    script = tmp_path / "s.sh"
    folders = [tmp_path / name for name in ("one", "two", "noted")]
    for index, folder in enumerate(folders):
        submission(folder, script, index, **({"id": "9"} if folder.name == "noted" else {}))
    commands("scancel", f'echo "$@" > "{tmp_path}/cancelled"')
    commands("squeue", fails("squeue: error: Unable to contact slurm controller"))
    with pytest.raises(LinnaeusError, match=str(script)) as told:
        cancel(folders)
    assert str(told.value).count("s.sh") == 1, "one array"
    assert (tmp_path / "cancelled").read_text() == "9\n", "the others are asked all the same"
    assert cancel_command(folders) == "scancel 9"

    commands("squeue", f"echo '4_1|PENDING|None|{script}'")  # the first has ended
    cancel(folders)
    assert (tmp_path / "cancelled").read_text() == "4_1 9\n"
    assert cancel_command(folders) == "scancel 4 9"


# -- a job


def test_a_job_that_saves_nothing_in_its_time_is_not_queued_again_for_ever(started: Started) -> None:
    """srun gets SIGTERM from the job itself, which needs no controller for that."""
    assert started.run(restarts=0) == 143
    assert started.num_requeues == 1, "it may have found batch sizes"
    assert started.run(restarts=1) == 1
    assert started.num_requeues == 1
    assert (started.outcome.exit_code, started.outcome.was_interrupted) == (143, True), "it can go on"
    assert (started.outcome.reason or "").startswith(NOTHING_SAVED)
    assert NOTHING_SAVED in (started.folder / OUTPUT).read_text()


def test_a_checkpoint_between_gives_another_chance(started: Started) -> None:
    """The first start is the third of the job: earlier ones were preempted, with time left."""
    nothing = ""
    saves = (nothing, started.save, nothing, nothing)
    assert [started.run(does, restarts=n) for n, does in enumerate(saves, 2)] == [143, 143, 143, 1]
    assert started.num_requeues == 3


def test_a_job_that_is_cancelled_says_so(started: Started) -> None:
    assert started.run(number=signal.SIGTERM) == 143
    assert started.num_requeues == 0
    assert "SIGTERM" in str(started.outcome.reason)
    assert started.outcome.was_interrupted


def test_a_command_that_cannot_be_resumed_gets_no_second_time(started: Started) -> None:
    started.job = SlurmJob(("plan",), with_torchrun=False)
    assert started.run() == 1
    assert started.num_requeues == 0


def test_only_a_run_that_this_job_has_begun_is_resumed(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the times of its own file, whatever the clocks of two file servers say."""
    commands("scontrol", "")
    commands("srun", f'echo "$@" > "{tmp_path}/words"')
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = SlurmJob(("train",), resumed_in=str(run))

    def resumes(restarts: int) -> bool:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        assert job.run(tmp_path / "s.sh", 0) == 0
        return RESUME in (tmp_path / "words").read_text().split()

    assert not resumes(0)
    assert not resumes(1), "there is no run"
    (run / "config.yaml").touch()
    os.utime(run / "config.yaml", (1, 1))  # a clock that is far behind
    assert resumes(1)
    assert not resumes(0), "of an earlier job"
    assert not resumes(1)
    os.utime(run / "config.yaml", (2, 2))
    assert resumes(1)


@pytest.fixture
def owns(
    folder: Path, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], bool]:
    """Whether a job of this number runs the run of the folder, by the script `s.sh` and the index 1."""
    commands("scontrol", f"echo '{JOB.format(None)}'")
    commands("srun", f"touch '{tmp_path}/began'; exit 130")

    def ask(number: str) -> bool:
        (tmp_path / "began").unlink(missing_ok=True)
        array, _, index = number.partition("_")
        for name, value in (("JOB_ID", "9"), ("ARRAY_JOB_ID", array), ("ARRAY_TASK_ID", index)):
            monkeypatch.setenv(f"SLURM_{name}", value)
        SlurmJob(("train",), str(folder)).run(tmp_path / "s.sh", 1)
        return (tmp_path / "began").exists()

    return ask


def test_which_runs_a_job_owns(folder: Path, owns: Callable[[str], bool], submission: Submission) -> None:
    script = folder.parent / "s.sh"
    assert not owns("7_1"), "nobody has submitted it"
    submission(folder, script, 0)
    assert not owns("7_1"), "another job's"
    submission(folder, script, 1, id="8_1")
    assert not owns("7_1"), "another submission of the script has been noted"
    submission(folder, script, 1)
    assert owns("7_1")
    assert (read_record(folder) or {})["id"] == "7_1"
    assert owns("7_1"), "once more"
    save_outcome(folder, Outcome(0, 1.0, None, {"training_s": 1.0}))
    assert not owns("7_1"), "it has ended well"


def test_of_two_jobs_of_one_script_the_first_has_the_run(
    folder: Path, owns: Callable[[str], bool], submission: Submission
) -> None:
    """The second one has read the record before the first one noted its number."""
    submission(folder, folder.parent / "s.sh", 1)
    assert owns("7_1")
    submission(folder, folder.parent / "s.sh", 1)
    assert not owns("8_1")
    assert (read_record(folder) or {})["id"] == "7_1", "so that the job is found"
    assert owns("7_1")
    assert (read_record(folder) or {})["seconds"] >= 5.0, "what was noted before stays"
