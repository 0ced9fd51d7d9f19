import re
import signal
from pathlib import Path

import pytest

from linnaeus.runtime.run_folder import read_state
from linnaeus.sweep.slurm import TIME_IS_OVER
from tests.helpers.run_files import figures
from tests.helpers.runs import wait_until
from tests.helpers.small_runs import validations_of
from tests.slurm import cluster
from tests.slurm.cluster import (
    ENV,
    EXPERIMENT,
    LINNAEUS,
    ON_SLURM,
    QUEUED_AGAIN,
    Cluster,
    Shell,
    queue,
)

pytestmark = [*cluster.MARKS, pytest.mark.timeout(900)]

SWEEP = ("sweep", "--cfg", "my_exp.yaml", "EXPERIMENT.SEED=range(0,4)", "TRAIN.EPOCHS=4")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), **ENV) as running:
        yield running


@pytest.fixture
def two_nodes(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), num_nodes=2, **ENV) as running:
        yield running


@pytest.fixture
def run_folder(tmp_path):
    """The folder of the run or the sweep of `EXPERIMENT`."""
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    return tmp_path / "runs/small"


def outputs_of(run_folder):
    return "".join(path.read_text() for path in run_folder.glob("slurm/*.out"))


def test_a_sweep_survives_preemption_timeout_and_lost_controller(slurm, tmp_path, run_folder):
    """Two workers: one is preempted, one is out of time; a second array comes while they run."""
    folders = [run_folder / f"EXPERIMENT.SEED={seed}" for seed in range(4)]
    shell = Shell(slurm, tmp_path, *SWEEP, *ON_SLURM)
    for folder in folders[:2]:
        wait_until((folder / "checkpoints/last.pt").exists, log=shell.log)
    (array,) = {job.partition("_")[0] for job in queue(slurm)}
    urgent = slurm.call("sbatch", "--parsable", "--partition=high", "--ntasks=1", "--wrap=true")
    slurm.wait_for(urgent, "JobState", "COMPLETED")

    def restarts():
        return [slurm.show(f"{array}_{number}")["Restarts"] for number in range(2)]

    wait_until(lambda: "1" in restarts(), log=shell.log)
    stays = f"{array}_{restarts().index('0')}"
    # What SLURM does when time is nearly over.
    slurm.call("scancel", "--batch", "--signal=USR1", stays)
    slurm.wait_for(stays, "Restarts", "1")
    slurm.stop_controller()
    slurm.call(*LINNAEUS, "sweep", "--status", "runs/small", cwd=tmp_path)
    slurm.start_controller()
    assert shell.end(signal.SIGINT) == 130
    assert f"scancel {array}" in shell.log.read_text()

    again = Shell(slurm, tmp_path, *SWEEP, *ON_SLURM)
    wait_until(lambda: len({job.partition("_")[0] for job in queue(slurm)}) == 2, log=again.log)
    (tmp_path / "quick").touch()
    wait_until(lambda: all(read_state(one).status == "finished" for one in folders), limit_s=300)
    assert again.end() == 0, again.log.read_text()
    said = outputs_of(run_folder)
    assert (said.count("preempted"), said.count(TIME_IS_OVER)) == (1, 1), said
    assert "Traceback" not in said

    local = Shell(slurm, tmp_path, *SWEEP, "EXPERIMENT.NAME=here", "--jobs", "2")
    assert local.end() == 0, local.log.read_text()
    ours, expected = (
        [entry["curve"] for entry in figures(folder)]
        for folder in (run_folder, tmp_path / "runs/here")
    )
    assert ours == expected
    assert all(validations_of(folder) == [12, 24, 36, 48] for folder in folders)


def test_cancelled_workers_leave_their_runs_interrupted(slurm, tmp_path, run_folder):
    words = ("sweep", "--cfg", "my_exp.yaml", "EXPERIMENT.SEED=0,1", *ON_SLURM)
    shell = Shell(slurm, tmp_path, *words)
    wait_until(lambda: len([*run_folder.glob("*/checkpoints/last.pt")]) == 2, log=shell.log)
    slurm.call("scancel", queue(slurm)[0].partition("_")[0])
    assert shell.end() == 1, shell.log.read_text()
    assert [entry["status"] for entry in figures(run_folder)] == ["interrupted"] * 2
    assert QUEUED_AGAIN not in outputs_of(run_folder)


def test_a_run_over_two_nodes_goes_on_when_its_time_is_over(two_nodes, tmp_path, run_folder):
    """Two processes on each, in a folder where another run has been."""
    run_folder.mkdir(parents=True)
    (run_folder / "config.yaml").write_text("earlier")
    words = ("train", "--cfg", "my_exp.yaml", "TRAIN.EPOCHS=8", "--launcher", "slurm", "--slurm")
    resources = ("nodes=2", "gpus-per-node=2", "cpus-per-task=2", "time=30")
    said = two_nodes.call(*LINNAEUS, *words, *resources, cwd=tmp_path)
    (job,) = re.findall(
        r"submitted as SLURM job (\d+): linnaeus train --cfg my_exp.yaml TRAIN.EPOCHS=8\n", said
    )
    (log,) = re.findall(r"^log: +(\S+)$", said, re.MULTILINE)
    assert f"scancel {job}" in said
    wait_until(lambda: len(validations_of(run_folder)) > 1)
    two_nodes.call("scancel", "--batch", "--signal=USR1", job)  # what SLURM does then
    two_nodes.wait_for(job, "Restarts", "1")
    (tmp_path / "quick").touch()
    two_nodes.wait_for(job, "JobState", "COMPLETED", timeout_s=300)
    text = Path(log).read_text()
    assert text.count(f"{QUEUED_AGAIN}, because {TIME_IS_OVER}") == 1, text
    assert text.count("resumed") == 1, text
    assert "x 4 ranks" in text
    assert "Traceback" not in text
    assert validations_of(run_folder) == [3, 6, 9, 12, 15, 18, 21, 24]
    earlier = [path.read_text() for path in (tmp_path / "runs").glob("small.*/config.yaml")]
    assert earlier == ["earlier"]
