"""Sweeps and single commands as jobs of a real SLURM."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from linnaeus.launchers.slurm_job import TIME_IS_OVER
from tests.helpers.runs import wait_until
from tests.slurm import cluster
from tests.slurm.cluster import (
    ENV,
    EXPERIMENT,
    LINNAEUS,
    ON_SLURM,
    QUEUED_AGAIN,
    Cluster,
    Shell,
    entries,
    queue,
    validations,
    validations_of,
)

pytestmark = [*cluster.MARKS, pytest.mark.timeout(900)]

SWEEP = ("sweep", "--cfg", "my_exp.yaml", "EXPERIMENT.SEED=range(0,8)", "TRAIN.EPOCHS=8")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), **ENV) as running:
        yield running


THREE = ("sweep", "--cfg", "my_exp.yaml", "EXPERIMENT.SEED=0,1,2", "TRAIN.EPOCHS=1")
KILLS = """\
#!/bin/bash
for word; do if [ "$word" = --test-only ]; then exec "$REAL" "$@"; fi; done
"$REAL" "$@" && kill -KILL $PPID
"""
"""An sbatch that submits, and kills whoever has called it before they see the answer."""
COUNTS = """\
#!/bin/bash
echo >> looks
exec "$REAL" "$@"
"""
"""A command that leaves a line in `looks` for each call."""


def stand_in(slurm: Cluster, folder: Path, name: str, text: str) -> dict[str, str]:
    """The environment in which a command is a script that calls the real one."""
    path = folder / "bin" / name
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o700)
    return {"REAL": shutil.which(name) or "", "PATH": f"{path.parent}{os.pathsep}{slurm.env['PATH']}"}


def test_a_sweep_goes_on_through_preemption_leaving_and_a_restart_of_the_controller(
    slurm: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    sweep = tmp_path / "runs/small"
    folders = [sweep / f"EXPERIMENT.SEED={seed}" for seed in range(8)]

    shell = Shell(slurm, tmp_path, *SWEEP, *ON_SLURM)
    for folder in folders[:2]:
        wait_until((folder / "checkpoints/last.pt").exists, log=shell.log)
    (array,) = {job.partition("_")[0] for job in queue(slurm)}
    urgent = slurm.call("sbatch", "--parsable", "--partition=high", "--ntasks=1", "--wrap=true")
    slurm.wait_for(urgent, "JobState", "COMPLETED")

    assert shell.end(signal.SIGINT) == 130
    assert "scancel" in shell.log.read_text()
    assert len(queue(slurm)) == 8, "nobody has asked to cancel"

    env, looks = stand_in(slurm, tmp_path, "squeue", COUNTS), tmp_path / "looks"
    again = Shell(slurm, tmp_path, *SWEEP, *ON_SLURM, env=env)
    wait_until(lambda: again.log.read_text().count("goes on, SLURM job") == 8, log=again.log)
    slurm.stop_controller()
    status = slurm.try_call(*LINNAEUS, "sweep", "--status", "runs/small", cwd=tmp_path)
    assert status.code == 0, status
    assert status.out.count("unknown") >= 8, status.out
    before = len(looks.read_text())
    wait_until(lambda: len(looks.read_text()) > before + 1, log=again.log)
    assert again.process.poll() is None, again.log.read_text()
    slurm.start_controller()
    (tmp_path / "quick").touch()
    assert again.end() == 0, again.log.read_text()

    jobs = {slurm.show(f"{array}_{number}")["Restarts"] for number in range(8)}
    assert jobs == {"0", "1"}, "one was preempted, and queued again"
    assert not queue(slurm)
    assert {entry["status"] for entry in entries(sweep)} == {"finished"}
    assert all(validations_of(folder) == [12 * epoch for epoch in range(1, 9)] for folder in folders)

    outputs = [(folder / "logs/output.txt").read_text() for folder in folders]
    (preempted,) = [text for text in outputs if QUEUED_AGAIN in text]
    before, after = preempted.split(QUEUED_AGAIN)
    assert before.count("SIGTERM") >= after.count("resumed") == 1
    assert "preempted" in after.splitlines()[0]
    assert "Traceback" not in preempted

    log = again.log.read_text()
    local = Shell(slurm, tmp_path, *SWEEP, "EXPERIMENT.NAME=here", "--jobs", "2")
    assert local.end() == 0, local.log.read_text()
    undisturbed = entries(tmp_path / "runs/here")
    assert [entry["metrics"] for entry in entries(sweep)] == [entry["metrics"] for entry in undisturbed]
    assert table(log) == table(local.log.read_text()) != []


def test_a_single_run_goes_on_when_its_time_is_nearly_over(slurm: Cluster, tmp_path: Path) -> None:
    """Two processes, in a folder where another run has been."""
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "runs/small").mkdir(parents=True)
    (tmp_path / "runs/small/config.yaml").write_text("earlier")
    words = ("train", "--cfg", "my_exp.yaml", "TRAIN.EPOCHS=8")
    resources = ("gpus-per-node=2", "cpus-per-task=2", "time=30")
    said = slurm.call(*LINNAEUS, *words, "--launcher", "slurm", "--slurm", *resources, cwd=tmp_path)
    (job,) = re.findall(
        r"submitted as SLURM job (\d+): linnaeus train --cfg my_exp.yaml TRAIN.EPOCHS=8\n", said
    )
    (log,) = re.findall(r"^log: +(\S+)$", said, re.MULTILINE)
    assert f"scancel {job}" in said
    output = Path(log)
    wait_until(lambda: len(validations(tmp_path)) > 1)
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # what SLURM does then
    slurm.wait_for(job, "Restarts", "1")
    (tmp_path / "quick").touch()
    slurm.wait_for(job, "JobState", "COMPLETED", timeout_s=300)
    text = output.read_text()
    assert text.count(f"{QUEUED_AGAIN}, because {TIME_IS_OVER}") == 1, text
    assert "Traceback" not in text
    assert text.count("resumed") == 1, text
    assert validations(tmp_path) == [6 * epoch for epoch in range(1, 9)]
    earlier = [path.read_text() for path in (tmp_path / "runs").glob("small.*/config.yaml")]
    assert earlier == ["earlier"]


@pytest.fixture
def killed(slurm: Cluster, tmp_path: Path) -> Shell:
    """A sweep of three runs that is killed after sbatch has submitted it, and before it learns of that."""
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "quick").touch()
    env = stand_in(slurm, tmp_path, "sbatch", KILLS)
    shell = Shell(slurm, tmp_path, *THREE, *ON_SLURM, "hold", env=env)
    assert shell.end() == -signal.SIGKILL, shell.log.read_text()
    return shell


def test_a_sweep_that_is_killed_while_it_submits_is_joined(
    slurm: Cluster, killed: Shell, tmp_path: Path
) -> None:
    submitted = queue(slurm)
    assert len(submitted) == 3
    again = Shell(slurm, tmp_path, *THREE, *ON_SLURM, "hold")
    wait_until(lambda: again.log.read_text().count("goes on, SLURM job") == 3, log=again.log)
    slurm.call("scontrol", "release", submitted[0].partition("_")[0])
    assert again.end() == 0, again.log.read_text()
    assert queue(slurm) == []
    records = [json.loads(path.read_text()) for path in (tmp_path / "runs/small").glob("*/job.json")]
    assert sorted(record["id"] for record in records) == submitted, "nothing was submitted twice"


def test_a_job_that_nobody_knows_does_nothing(slurm: Cluster, killed: Shell, tmp_path: Path) -> None:
    """As when sbatch still waits for the controller: without the note, the same command submits again."""
    unknown = queue(slurm)
    for path in (tmp_path / "runs/small").glob("*/job.json"):
        path.unlink()
    again = Shell(slurm, tmp_path, *THREE, *ON_SLURM, "hold")
    wait_until(lambda: len(queue(slurm)) == 6, log=again.log)
    (known,) = {job.partition("_")[0] for job in queue(slurm)} - {job.partition("_")[0] for job in unknown}
    slurm.call("scontrol", "release", unknown[0].partition("_")[0])
    wait_until(lambda: len(queue(slurm)) == 3, log=again.log)
    slurm.call("scontrol", "release", known)
    assert again.end() == 0, again.log.read_text()
    wait_until(lambda: not queue(slurm))
    for job in unknown:
        said = (tmp_path / f"runs/small/slurm/{job}.out").read_text()
        assert "nothing is done" in said
    outputs = [path.read_text() for path in (tmp_path / "runs/small").glob("*/logs/output.txt")]
    assert [text.count("training speed:") for text in outputs] == [1, 1, 1]


def test_a_run_that_fails_is_not_queued_again_and_gives_its_reason(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "quick").touch()
    argv = ("sweep", "--cfg", "my_exp.yaml", "MODEL._target_=tests.slurm.slow.Linear,tests.slurm.slow.Curve")
    shell = Shell(slurm, tmp_path, *argv, "TRAIN.EPOCHS=1", *ON_SLURM)
    assert shell.end() == 1, shell.log.read_text()
    good, bad = entries(tmp_path / "runs/small")
    assert (good["status"], bad["status"]) == ("finished", "failed")
    assert "Curve" in bad["reason"], bad
    record = json.loads((tmp_path / bad["folder"] / "job.json").read_text())
    slurm.wait_for(record["id"], "JobState", "FAILED")
    assert slurm.show(record["id"])["Restarts"] == "0"


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_sbatch_judges_its_options_before_anything_is_done(
    slurm: Cluster, tmp_path: Path, command: str
) -> None:
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    argv = (command, "--cfg", "my_exp.yaml", *(["EXPERIMENT.SEED=1,2"] if command == "sweep" else []))
    for option, message in (
        ("partition=nowhere", "invalid partition"),
        ("gpu-count=4", "unrecognized option"),
    ):
        refused = slurm.try_call(*LINNAEUS, *argv, "--launcher", "slurm", "--slurm", option, cwd=tmp_path)
        assert refused.code == 2, refused
        assert "--slurm" in refused.err
        assert message in refused.err.lower()
    assert not queue(slurm)
    assert not [*tmp_path.rglob("asked.yaml")], "no folder of a run was made"


def test_ctrl_c_in_a_terminal_asks_before_it_cancels(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    terminal, keyboard = pty.openpty()
    shell = Shell(slurm, tmp_path, *SWEEP[:3], "EXPERIMENT.SEED=0,1,2", *ON_SLURM, stdin=keyboard)
    runs = [tmp_path / f"runs/small/EXPERIMENT.SEED={seed}" for seed in range(3)]
    wait_until((runs[0] / "checkpoints/last.pt").exists, log=shell.log)
    shell.process.send_signal(signal.SIGINT)
    wait_until(lambda: "cancel 3 jobs? [y/N]" in shell.log.read_text(), log=shell.log)
    assert len(queue(slurm)) == 3
    os.write(terminal, b"y\n")
    assert shell.end() == 130, shell.log.read_text()
    os.close(terminal)
    os.close(keyboard)
    wait_until(lambda: not queue(slurm))
    assert {entry["status"] for entry in entries(tmp_path / "runs/small")} == {"interrupted"}
    assert "saving a checkpoint" in (runs[0] / "logs/output.txt").read_text()


def table(text: str) -> list[list[str]]:
    """The rows of the printed table, without the columns of times."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line[:1] == "│"]
    return [[*row[:5], row[-1]] for row in rows]
