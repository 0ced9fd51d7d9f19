"""The job script of docs/ranks.md on a real SLURM: stopped twice, its run ends like one undisturbed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import TORCHRUN, assert_same_bits, free_ports, wait_until, weights
from tests.slurm import cluster
from tests.slurm.cluster import ENV, EXPERIMENT, Cluster, validations

pytestmark = cluster.MARKS

RESOURCES = ("--nodes=1", "--gpus-per-node=2", "--cpus-per-task=2", "--time=30")
"""Those of the tests' cluster, in place of the script's own."""
PROBE = """\
#!/bin/bash
trap "echo $1 USR1" USR1
trap "echo $1 TERM; exit" TERM
echo "$1 is up"
if [ "$1" = shell ]; then srun --ntasks=1 "$2" task & fi
while true; do sleep 0.1; done
"""
"""A batch shell, or with the argument `task` a task of it, that prints which signals it gets."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), **ENV) as running:
        yield running


def page_script() -> str:
    """The job script of the page."""
    page = (ROOT / "docs/ranks.md").read_text()
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```", page, re.MULTILINE | re.DOTALL)
    return str(script)


def write_job(folder: Path) -> Path:
    """The page's script, with a port that is free, beside the experiment that it trains."""
    script = page_script()
    assert script.count(":29500") == 1
    (folder / "my_exp.yaml").write_text(EXPERIMENT)
    path = folder / "job.sh"
    path.write_text(script.replace(":29500", f":{free_ports(1)[0]}"))
    return path


def another_epoch(folder: Path) -> Callable[[], bool]:
    """Whether an epoch, with its checkpoint, has ended since this call."""
    before = len(validations(folder))
    return lambda: len(validations(folder)) > before + 1


def test_a_job_that_is_preempted_and_later_out_of_time_ends_as_one_undisturbed(
    slurm: Cluster, tmp_path: Path
) -> None:
    job = slurm.submit(write_job(tmp_path), *RESOURCES)
    output = tmp_path / f"slurm-{job}.out"

    wait_until(another_epoch(tmp_path), log=output)
    urgent = slurm.call("sbatch", "--parsable", "--partition=high", "--ntasks=2", "--wrap=true")
    slurm.wait_for(job, "Restarts", "1")
    slurm.wait_for(urgent, "JobState", "COMPLETED")

    wait_until(another_epoch(tmp_path), log=output)
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # minutes; the script's signal is due
    slurm.wait_for(job, "Restarts", "2")
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    (tmp_path / "quick").touch()
    slurm.wait_for(job, "JobState", "COMPLETED")

    text = output.read_text()
    assert text.count("stopped by SIGTERM") == 2, text
    assert "linnaeus/run.py" not in text, "a traceback of ours"
    assert "will restart worker group" not in text
    assert (tmp_path / "runs/small/result.json").exists()
    assert validations(tmp_path) == [6 * epoch for epoch in range(1, 41)]
    assert_same_bits(weights(tmp_path / "runs/small"), weights(undisturbed(tmp_path / "undisturbed")))


def undisturbed(folder: Path) -> Path:
    """The folder of the same run, which nobody stops and SLURM knows nothing of."""
    folder.mkdir()
    (folder / "my_exp.yaml").write_text(EXPERIMENT)
    (folder / "quick").touch()
    command = [*TORCHRUN, "--nproc_per_node=2", "-m", "linnaeus.main", "--cfg", "my_exp.yaml"]
    outcome = forks.python(*command, "DATA.AUTOBATCH.ENABLED", "True", cwd=folder, env=ENV)
    assert outcome.code == 0, outcome.err
    return folder / "runs/small"


def test_a_job_that_fails_is_not_queued_again(slurm: Cluster, tmp_path: Path) -> None:
    """Without GPUs the number of processes is empty."""
    job = slurm.submit(write_job(tmp_path), "--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2")
    slurm.wait_for(job, "JobState", "FAILED")
    assert slurm.show(job)["Restarts"] == "0"
    assert "nproc_per_node" in (tmp_path / f"slurm-{job}.out").read_text()


def test_tasks_without_torchrun_are_refused_with_the_command_that_works(
    slurm: Cluster, tmp_path: Path
) -> None:
    write_job(tmp_path)
    (tmp_path / "quick").touch()
    options = "--cfg my_exp.yaml TRAIN.EPOCHS 1"
    refused = slurm.try_call(
        "srun", "--ntasks=2", sys.executable, "-m", "linnaeus.main", *options.split(), cwd=tmp_path
    )
    assert refused.code == 2, refused
    assert not (tmp_path / "runs").exists()
    (command,) = set(re.findall(r"srun .* linnaeus\.main \.\.\.", refused.err))
    for name, value in (("GPUS", "2"), ("HEAD:29500", f"localhost:{free_ports(1)[0]}"), ("...", options)):
        assert name in command
        command = command.replace(name, value)
    works = slurm.try_call("salloc", "--ntasks=2", "bash", "-c", command, cwd=tmp_path)
    assert works.code == 0, works
    assert validations(tmp_path) == [6], "of two processes"


def test_which_processes_slurm_signals(slurm: Cluster, tmp_path: Path) -> None:
    """As the page says, and as its script needs it."""
    path = tmp_path / "probe.sh"
    path.write_text(PROBE)
    path.chmod(0o700)
    output = tmp_path / "output"
    job = slurm.call("sbatch", "--parsable", f"--output={output}", path, "shell", path, cwd=tmp_path)

    def lines() -> list[str]:
        return output.read_text().splitlines() if output.exists() else []

    wait_until(lambda: {"shell is up", "task is up"} <= {*lines()})
    slurm.call("scancel", "--signal=USR1", job)
    wait_until(lambda: "task USR1" in lines())
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: "shell USR1" in lines())
    assert not {"task TERM", "shell TERM"} & {*lines()}
    slurm.call("scancel", job)
    wait_until(lambda: {"task TERM", "shell TERM"} <= {*lines()})
    assert lines().count("shell USR1") == 1, "without --batch or --full a signal is for the steps"
