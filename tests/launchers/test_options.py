"""The options that say where runs run, on every command, and the job scripts that they make."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from linnaeus.cli.parser import CommandParser
from linnaeus.launchers import sbatch
from linnaeus.launchers.interface import LaunchOptions
from tests.helpers.runs import SMALL, Run

SLURM = ("--launcher", "slurm", "--dry-run")


LINES = [
    ("A.B=1 --slurm nodes=2 TRAIN.EPOCHS 2", {"nodes": "2"}, "A.B=1 TRAIN.EPOCHS 2"),
    ("--slurm=nodes=2 model=resnet18", {"nodes": "2"}, "model=resnet18"),
    ("--slurm exclusive gres=gpu:a:4 --cfg x", {"exclusive": None, "gres": "gpu:a:4"}, "--cfg x"),
    ("--slurm nodes=2 --slurm mem=0 nodes=4 ~LOSS", {"nodes": "4", "mem": "0"}, "~LOSS"),
    ("runs/birds --slurm comment=a=b hold photos", {"comment": "a=b", "hold": None}, "runs/birds photos"),
    ("--slurm nodes=2 -- exclusive --jobs", {"nodes": "2"}, "exclusive --jobs"),
    ("--slurm time=0 signal=B:USR1@59", {"time": "0", "signal": "B:USR1@59"}, ""),  # 0 is no limit
    ("--slurm partitoin=low", {"partitoin": "low"}, ""),  # sbatch judges it
]  # fmt: skip


def launched(line: str) -> tuple[LaunchOptions, list[str], list[str]]:
    """Where a command runs, the other words, and what is wrong."""
    options = Namespace()
    found = CommandParser("train", description="", details="").words(line.split(), options)
    assert found is not None
    return options.launch, *found


@pytest.mark.parametrize(("line", "slurm", "rest"), LINES)
def test_options_of_sbatch_end_where_others_begin(line: str, slurm: dict[str, str | None], rest: str) -> None:
    launch, words, problems = launched(f"--launcher slurm {line}")
    assert (launch.slurm, words, problems) == (slurm, rest.split(), [])


@pytest.mark.parametrize(
    ("line", "named"),
    [("train --launcher slrum", "slrum"),
     ("analyze --launcher slurm --dry-run TRAIN.EPOCH=1", "TRAIN.EPOCH")],
)  # fmt: skip
def test_a_mistake_ends_a_command_before_it_does_anything(
    run: Run, line: str, named: str, tmp_path: Path
) -> None:
    outcome = run(*line.split())
    assert outcome.code == 2, outcome
    assert named in outcome.err
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_prints_the_script_of_a_sweep_and_touches_nothing(run: Run, tmp_path: Path) -> None:
    resources = ("--slurm", "partition=gpu", "gpus-per-node=4", "nodes=2", "time=4:00:00", "exclusive")
    outcome = run("sweep", *SMALL, "EXPERIMENT.SEED=0,1,2", *SLURM, "--jobs", "2", *resources)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    for line in (
        "#!/bin/bash", "#SBATCH --array=0-2%2", "#SBATCH --partition=gpu", "#SBATCH --gpus-per-node=4",
        "#SBATCH --nodes=2", "#SBATCH --time=4:00:00", "#SBATCH --exclusive", "#SBATCH --requeue",
        "#SBATCH --ntasks-per-node=1", f"#SBATCH --signal=B:USR1@{sbatch.GRACE_S}",
        "#SBATCH --open-mode=append", "#   2: EXPERIMENT.SEED=2",
    ):  # fmt: skip
        assert lines.count(line) == 1, (line, outcome.out)
    content = tmp_path / "runs/small/slurm/SUBMISSION.json"
    assert f"exec {sys.executable} -u -m linnaeus.launchers.slurm_job {shlex.quote(str(content))}" in lines
    assert "srun --nodes=2 --ntasks=2 " in outcome.out
    assert "linnaeus.launchers.torchrun --nnodes=2 --nproc-per-node=4 " in outcome.out
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("command", "with_torchrun"), [("train", True), ("plan", False)])
def test_a_dry_run_of_one_command(
    run: Run, caplog: pytest.LogCaptureFixture, command: str, with_torchrun: bool
) -> None:
    outcome = run(command, *SMALL, *SLURM, "--slurm", "job-name=mine", "gpus-per-node=4", "container-image=x")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("#SBATCH --job-name=mine") == outcome.out.count("--job-name") == 1
    assert "--array" not in outcome.out
    assert "--time" not in outcome.out, "that of the partition holds"
    assert ("linnaeus.launchers.torchrun" in outcome.out) == with_torchrun
    assert f"-m linnaeus.main {command} " in outcome.out
    assert "#SBATCH --container-image=x\n" in outcome.out, "plugins have options of their own"
    assert "cpus-per-task" in outcome.out, "a note, as SLURM's default is one core"
    assert ("gpus-per-node" in caplog.text) != with_torchrun, "one process leaves three GPUs idle"


def test_torchrun_does_not_submit_a_job_for_each_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    outcome = run("train", *SMALL, *SLURM)
    assert outcome.code == 2, outcome
    assert "torchrun" in outcome.err
    assert "#SBATCH" not in outcome.out


def test_a_dry_run_of_a_local_sweep_divides_the_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    outcome = run("sweep", "EXPERIMENT.SEED=0,1,2", "--jobs", "2", "--dry-run")
    assert outcome.code == 0, outcome.err
    first, second, third = [line for line in outcome.out.splitlines() if "linnaeus.main" in line]
    assert first.startswith("CUDA_VISIBLE_DEVICES=4,5 OMP_NUM_THREADS=2 ")
    assert second.startswith("CUDA_VISIBLE_DEVICES=6,7 OMP_NUM_THREADS=2 ")
    assert "linnaeus.launchers.torchrun --standalone --nproc-per-node=2 -m linnaeus.main --cfg" in first
    assert third.split()[0] == first.split()[0]
