"""The options that say where runs run, on every command, and the job scripts that they make."""

from __future__ import annotations

import doctest
import shutil
import sys
from pathlib import Path

import pytest

from linnaeus.launchers import local, options, sbatch, slurm_commands, slurm_job
from linnaeus.launchers.options import split_launch_options
from linnaeus.launchers.sbatch import GRACE_S
from tests.helpers.runs import SMALL, Run

SLURM = ("--launcher", "slurm", "--dry-run")


@pytest.mark.parametrize(
    "module", [options, local, sbatch, slurm_commands, slurm_job], ids=lambda module: module.__name__
)
def test_the_examples_in_the_docstrings(module: object) -> None:
    found = doctest.testmod(module)  # type: ignore[arg-type]
    assert (found.failed, found.attempted > 0) == (0, True)


LINES = [
    ("A.B=1 --slurm nodes=2 TRAIN.EPOCHS 2", {"nodes": "2"}, "A.B=1 TRAIN.EPOCHS 2"),
    ("--slurm=nodes=2 model=resnet18", {"nodes": "2"}, "model=resnet18"),
    ("--slurm exclusive gres=gpu:a:4 --cfg x", {"exclusive": None, "gres": "gpu:a:4"}, "--cfg x"),
    ("--slurm nodes=2 --slurm mem=0 nodes=4 ~LOSS", {"nodes": "4", "mem": "0"}, "~LOSS"),
    ("--slurm comment=a=b --plot x.png", {"comment": "a=b"}, "--plot x.png"),
    ("runs/birds --slurm nodes=2 hold photos", {"nodes": "2", "hold": None}, "runs/birds photos"),
    ("--slurm nodes=2 -- exclusive --jobs", {"nodes": "2"}, "-- exclusive --jobs"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "found", "rest"), LINES, ids=[line for line, _, _ in LINES])
def test_options_of_sbatch_end_where_others_begin(line: str, found: dict[str, str | None], rest: str) -> None:
    taken, others, problems = split_launch_options(["--launcher", "slurm", *line.split()])
    assert (taken.slurm, others, problems) == (found, rest.split(), [])


def test_a_short_time_with_a_signal_of_its_own_is_taken() -> None:
    assert split_launch_options(["--launcher=slurm", "--slurm", "time=2", "signal=B:USR1@30"])[2] == []
    assert split_launch_options(["--launcher=slurm", "--slurm", "time=2:00:00"])[2] == []
    assert split_launch_options(["--launcher=slurm", "--slurm", "time=2:01", "signal=B:SIGUSR1"])[2] == []


def test_the_options_of_a_launcher_whose_name_is_misspelled_are_no_mistake(run: Run) -> None:
    outcome = run("train", "--launcher=slrum", "--slurm", "nodes=2", "--dry-run")
    assert outcome.err.startswith("1 problem in"), outcome.err


def test_a_group_of_ones_own_is_no_option_of_sbatch(tmp_path: Path) -> None:
    (tmp_path / "backbone").mkdir()
    (tmp_path / "backbone/small.yaml").touch()
    argv = ["--launcher=slurm", "--config-dir", str(tmp_path), "--slurm", "nodes=2", "backbone=small"]
    taken, rest, _ = split_launch_options(argv)
    assert (taken.slurm, rest[2:]) == ({"nodes": "2"}, ["backbone=small"])


BAD = [
    ("train --launcher slrum", "--launcher: 'slrum' is none; there are local and slurm; did you mean slurm?"),
    ("sweep --launcher=", "--launcher: '' is none"),
    ("sweep --jobs 0", "--jobs: '0' is not a whole number of at least 1"),
    ("train --jobs 2", "--jobs: is for linnaeus sweep"),
    ("train --slurm nodes=2", "--slurm: is for --launcher slurm, which is not given"),
    ("train --launcher slurm --slurm", "--slurm: needs options of sbatch"),
    ("train --launcher slurm --slurm photos", "--slurm: needs options of sbatch"),
    ("plan --launcher slurm --slurm ntasks=8", "--slurm ntasks: each node has one task"),
    ("train --launcher slurm --slurm signal=USR1@60", "--slurm signal=USR1@60: would end the ranks"),
    ("train --launcher slurm --slurm time=5", "--slurm time=5: a run is told 180 s before the end"),
    ("train --launcher slurm --slurm time=1 signal=B:USR1@59", "time=1: a run is told 59 s before the end"),
    ("train --launcher slurm --slurm time=2 signal=B:USR1", "time=2: a run is told 60 s before the end"),
    ("train --launcher slurm --slurm time=60 time-min=2", "--slurm time-min=2: a run is told 180 s before"),
    ("train --launcher slurm --slurm signal=B:USR1@0", "signal=B:USR1@0: leaves no time for a checkpoint"),
    ("train --launcher slurm --slurm signal=B:USR2@60", "--slurm signal=B:USR2@60: would end the ranks"),
    ("train --launcher slurm --slurm signal=B:TERM@60", "--slurm signal=B:TERM@60: would end the ranks"),
    ("train --launcher slurm --slurm chd=/", "--slurm chd: write the option in full: chdir"),
    ("train --dry-run", "--dry-run: shows the script of a job: give --launcher slurm too"),
    ("analyze --launcher slurm --dry-run TRAIN.EPOCH=1", "TRAIN.EPOCH"),
]


@pytest.mark.parametrize(("line", "text"), BAD, ids=[line for line, _ in BAD])
def test_mistakes(run: Run, line: str, text: str, tmp_path: Path) -> None:
    outcome = run(*line.split(), "DATA.BATCH_SIZE=8,16" if line.startswith("sweep") else "DATA.BATCH_SIZE=8")
    assert outcome.code == 2, outcome
    assert text in outcome.err
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_prints_the_script_of_a_sweep_and_touches_nothing(run: Run, tmp_path: Path) -> None:
    resources = ("--slurm", "partition=gpu", "gpus-per-node=4", "nodes=2", "time=4:00:00", "exclusive")
    outcome = run("sweep", *SMALL, "EXPERIMENT.SEED=0,1,2", *SLURM, "--jobs", "2", *resources)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    for line in (
        "#!/bin/bash", "#SBATCH --array=0-2%2", "#SBATCH --partition=gpu", "#SBATCH --gpus-per-node=4",
        "#SBATCH --nodes=2", "#SBATCH --time=4:00:00", "#SBATCH --exclusive", "#SBATCH --requeue",
        "#SBATCH --ntasks-per-node=1", f"#SBATCH --signal=B:USR1@{GRACE_S}", "#SBATCH --open-mode=append",
        "#   2: EXPERIMENT.SEED=2",
    ):  # fmt: skip
        assert lines.count(line) == 1, (line, outcome.out)
    content = tmp_path / "runs/small/slurm/SUBMISSION.json"
    assert f"exec {sys.executable} -u -m linnaeus.launchers.slurm_job {content}" in lines
    assert "srun --nodes=2 --ntasks=2 " in outcome.out
    assert "linnaeus.launchers.torchrun --nnodes=2 --nproc-per-node=4 " in outcome.out
    assert "# Processes: 8 (2 nodes, 4 on each)\n" in outcome.out
    assert "one CPU core" not in outcome.out, "exclusive has all"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("command", "with_torchrun"), [("train", True), ("analyze", False), ("plan", False)])
def test_a_dry_run_of_one_command(run: Run, tmp_path: Path, command: str, with_torchrun: bool) -> None:
    outcome = run(command, *SMALL, *SLURM, "--slurm", "job-name=mine")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("#SBATCH --job-name=mine") == outcome.out.count("--job-name") == 1
    assert "--array" not in outcome.out
    assert "--time" not in outcome.out, "that of the partition holds"
    assert ("linnaeus.launchers.torchrun" in outcome.out) == with_torchrun
    assert f"-m linnaeus.main {command} " in outcome.out
    assert outcome.out.count("# Processes: 1 (one node)\n") == with_torchrun
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_says_what_the_options_come_to(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    outcome = run("plan", *SMALL, *SLURM, "--slurm", "nodes=2", "gpus-per-node=4", "container-image=x")
    assert outcome.code == 0, outcome.err
    assert "srun --nodes=1 --ntasks=1 " in outcome.out
    assert "linnaeus plan is one process, and the job holds the GPUs or nodes of 8" in caplog.text
    assert "# --slurm: without cpus-per-task=N or cpus-per-gpu=N, SLURM gives" in outcome.out
    assert "#SBATCH --container-image=x\n" in outcome.out, "plugins have options of their own"
    several = run("train", *SMALL, *SLURM, "--slurm", "nodes=2-4")
    assert "--nnodes=NODES --nproc-per-node=1 " in several.out


NAMES = [
    ("gpus", "all nodes have the same number; give gpus-per-node=N"),
    ("no-requeue", "a run goes on after a preemption because its job goes back into the queue"),
    ("clusters", "the state of the jobs is asked of this cluster; log in on the other one"),
    ("help", "only shows something, and submits nothing"),
    ("arr", "write the option in full: array"),
    ("part", "write the option in full: partition"),
]


@pytest.mark.parametrize(("name", "why"), NAMES)
def test_names_of_options_that_cannot_be_given(name: str, why: str) -> None:
    assert sbatch.problems_with({name: "1", "nodes": "2", "partitoin": "low"}) == [f"--slurm {name}: {why}"]


@pytest.mark.parametrize("time", ["0", "0:00:00", "UNLIMITED", "7"])
def test_times_that_are_long_enough(time: str) -> None:
    """For sbatch 0 is no limit."""
    assert sbatch.problems_with({"time": time}) == []


def test_misspelled_options_where_sbatch_cannot_be_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = run("train", *SMALL, *SLURM, "--slurm", "partitoin=low")
    assert outcome.code == 2, outcome
    assert "--slurm partitoin: no such option of sbatch; did you mean partition?" in outcome.err
    assert run("train", *SMALL, *SLURM, "--slurm", "of-a-plugin=low").code == 0


def test_a_folder_whose_name_slurm_would_change_is_refused(run: Run, tmp_path: Path) -> None:
    outcome = run("sweep", *SMALL, "EXPERIMENT.NAME=lr10%a", "EXPERIMENT.SEED=0,1", *SLURM)
    assert outcome.code == 2, outcome
    assert "lr10%a/slurm: SLURM replaces % in the path of a log" in outcome.err


def test_torchrun_does_not_submit_a_job_for_each_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    outcome = run("train", *SMALL, *SLURM)
    assert outcome.code == 2, outcome
    assert "a job of SLURM starts torchrun by itself; run it without torchrun" in outcome.err
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


def test_a_machine_without_slurm_says_what_to_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    outcome = run("train", *SMALL, "--launcher", "slurm")
    assert outcome.code == 2
    assert "--launcher slurm: there is no sbatch here" in outcome.err
    assert not [*tmp_path.iterdir()]


def test_without_submitit_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    outcome = run("train", *SMALL, *SLURM)
    assert outcome.code == 2
    assert "pip install 'linnaeus[sweep]'" in outcome.err
