"""What SLURM prints and is given, without a cluster: recorded output of SLURM 22.05, and stand-ins.

`tests/slurm` has a real one.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from linnaeus.errors import LinnaeusError
from linnaeus.launchers import slurm, slurm_commands, slurm_job
from linnaeus.launchers.interface import Job, Task
from linnaeus.launchers.jobs import active_jobs, cancel, cancel_command, lost_outcome
from linnaeus.launchers.options import LaunchOptions
from linnaeus.launchers.outcome import Outcome, read_outcome, save_outcome
from linnaeus.launchers.record import read_record, write_record
from linnaeus.launchers.slurm import Slurm
from linnaeus.launchers.slurm_commands import parse_gone, parse_queue
from linnaeus.launchers.slurm_job import NOTHING_SAVED, RESUME, SlurmJob, was_preempted

SQUEUE = """\
8|PENDING|Resources|(null)
2_1|PENDING|JobArrayTaskLimit|/home/me/x|y %j.sh
2_2|PENDING|Nodes required for job are DOWN, DRAINED or reserved|/home/me/x|y %j.sh
2_0|RUNNING|None|/home/me/x|y %j.sh
4|COMPLETING|None|/home/me/a.sh
"""
JOB = (
    "JobId=5 ArrayJobId=2 ArrayTaskId=0 JobName=x|y %j.sh UserId=root(0) JobState=RUNNING "
    "Reason=None Dependency=(null) Requeue=1 Restarts=0 TimeLimit=UNLIMITED SubmitTime=2026-11-22T12:05:22 "
    "EligibleTime=2026-11-22T12:05:22 StartTime=2026-11-22T12:05:24 EndTime=Unknown "
    "PreemptEligibleTime=2026-11-22T12:05:24 PreemptTime={} SuspendTime=None Partition=low NodeList=vm"
)
UNCONFIGURED = """\
squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
squeue: error: fetch_config: DNS SRV lookup failed
squeue: fatal: Could not establish a configuration source
"""
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def submission(folder: Path, script: Path, index: int, **more: object) -> None:
    """The record of a run whose job is about to be submitted."""
    write_record(folder, {"launcher": "slurm", "script": str(script), "index": index, "seconds": 5.0, **more})


def stand_in(folder: Path, name: str, text: str) -> None:
    """A command of SLURM: a shell script in a folder."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched for commands first."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "RETRY_S", 0.01)
    return folder


def test_the_queue() -> None:
    found = parse_queue(f"CLUSTER: linnaeus\n{SQUEUE}")
    assert found.jobs["2_0"] == Job("running", "SLURM job 2_0")
    assert found.jobs["4"].kind == "running"
    assert found.jobs["2_1"] == Job("pending", "SLURM job 2_1", "JobArrayTaskLimit")
    assert found.jobs["2_2"].reason.startswith("Nodes required for job are DOWN")
    assert len(found.jobs) == 5
    assert found.submitted["/home/me/x|y %j.sh", 2] == "2_2"
    assert found.submitted["/home/me/a.sh", 0] == "4"


def test_a_queue_that_cannot_be_asked_is_told_in_a_few_words(commands: Path) -> None:
    stand_in(commands, "squeue", f"cat >&2 <<'EOF'\n{UNCONFIGURED}EOF\nexit 1")
    assert slurm_commands.queue() == "Could not establish a configuration source"


def test_a_job_that_is_gone() -> None:
    assert parse_gone(
        "8", JOB.format("None").replace("RUNNING", "CANCELLED").replace("=None", "=Resources")
    ) == ("SLURM job 8 has ended as CANCELLED (SLURM's reason: Resources)")
    assert "has ended without writing an outcome" in parse_gone("4711", "")


@pytest.mark.parametrize(
    ("time_", "preempted"),
    [
        ("2026-11-22T12:05:24", True),
        ("2026-11-22T12:05:29", True),
        ("2026-11-22T12:05:23", False),
        ("None", False),
    ],
)
def test_a_preemption_before_the_last_start_is_over(time_: str, preempted: bool) -> None:
    assert was_preempted(JOB.format(time_)) == preempted


def submitted(folder: Path) -> str:
    (job_id,) = Slurm(folder, {"nodes": "2"}, "name").submit_jobs([SlurmJob(("train",))])
    return job_id


def test_options_win_over_the_environment(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what it says of the job in which linnaeus was called, and of options that cannot be given."""
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-4")
    monkeypatch.setenv("SBATCH_WAIT", "1")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    monkeypatch.setenv("SLURM_CONF", "here")
    stand_in(commands, "sbatch", f"{{ printf '%s\\n' \"$@\"; env; }} > {tmp_path}/given; echo '42;cluster'")
    assert submitted(tmp_path / "a 'b") == "42"
    given = (tmp_path / "given").read_text().splitlines()
    for option in ("--nodes=2", "--requeue", "--signal=B:USR1@180", f"--output={tmp_path}/a 'b/%j.out"):
        assert option in given
    assert {"SBATCH_ACCOUNT=mine", "SLURM_CONF=here"} <= {*given}
    left = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT")
    assert not [line for line in given if line.startswith(left)]


def test_a_controller_that_does_not_answer_sbatch_is_tried_again(commands: Path, tmp_path: Path) -> None:
    stand_in(
        commands, "squeue", f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; echo no >&2; exit 1; }}"
    )
    stand_in(
        commands, "sbatch", f"[ -e {tmp_path}/asked ] && echo 43 || {{ echo '{TIMED_OUT}' >&2; exit 1; }}"
    )
    assert submitted(tmp_path / "slurm") == "43"


def test_a_controller_that_never_answers_sbatch_is_given_up(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "SUBMIT_S", 0.5)
    stand_in(commands, "squeue", "")
    stand_in(commands, "sbatch", f"echo '{TIMED_OUT}' >&2; exit 1")
    with pytest.raises(LinnaeusError, match="SLURM does not answer, and may have taken the job"):
        submitted(tmp_path / "slurm")


def test_the_queue_is_asked_after_an_sbatch_that_hung_for_all_the_time(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller has taken the job; a negative control is the test above, where it has not."""
    monkeypatch.setattr(slurm, "SUBMIT_S", 0.0)
    stand_in(
        commands, "sbatch",
        f"echo \"44|PENDING|None|${{@: -1}}\" > {tmp_path}/queue; echo '{TIMED_OUT}' >&2; exit 1",
    )  # fmt: skip
    stand_in(commands, "squeue", f"cat {tmp_path}/queue")
    assert submitted(tmp_path / "slurm") == "44"


def test_a_check_that_hangs_once_is_tried_again(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    monkeypatch.setattr(slurm, "SUBMIT_S", 0.4)
    once = f"touch {asked}; sleep 0.5; echo '{TIMED_OUT}' >&2; exit 1"
    stand_in(commands, "sbatch", f"[ -e {asked} ] || {{ {once}; }}")
    Slurm(tmp_path, {}, "name").check(1)


def test_variables_of_the_user_change_nothing_about_a_look(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would hide jobs, which then count as lost; scancel would wait for an answer."""
    for name in ("SQUEUE_STATES", "SCANCEL_INTERACTIVE", "SCONTROL_ALL", "SLURM_TIME_FORMAT", "SLURM_CONF"):
        monkeypatch.setenv(name, "RUNNING")
    monkeypatch.setenv("LOGNAME", "somebody")
    for name in ("squeue", "scancel", "scontrol"):
        stand_in(commands, name, f'{{ echo "$@"; env; }} >> {tmp_path}/given')
    slurm_commands.queue()
    slurm_commands.cancel(["1"])
    slurm_commands.why_gone("1")
    given = (tmp_path / "given").read_text().splitlines()
    assert sum(f"--user={os.getuid()} " in line for line in given) == 1
    assert given.count("SLURM_CONF=RUNNING") == 3, "where the cluster is"
    left = ("SQUEUE_", "SCANCEL_", "SCONTROL_", "SLURM_TIME_FORMAT")
    assert not [line for line in given if line.startswith(left)]


@pytest.mark.parametrize(
    ("options", "log"),
    [
        ({}, "{}/12.out"), ({"output": "logs/%x-%j.out"}, "logs/name-12.out"),
        ({"output": "%x.%j", "job-name": "%j"}, "%j.12"), ({"output": "all.out"}, "all.out"),
        ({"output": "%N-%j.out"}, None), ({"output": "%5j.out"}, None),
    ],
)  # fmt: skip
def test_the_log_of_a_job(tmp_path: Path, options: dict[str, str | None], log: str | None) -> None:
    assert Slurm(tmp_path, options, "name").log("12") == (log and log.format(tmp_path))


def test_a_log_whose_name_slurm_alone_knows_is_not_followed(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    stand_in(commands, "sbatch", '[ "$1" = --test-only ] || echo 12')
    for output, follows in (("%N.out", False), ("%j.out", True)):
        options = LaunchOptions("slurm", slurm={"output": output})
        said = slurm.submit_command(options, "plan", (), with_torchrun=False, resumed_in=None)
        assert ("log:    as output=%N.out says\n" in said, "tail" in said) == (not follows, follows)


def test_jobs_whose_number_nobody_has_noted_are_cancelled(commands: Path, tmp_path: Path) -> None:
    """Whoever has submitted them was killed before it learned their numbers."""
    script = tmp_path / "s.sh"
    folders = [tmp_path / name for name in ("one", "two", "noted")]
    for index, folder in enumerate(folders):
        folder.mkdir()
        submission(folder, script, index, **({"id": "9"} if folder.name == "noted" else {}))
    stand_in(commands, "scancel", f'echo "$@" > {tmp_path}/cancelled')
    stand_in(commands, "squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(
        LinnaeusError, match=rf"{script}: the number of its job is not known \(Unable to"
    ) as told:
        cancel(folders)
    assert str(told.value).count("s.sh") == 1, "one array"
    assert (tmp_path / "cancelled").read_text() == "9\n", "the others are asked all the same"
    assert cancel_command(folders) == "scancel 9"

    stand_in(commands, "squeue", f"echo '4_1|PENDING|None|{script}'")  # the first has ended
    cancel(folders)
    assert (tmp_path / "cancelled").read_text() == "4_1 9\n"
    assert cancel_command(folders) == "scancel 4 9"


def test_a_look_at_the_jobs_writes_nothing(commands: Path, tmp_path: Path) -> None:
    submission(tmp_path, tmp_path / "s.sh", 1)
    before = (tmp_path / "job.json").read_text()
    stand_in(commands, "squeue", f"echo '4_1|RUNNING|None|{tmp_path}/s.sh'")
    assert active_jobs([tmp_path]) == {tmp_path: Job("running", "SLURM job 4_1")}
    assert (tmp_path / "job.json").read_text() == before
    assert lost_outcome(tmp_path) is None, "it may never have begun"


def test_a_controller_that_restarts_is_waited_for_before_the_options_are_judged(
    commands: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = tmp_path / "asked"
    stand_in(commands, "sbatch", f"[ -e {asked} ] || {{ touch {asked}; echo '{TIMED_OUT}' >&2; exit 1; }}")
    Slurm(tmp_path, {}, "name").check(1)
    assert caplog.text.count("it is tried again") == 1


def test_a_machine_of_no_cluster_is_told_at_once(commands: Path, tmp_path: Path) -> None:
    stand_in(commands, "sbatch", f"cat >&2 <<'EOF'\n{UNCONFIGURED}EOF\nexit 1")
    with pytest.raises(LinnaeusError, match=r"SLURM does not answer here: .*configuration source"):
        Slurm(tmp_path, {}, "name").check(1)


def test_a_job_that_the_controller_has_taken_is_not_submitted_again(commands: Path, tmp_path: Path) -> None:
    stand_in(
        commands, "sbatch",
        f"echo >> {tmp_path}/calls; echo \"44_0|RUNNING|None|${{@: -1}}\" > {tmp_path}/queue; "
        f"echo '{TIMED_OUT}' >&2; exit 1",
    )  # fmt: skip
    stand_in(commands, "squeue", f"cat {tmp_path}/queue")
    assert submitted(tmp_path / "slurm") == "44"
    assert (tmp_path / "calls").read_text() == "\n"


def test_what_sbatch_refuses_is_not_tried_again(commands: Path, tmp_path: Path) -> None:
    stand_in(
        commands, "sbatch", f"echo >> {tmp_path}/calls; echo 'sbatch: error: invalid account' >&2; exit 1"
    )
    with pytest.raises(LinnaeusError, match="sbatch has refused the job: invalid account"):
        submitted(tmp_path / "slurm")
    assert (tmp_path / "calls").read_text() == "\n"


def test_a_dry_run_is_judged_where_sbatch_is(
    commands: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = Slurm(tmp_path, {"plugin-option": "1"}, "name")
    stand_in(commands, "sbatch", "echo \"sbatch: unrecognized option '--plugin-option=1'\" >&2; exit 255")
    with pytest.raises(
        LinnaeusError, match="sbatch refuses the job: unrecognized option '--plugin-option=1'"
    ):
        launcher.dry_run(1)
    assert not caplog.text
    stand_in(commands, "sbatch", f"cat >&2 <<'EOF'\n{UNCONFIGURED}EOF\nexit 1")
    assert "#SBATCH --plugin-option=1" in launcher.dry_run(1), "nobody could judge it"
    assert "sbatch has not judged the options" in caplog.text


def test_a_job_that_begins_before_its_number_is_noted_keeps_the_run(
    commands: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two jobs of one script: sbatch was called twice, and the first one has the run."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    begun = f'sed -i \'s/.launcher/"id": "50_0", &/\' {folders[0]}/job.json'
    stand_in(commands, "sbatch", f"{begun}; echo 51")
    with caplog.at_level("INFO", "linnaeus"):
        Slurm(tmp_path / "slurm", {}, "name").submit([Task(folder, ("train",)) for folder in folders])
    assert [(read_record(folder) or {})["id"] for folder in folders] == ["50_0", "51_1"]
    assert "2 runs submitted as SLURM job 51_0 to 51_1" in caplog.text


class Started:
    """A job that this process plays: the environment of SLURM, with an srun that does what a test says."""

    def __init__(self, tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path / "run"
        (self.folder / "logs").mkdir(parents=True)
        self.script = tmp_path / "s.sh"
        self.commands, self._env = commands, monkeypatch
        self._requeued = tmp_path / "requeued"
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
        stand_in(
            commands, "scontrol", f"[ $1 = requeue ] && echo >> {self._requeued}; echo '{JOB.format(None)}'"
        )
        self.job = SlurmJob(("train",), str(self.folder))

    def run(self, does: str, restarts: int = 0, number: int = signal.SIGUSR1) -> int:
        """Run the job, whose srun gives this process the signal and then does something; its exit code."""
        submission(self.folder, self.script, 0)
        self.script.with_suffix(".0").unlink(missing_ok=True)
        self._env.setenv("SLURM_RESTART_COUNT", str(restarts))
        wait = "trap 'quit=1' TERM; " if number == signal.SIGUSR1 else "quit=1; "
        until = 'until [ "$quit" ]; do sleep 0.05; done'
        stand_in(self.commands, "srun", f"{wait}kill -{number} {os.getpid()}; {until}; {does}; exit 143")
        return self.job.run(self.script, 0)

    @property
    def num_requeues(self) -> int:
        return len(self._requeued.read_text()) if self._requeued.exists() else 0


@pytest.fixture
def started(tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(tmp_path, commands, monkeypatch)


def test_a_job_that_saves_nothing_in_its_time_is_not_queued_again_for_ever(started: Started) -> None:
    """srun gets SIGTERM from the job itself, which needs no controller for that."""
    assert started.run("true", restarts=0) == 143
    assert started.num_requeues == 1, "it may have found batch sizes"
    assert "queued again: the run begins anew" in (started.folder / "logs/output.txt").read_text()
    assert started.run("true", restarts=1) == 1
    outcome = read_outcome(started.folder)
    assert started.num_requeues == 1
    assert outcome is not None
    assert (outcome.exit_code, outcome.was_interrupted) == (143, True), "with more time it goes on"
    assert (outcome.reason or "").startswith(NOTHING_SAVED)
    assert NOTHING_SAVED in (started.folder / "logs/output.txt").read_text()


def test_a_preemption_is_no_time_that_was_over(started: Started) -> None:
    """The time of the third start is the first to be over; the negative control is the test above."""
    assert started.run("true", restarts=2) == 143
    assert started.num_requeues == 1


def test_a_checkpoint_between_gives_another_chance(started: Started) -> None:
    (started.folder / "checkpoints").mkdir()
    save = f"date +%N > {started.folder}/checkpoints/last.pt"
    codes = [started.run(does, restarts=number) for number, does in enumerate(("true", save, "true", "true"))]
    assert codes == [143, 143, 143, 1]


def test_the_controller_is_asked_once_why_a_job_failed(started: Started) -> None:
    """Its second answer may differ: the outcome would be final, and the run would be queued again."""
    later = f"echo '{JOB.format('2026-11-22T12:59:00')}'"
    asked = f"{started.script}.asked"
    stand_in(
        started.commands, "scontrol",
        f"[ \"$3\" = job ] || exit; [ -e {asked} ] && {{ {later}; exit; }}; "
        f"touch {asked}; echo '{JOB.format(None)}'",
    )  # fmt: skip
    stand_in(started.commands, "srun", "exit 3")
    submission(started.folder, started.script, 0)
    assert started.job.run(started.script, 0) == 3
    outcome = read_outcome(started.folder)
    assert outcome is not None
    assert not outcome.was_interrupted
    assert "queued again" not in (started.folder / "logs/output.txt").read_text()


def test_an_image_without_scontrol_runs_the_job(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (started.commands / "scontrol").unlink()
    stand_in(started.commands, "srun", "exit 3")
    monkeypatch.setenv("PATH", str(started.commands))
    submission(started.folder, started.script, 0)
    assert started.job.run(started.script, 0) == 3
    outcome = read_outcome(started.folder)
    assert outcome is not None
    assert outcome.exit_code == 3


def test_a_job_that_saves_a_checkpoint_is_queued_again(started: Started) -> None:
    (started.folder / "checkpoints").mkdir()
    save = f"date +%N > {started.folder}/checkpoints/last.pt"
    assert started.run(save, restarts=4) == 143
    assert started.num_requeues == 1
    assert "queued again: the run goes on where it was" in (started.folder / "logs/output.txt").read_text()
    outcome = read_outcome(started.folder)
    assert outcome is not None
    assert outcome.was_interrupted


def test_a_job_that_is_cancelled_says_so(started: Started) -> None:
    assert started.run("true", number=signal.SIGTERM) == 143
    assert started.num_requeues == 0
    outcome = read_outcome(started.folder)
    assert outcome is not None
    assert (outcome.reason or "").startswith("SLURM job 7 was ended with SIGTERM, as by scancel")
    assert outcome.was_interrupted


def test_a_command_that_cannot_be_resumed_gets_no_second_time(started: Started) -> None:
    started.job = SlurmJob(("plan",), with_torchrun=False)
    assert started.run("true") == 1
    assert started.num_requeues == 0


def test_only_a_run_that_this_job_has_begun_is_resumed(tmp_path: Path) -> None:
    """By the times of its own file, whatever the clocks of two file servers say."""
    folder = tmp_path / "run"
    folder.mkdir()
    job = SlurmJob(("train",), resumed_in=str(folder))
    first = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    again = {**first, "SLURM_RESTART_COUNT": "1"}
    assert job._resume(first, tmp_path) == job._resume(again, tmp_path) == [], "there is no run"
    (folder / "config.yaml").touch()
    os.utime(folder / "config.yaml", (1, 1))  # a clock that is far behind
    assert job._resume(again, tmp_path) == [RESUME]
    assert job._resume(first, tmp_path) == [], "of an earlier job"
    assert job._resume(again, tmp_path) == []
    os.utime(folder / "config.yaml", (2, 2))
    assert job._resume(again, tmp_path) == [RESUME]


@pytest.fixture
def owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], bool]:
    """Whether a job of this number owns the run of the folder, by the script `s.sh` and the index 1."""

    def ask(number: str) -> bool:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", number.partition("_")[0])
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", number.partition("_")[2])
        return slurm_job._owns_run(tmp_path, tmp_path / "s.sh", 1)

    return ask


def test_which_runs_a_job_owns_run(tmp_path: Path, owns: Callable[[str], bool]) -> None:
    script = tmp_path / "s.sh"
    assert not owns("7_1"), "nobody has submitted it"
    submission(tmp_path, script, 0)
    assert not owns("7_1"), "another job's"
    submission(tmp_path, script, 1, id="8_1")
    assert not owns("7_1"), "another submission of the script has been noted"
    submission(tmp_path, script, 1)
    assert owns("7_1")
    assert (read_record(tmp_path) or {})["id"] == "7_1"
    assert owns("7_1"), "once more"
    save_outcome(tmp_path, Outcome(0, 1.0, None, {"training_s": 1.0}))
    assert not owns("7_1"), "it has ended well"


@pytest.mark.parametrize("noted", [{}, {"id": "8_1"}])
def test_of_two_jobs_of_one_script_the_first_has_the_run(
    tmp_path: Path, owns: Callable[[str], bool], noted: dict[str, str]
) -> None:
    """The second one has read the record before the first one noted its number, or its own was noted late."""
    submission(tmp_path, tmp_path / "s.sh", 1)
    assert owns("7_1")
    submission(tmp_path, tmp_path / "s.sh", 1, **noted)
    assert not owns("8_1")
    assert (read_record(tmp_path) or {})["id"] == "7_1", "so that the job is found"
    assert owns("7_1")
    assert (read_record(tmp_path) or {})["seconds"] == 5.0, "what was noted before stays"
