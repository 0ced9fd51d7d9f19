"""Runs that are resumed: in another place of the epoch, on other processes, with another configuration."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import linnaeus.run
from linnaeus.errors import DataError, LinnaeusError
from linnaeus.training.schedule import lr_factor
from tests.helpers import forks
from tests.helpers.forks import ROOT, Outcome
from tests.helpers.runs import SMALL, TORCHRUN, Child, Run, assert_same_bits, weights
from tests.helpers.small_runs import NAME, PLAIN, Clusters, checkpoint, curve, lines_of


class Crashing(Clusters):
    """Reading so many samples of a split ends the run with an error."""

    def __init__(self, split: str, crash_in: str = "", crash_after: int = 0, **options: Any) -> None:
        super().__init__(split, **options)
        self.until_crash = crash_after if split == crash_in else 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.until_crash -= 1
        if self.until_crash == 0:
            raise DataError("crashed")
        return super().__getitem__(index)


DATASET = "DATA.DATASET"
RESUMABLE = (
    *PLAIN, f"{DATASET}._target_={__name__}.Crashing", "MODEL.drop=0.3", "TRAIN.EMA.ENABLED=True",
    "TRAIN.AUTO_RESUME=True", "DATA.BATCH_SIZE=8", "SCHEDULE.WARMUP_STEPS=4", "SCHEDULE.MIN_LR_FRACTION=0.1",
)  # fmt: skip
"""Three epochs of 12 steps, 100 samples each. Later tokens override these."""


READ_BEFORE = {"train": 8, "val": 1}
"""Samples that are read to learn their shape, before training."""


def interrupted(after: int) -> str:
    """The option that ends a run with Ctrl-C once so many training samples have been read."""
    return f"{DATASET}.interrupt_after={after + READ_BEFORE['train']}"


def crashed(split: str, after: int) -> tuple[str, str]:
    """The options that end a run with an error once so many samples of a split have been read."""
    return f"{DATASET}.crash_in={split}", f"{DATASET}.crash_after={after + READ_BEFORE[split]}"


def in_processes(number: int, folder: Path, text: str, *argv: str) -> Outcome:
    """What a program does in several processes under torchrun."""
    program = folder / "ranks.py"
    program.write_text(text)
    command = (*TORCHRUN, f"--nproc_per_node={number}", program, *argv)
    return forks.python(*command, cwd=folder, env={"PYTHONPATH": str(ROOT)})


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


# The place in the schedule.


def rates_at(positions: list[float], total_steps: int) -> list[float]:
    factor = lr_factor("cosine", total_steps=total_steps, warmup_steps=4, min_fraction=0.1)
    return [0.01 * factor(position) for position in positions]


@pytest.mark.parametrize(("after", "epoch"), [(36, 0), (132, 1)])
@pytest.mark.parametrize(
    ("now", "effective"),
    [("DATA.BATCH_SIZE=20", 20), ("TRAIN.ACCUMULATION_STEPS=3", 24), ("DATA.BATCH_SIZE=2", 2)],
)
def test_with_another_batch_the_rate_goes_on_and_reaches_its_floor(
    run: Run, tmp_path: Path, after: int, epoch: int, now: str, effective: int
) -> None:
    assert run(*RESUMABLE, interrupted(after)).code == 130
    folder = tmp_path / "runs/plain"
    progress = checkpoint(folder)["progress"]
    assert (progress["epoch"], progress["samples"]) == (epoch, 40)
    outcome = run(*RESUMABLE, now)
    assert outcome.code == 0, outcome.err
    steps, rates, _ = curve(folder)
    assert steps == list(range(1, len(steps) + 1))
    saved, first = checkpoint(folder), progress["step"]
    per_epoch, total = saved["plan"]["STEPS_PER_EPOCH"], saved["plan"]["TOTAL_STEPS"]
    samples = [min(40 + n * effective, per_epoch * effective) for n in range(60 // effective)]
    positions = [epoch * per_epoch + done / effective for done in samples]
    assert rates[first : first + len(positions)] == pytest.approx(rates_at(positions, total))
    assert rates[-1] == pytest.approx(rates_at([total - 1], total)[0])
    groups = saved["state"]["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([0.001, 0.001])  # the floor


def test_a_run_with_more_epochs_goes_on_from_the_middle_of_one(run: Run, tmp_path: Path) -> None:
    assert run(*RESUMABLE, interrupted(132)).code == 130
    assert run(*RESUMABLE, "TRAIN.EPOCHS=5").code == 0
    folder = tmp_path / "runs/plain"
    steps, rates, _ = curve(folder)
    total = checkpoint(folder)["plan"]["TOTAL_STEPS"]
    assert steps == list(range(1, total + 1))
    assert total == 5 * 12
    assert rates[20:] == pytest.approx(
        rates_at([float(step) for step in range(20, total)], total)
    )  # on the longer curve now


def test_a_run_with_fewer_epochs_ends_where_it_is(run: Run, tmp_path: Path) -> None:
    assert run(*RESUMABLE, interrupted(228), "TRAIN.VALIDATE_EVERY=9").code == 130
    outcome = run(*RESUMABLE, "TRAIN.EPOCHS=2", "TRAIN.VALIDATE_EVERY=9")
    assert outcome.code == 0, outcome.err
    result = json.loads((tmp_path / "runs/plain/result.json").read_text())
    [validated] = lines_of(tmp_path / "runs/plain", "val")
    assert result["metrics"] == {name: validated[name] for name in result["metrics"]}


# Processes.

WATCHED = """
import hashlib, os, sys
import linnaeus.training.checkpoint
from linnaeus.main import cli
from linnaeus.training.checkpoint import Checkpoint
from tests.helpers.bits import bits

restore, rank = Checkpoint.restore, os.environ["RANK"]

def watched(self, target, world):
    restore(self, target, world)
    digest = hashlib.sha256(repr(bits(target.state_dict())).encode()).hexdigest()
    print(f"rank {rank} has {digest}", flush=True)

def refuse(*arguments, **options):
    raise OSError("this rank has no access to the file")

Checkpoint.restore = watched
if rank != "0":
    linnaeus.training.checkpoint.load_checkpoint = refuse
sys.exit(cli(sys.argv[1:]))
"""
"""Only rank 0 can read the checkpoint. Each rank prints a digest of what it holds then."""


@pytest.mark.distributed
def test_other_processes_get_all_of_it_from_rank_0_and_go_on_at_the_same_place(
    run: Run, tmp_path: Path
) -> None:
    options = (*RESUMABLE, f"{DATASET}.length=97", "OPTIMIZER.NAME=lamb")
    assert run(*options, interrupted(132)).code == 130
    before = checkpoint(tmp_path / "runs/plain")
    outcome = in_processes(3, tmp_path, WATCHED, *options)
    assert outcome.code == 0, outcome.err
    digests = [line.split()[-1] for line in outcome.out.splitlines() if line.startswith("rank ")]
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert "EFFECTIVE_BATCH 8 -> 24" in outcome.out
    folder = tmp_path / "runs/plain"
    after, (steps, rates, _) = checkpoint(folder), curve(folder)
    done, first = before["progress"]["samples"], before["progress"]["step"]
    assert steps == list(range(1, first + (97 - done) // 24 + 4 + 1))  # the last epoch has 4 steps
    position = before["progress"]["epoch"] * 4 + done / 24
    assert rates[first] == pytest.approx(rates_at([position], after["plan"]["TOTAL_STEPS"])[0])
    assert after["state"]["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.001)
    states = after["state"]["optimizer"]["param_groups"]
    assert [group["step"] for group in states] == [steps[-1]] * len(states)  # lamb counts in its groups


@pytest.mark.distributed
def test_two_processes_resumed_on_one_lose_nothing(run: Run, tmp_path: Path) -> None:
    first = in_processes(
        2, tmp_path, WATCHED, *RESUMABLE, "TRAIN.CHECKPOINT_EVERY_STEPS=4", *crashed("train", 40)
    )
    assert first.code != 0
    progress = checkpoint(tmp_path / "runs/plain")["progress"]
    assert (progress["step"], progress["samples"]) == (4, 64)
    outcome = run(*RESUMABLE)
    assert outcome.code == 0, outcome.err
    epoch = [line["step"] for line in lines_of(tmp_path / "runs/plain") if line["epoch"] == 0]
    assert epoch[-1] == 4 + (100 - 64) // 8


# What is kept in memory.


def test_nothing_of_the_checkpoint_is_alive_when_the_search_begins(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*RESUMABLE, "DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=8")
    assert run(*options, f"{NAME}whole").code == 0
    assert run(*options, interrupted(132)).code == 130
    tensors: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    load, find_sizes = torch.load, linnaeus.run._find_sizes

    def spy_on_load(*arguments: Any, **named: Any) -> Any:
        content = load(*arguments, **named)
        tensors.extend(weakref.ref(tensor) for tensor in content["state"]["model"].values())
        tensors.extend(weakref.ref(tensor) for tensor in content["state"]["ema"]["module"].values())
        return content

    def spy_on_search(*arguments: Any) -> Any:
        gc.collect()
        alive.append(sum(tensor() is not None for tensor in tensors))
        return find_sizes(*arguments)

    monkeypatch.setattr(torch, "load", spy_on_load)
    monkeypatch.setattr(linnaeus.run, "_find_sizes", spy_on_search)
    # Another bound on the trials lets it search anew, now over the state that was loaded.
    outcome = run(*options, "DATA.AUTOBATCH.MAX_TRIALS=9")
    monkeypatch.undo()
    assert outcome.code == 0, outcome.err
    assert len(tensors) > 8
    assert alive == [0]
    assert "batch sizes are kept" not in outcome.out
    assert_same_bits(weights(tmp_path / "runs/plain"), weights(tmp_path / "runs/whole"))
    states = [checkpoint(tmp_path / "runs" / name)["state"] for name in ("plain", "whole")]
    assert_same_bits(states[0]["ema"]["module"], states[1]["ema"]["module"])


# Another configuration.


def test_another_rate_is_refused_before_anything_is_touched(run: Run, tmp_path: Path) -> None:
    assert run(*RESUMABLE, interrupted(132)).code == 130
    before = files_of(tmp_path / "runs")
    for option, text in (
        ("OPTIMIZER.LR=0.05", "OPTIMIZER.LR (0.01 in the checkpoint, 0.05 now)"),
        ("SCHEDULE.NAME=linear", "SCHEDULE.NAME ('cosine' in the checkpoint, 'linear' now)"),
        ("OPTIMIZER.NAME=sgd", "OPTIMIZER.NAME ('adamw' in the checkpoint, 'sgd' now)"),
    ):
        outcome = run(*RESUMABLE, option)
        assert outcome.code == 1
        assert text in outcome.err
        assert len(outcome.err.splitlines()) == 1
    assert files_of(tmp_path / "runs") == before


def test_another_model_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    assert run(*RESUMABLE, interrupted(132)).code == 130
    before = files_of(tmp_path / "runs")
    outcome = run(*RESUMABLE, "MODEL.norm=BatchNorm1d")
    assert outcome.code == 1
    [line] = outcome.err.splitlines()
    assert "MODEL.norm (not set in the checkpoint, 'BatchNorm1d' now)" in line
    assert "EXPERIMENT.NAME" in line
    assert "running_mean" not in line
    assert files_of(tmp_path / "runs") == before


def test_a_model_whose_state_fits_is_resumed_and_said(run: Run) -> None:
    assert run(*RESUMABLE, interrupted(132)).code == 130
    outcome = run(*RESUMABLE, "MODEL.drop=0.1")
    assert outcome.code == 0, outcome.err
    assert "resumed with another MODEL.drop (0.3 in the checkpoint, 0.1 now)" in outcome.out


def test_another_seed_is_refused_and_other_training_is_said(run: Run) -> None:
    assert run(*RESUMABLE, interrupted(132)).code == 130
    outcome = run(*RESUMABLE, "EXPERIMENT.SEED=7")
    assert outcome.code == 1
    assert "EXPERIMENT.SEED (0 in the checkpoint, 7 now)" in outcome.err
    outcome = run(*RESUMABLE, "TRAIN.CLIP_GRAD_NORM=null", "TRAIN.EMA.DECAY=0.5")
    assert outcome.code == 0, outcome.err
    assert "resumed with another TRAIN.CLIP_GRAD_NORM (1.0 in the checkpoint, None now)" in outcome.out
    assert "resumed with another TRAIN.EMA.DECAY" in outcome.out


class CountingLoss(torch.nn.CrossEntropyLoss):
    """A loss with a state of its own: it weighs its samples by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        labels = targets if targets.ndim == 1 else targets[:, 0]
        outputs = outputs if isinstance(outputs, Tensor) else outputs[0]
        return super().forward(outputs, labels) * (1 + self.calls / 10)


def test_the_state_of_a_loss_is_resumed(run: Run, tmp_path: Path) -> None:
    own = f"LOSS._target_={__name__}.CountingLoss"
    assert run(*RESUMABLE, own, f"{NAME}whole").code == 0
    assert run(*RESUMABLE, own, interrupted(132)).code == 130
    outcome = run(*RESUMABLE, own)
    assert outcome.code == 0, outcome.err
    assert_same_bits(weights(tmp_path / "runs/plain"), weights(tmp_path / "runs/whole"))
    assert checkpoint(tmp_path / "runs/plain")["state"]["criterion"]["calls"] > 30


def test_a_new_rate_is_taken_where_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    assert run(*RESUMABLE, interrupted(132)).code == 130
    new = (
        "OPTIMIZER.LR=0.05",
        "OPTIMIZER.WEIGHT_DECAY=0.2",
        "SCHEDULE.NAME=constant",
        "TRAIN.RESUME_WITH=lr",
    )
    outcome = run(*RESUMABLE, *new)
    assert outcome.code == 0, outcome.err
    assert "TRAIN.RESUME_WITH lr: OPTIMIZER.LR (0.01 in the checkpoint, 0.05 now)" in outcome.out
    folder = tmp_path / "runs/plain"
    assert set(curve(folder)[1][20:]) == {0.05}
    groups = checkpoint(folder)["state"]["optimizer"]["param_groups"]
    assert sorted(group["weight_decay"] for group in groups) == [0, 0.2]
    assert checkpoint(folder)["config"]["OPTIMIZER"]["LR"] == 0.05
    assert run(*RESUMABLE, *new[:3], "TRAIN.EPOCHS=4").code == 0  # it is the checkpoint's rate now


def test_a_checkpoint_of_an_earlier_version_is_resumed(run: Run, tmp_path: Path) -> None:
    assert run(*RESUMABLE, f"{NAME}whole").code == 0
    assert run(*RESUMABLE, interrupted(132)).code == 130
    path = tmp_path / "runs/plain/checkpoints/last.pt"
    content = torch.load(path, weights_only=True)
    del content["config"]
    content["state"]["schedule"] = {"base_lrs": [0.01, 0.01], "last_epoch": 17, "lr_lambdas": [None, None]}
    torch.save(content, path)
    outcome = run(*RESUMABLE)
    assert outcome.code == 0, outcome.err
    assert_same_bits(weights(tmp_path / "runs/plain"), weights(tmp_path / "runs/whole"))


# Starts that fail.

FAILING: dict[str, tuple[str, ...]] = {
    "weights": ("MODEL._target_=linnaeus.models.build.build_model", "MODEL.nothing=1"),
    "data": (f"{DATASET}._target_=tests.nowhere.Missing",),
    "loss": ("LOSS._target_=torch.nn.MSELoss", "LOSS.nonsense=1"),
    "plan": ("TRAIN.EFFECTIVE_BATCH_SIZE=1000",),
    "first batch": crashed("train", 3),
}
FRESH = (*RESUMABLE, "TRAIN.AUTO_RESUME=False", "TRAIN.EPOCHS=1")


@pytest.mark.parametrize("reason", FAILING)
@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_fails_leaves_the_earlier_run_alone(
    run: Run, tmp_path: Path, reason: str, resume: bool
) -> None:
    assert run(*FRESH).code == 0
    before = files_of(tmp_path / "runs")
    if resume:
        shutil.rmtree(tmp_path / "runs/plain/checkpoints")  # nothing to resume, a run all the same
        before = files_of(tmp_path / "runs")
    outcome = run(*FRESH, *FAILING[reason], f"TRAIN.AUTO_RESUME={resume}")
    assert outcome.code in (1, 2), outcome.err
    after = files_of(tmp_path / "runs")
    if resume and reason == "first batch":  # a folder that is used as it is keeps the log of the start
        before, after = without_logs(before), without_logs(after)
    assert after == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["plain"]


def without_logs(files: dict[str, tuple[bytes, int]]) -> dict[str, tuple[bytes, int]]:
    return {name: content for name, content in files.items() if "/logs/" not in name}


def test_a_resumed_run_that_fails_in_its_first_step_is_what_it_was(run: Run, tmp_path: Path) -> None:
    options = (*FRESH, "TRAIN.AUTO_RESUME=True", "TRAIN.EPOCHS=2")
    assert run(*FRESH).code == 0
    before = without_logs(files_of(tmp_path / "runs"))
    assert run(*options, *crashed("train", 3)).code == 1
    assert without_logs(files_of(tmp_path / "runs")) == before
    assert run(*options, *crashed("train", 12)).code == 1  # the negative control: it has trained one step
    after = files_of(tmp_path / "runs")
    assert "plain/result.json" not in after
    assert after["plain/config.yaml"] != before["plain/config.yaml"]
    assert not (tmp_path / "runs/plain/.before").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_is_going_on_keeps_its_folder_until_it_is_killed(
    run: Run, tmp_path: Path, resume: bool
) -> None:
    folder = tmp_path / "runs/plain"
    child = Child(tmp_path, *FRESH, "TRAIN.EPOCHS=100000", "DATA.NUM_WORKERS=1")
    try:
        child.wait_for(lambda: (folder / "checkpoints/last.pt").exists())
        outcome = run(*FRESH, "TRAIN.EPOCHS=100000", f"TRAIN.AUTO_RESUME={resume}")
        assert outcome.code == 2
        assert (
            f"runs/plain is in use by a run that is still going on (process {child.process.pid} on"
            in outcome.err
        )
        assert {path.name for path in folder.parent.iterdir()} == {"plain"}
    finally:
        child.end(signal.SIGKILL)
    outcome = run(*FRESH, *crashed("train", 40), "TRAIN.EPOCHS=100000", f"TRAIN.AUTO_RESUME={resume}")
    assert "crashed" in outcome.err
    assert ("resumed after" in outcome.out) is resume


def test_a_run_beside_its_group_leaves_the_group_where_it_is(run: Run, tmp_path: Path) -> None:
    assert run(*FRESH, f"{NAME}group/one").code == 0
    before = files_of(tmp_path / "runs/group/one")
    assert run(*FRESH, f"{NAME}group").code == 0
    assert files_of(tmp_path / "runs/group/one") == before
    outcome = run(*FRESH, f"{NAME}group")
    assert outcome.code == 2
    assert "cannot be moved aside, because runs/group/one is the folder of another run" in outcome.err
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"group"}


def test_a_tracker_that_fails_leaves_the_earlier_run_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*FRESH).code == 0
    before = files_of(tmp_path / "runs")

    def fail(*arguments: Any, **options: Any) -> None:
        assert (tmp_path / "runs/plain.1").is_dir()  # it has been moved by now
        raise LinnaeusError("no tracker today")

    monkeypatch.setattr(linnaeus.run, "start_tracking", fail)
    outcome = run(*FRESH)
    assert outcome.code == 1
    assert "gets its name back" in outcome.out
    assert files_of(tmp_path / "runs") == before


def test_a_run_that_fails_after_its_first_step_keeps_its_place(run: Run, tmp_path: Path) -> None:
    """The negative control: what was trained is not thrown away."""
    assert run(*FRESH).code == 0
    assert run(*FRESH, *crashed("train", 12)).code == 1
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"plain", "plain.1"}
    assert (tmp_path / "runs/plain.1/result.json").exists()
    assert len(lines_of(tmp_path / "runs/plain")) == 1


def test_the_log_of_a_start_is_complete_in_its_file(run: Run, tmp_path: Path) -> None:
    options = (
        *FRESH,
        "DATA.AUTOBATCH.ENABLED=True",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=8",
        "DATA.AUTOBATCH.LOG_LEVEL=DEBUG",
    )
    for _ in range(2):
        assert run(*options).code == 0
    texts = [(tmp_path / "runs" / name / "logs/rank0.log").read_text() for name in ("plain.1", "plain")]
    trials = [text.count("trying batch size") for text in texts]
    assert trials[0] == trials[1] > 0
    assert "an earlier run of this name is now in" in texts[1]
    assert "an earlier run of this name is now in" not in texts[0]


def test_a_fresh_start_says_which_run_could_be_resumed(run: Run, tmp_path: Path) -> None:
    assert run(*FRESH).code == 0
    assert run(*FRESH, *crashed("train", 12)).code == 1
    outcome = run(*FRESH, "TRAIN.AUTO_RESUME=True")
    assert outcome.code == 0, outcome.err
    assert (
        "starting fresh; plain.1 has a checkpoint of epoch 1: EXPERIMENT.NAME plain.1 goes on" in outcome.out
    )


def test_a_finished_run_is_left_as_it_is(run: Run, tmp_path: Path) -> None:
    assert run(*FRESH).code == 0
    before = files_of(tmp_path / "runs")
    outcome = run(*FRESH, "TRAIN.AUTO_RESUME=True")
    assert outcome.code == 0
    assert "this run is finished: 1 epochs are done (TRAIN.EPOCHS 1)" in outcome.out
    assert "loss" not in outcome.out
    assert "images/s" not in outcome.out
    assert files_of(tmp_path / "runs") == before
    assert run(*FRESH, "TRAIN.AUTO_RESUME=True", "TRAIN.EPOCHS=2").code == 0
    assert len(lines_of(tmp_path / "runs/plain", "val")) == 2


def test_a_finished_run_without_its_result_writes_it(run: Run, tmp_path: Path) -> None:
    assert run(*FRESH).code == 0
    path = tmp_path / "runs/plain/result.json"
    before = json.loads(path.read_text())
    path.unlink()  # the process was killed after its last checkpoint
    assert run(*FRESH, "TRAIN.AUTO_RESUME=True").code == 0
    assert json.loads(path.read_text())["metrics"] == before["metrics"]


# Checkpoints within an epoch.


@pytest.mark.parametrize(
    ("crash", "at_step", "samples"),
    [
        (crashed("train", 75), 8, 64),
        pytest.param(crashed("train", 170), 20, 64, marks=pytest.mark.slow),
        (crashed("val", 1), 12, 96),  # all steps of the epoch are done, and its validation is not
        (crashed("val", 120), 24, 96),
    ],
)
def test_a_run_that_died_within_an_epoch_ends_as_if_it_had_not(
    run: Run, tmp_path: Path, crash: tuple[str, str], at_step: int, samples: int
) -> None:
    options = (*RESUMABLE, "TRAIN.CHECKPOINT_EVERY_STEPS=4")
    assert run(*options, f"{NAME}whole").code == 0
    assert run(*options, *crash).code == 1
    folder = tmp_path / "runs/plain"
    progress = checkpoint(folder)["progress"]
    assert (progress["step"], progress["samples"]) == (at_step, samples)
    assert progress["seconds"] > 0
    outcome = run(*options)
    assert outcome.code == 0, outcome.err
    assert_same_bits(weights(folder), weights(tmp_path / "runs/whole"))
    for split in ("train", "val"):
        lines = [lines_of(tmp_path / "runs" / name, split) for name in ("whole", "plain")]
        assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
        assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    assert (folder / "result.json").exists()


def test_without_the_key_the_same_death_costs_the_epoch(run: Run, tmp_path: Path) -> None:
    """The negative control."""
    assert run(*RESUMABLE, *crashed("train", 75)).code == 1
    assert not (tmp_path / "runs/plain/checkpoints").exists()


def test_a_loss_that_is_not_finite_is_found_before_the_next_checkpoint(run: Run, tmp_path: Path) -> None:
    options = (
        *RESUMABLE, "TRAIN.CHECKPOINT_EVERY_STEPS=1", "TRAIN.LOG_EVERY=100", "OPTIMIZER.NAME=sgd",
        "OPTIMIZER.LR=1e30", "TRAIN.CLIP_GRAD_NORM=None", "SCHEDULE.WARMUP_STEPS=0",
    )  # fmt: skip
    outcome = run(*options)
    assert outcome.code == 1
    assert "the last checkpoint is kept" in outcome.err
    assert (
        checkpoint(tmp_path / "runs/plain")["progress"]["step"] < 11
    )  # long before the first line is logged


def test_numbered_checkpoints_are_kept(run: Run, tmp_path: Path) -> None:
    assert run(*RESUMABLE, "TRAIN.CHECKPOINT_EVERY_STEPS=5", "TRAIN.KEEP_CHECKPOINTS=3").code == 0
    folder = tmp_path / "runs/plain/checkpoints"
    names = sorted(path.name for path in folder.iterdir())
    numbers = [name for name in names if name.startswith("step_")]
    assert numbers == ["step_00000030.pt", "step_00000035.pt", "step_00000036.pt"]
    assert (folder / numbers[-1]).samefile(folder / "last.pt")
    first = torch.load(folder / numbers[0], weights_only=True)["progress"]
    assert (first["step"], first["epoch"], first["samples"]) == (30, 2, 48)


@pytest.mark.parametrize(("minutes", "saved"), [("1e-9", True), ("60", False)])
def test_the_clock_decides_too(run: Run, tmp_path: Path, minutes: str, saved: bool) -> None:
    assert run(*RESUMABLE, f"TRAIN.CHECKPOINT_EVERY_MINUTES={minutes}", *crashed("train", 28)).code == 1
    path = tmp_path / "runs/plain/checkpoints/last.pt"
    assert path.exists() == saved
    if saved:
        assert checkpoint(tmp_path / "runs/plain")["progress"]["step"] == 3


@pytest.mark.distributed
def test_rank_0_decides_for_all_by_its_clock(tmp_path: Path) -> None:
    options = ("TRAIN.CHECKPOINT_EVERY_MINUTES=1e-9", "DATA.BATCH_SIZE=1", *crashed("train", 40))
    outcome = in_processes(2, tmp_path, WATCHED, *RESUMABLE, *options)
    assert outcome.code != 0
    content = checkpoint(tmp_path / "runs/plain")
    assert 0 < content["progress"]["step"] < 40, outcome.err
    assert len(content["rng"]) == 2
    assert not torch.equal(content["rng"][0]["torch"], content["rng"][1]["torch"])


# Full disks.


class Filling(Clusters):
    """Reading so many training samples fills the disk."""

    def __init__(self, split: str, disk: str, fill_after: int, **options: Any) -> None:
        super().__init__(split, **options)
        self.disk, self.until_full = Path(disk), fill_after if split == "train" else 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.until_full -= 1
        if self.until_full == 0:
            with suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        return super().__getitem__(index)


FULL = [
    (1, 2, "{folder}/config.yaml: cannot be written: No space left on device (EXPERIMENT.OUTPUT_DIR)"),
    (
        READ_BEFORE["train"] + 8, 1,
        "{folder}/metrics.jsonl cannot be written: the disk is full: {folder} has 0 GiB free",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("after", "code", "text"), FULL)
def test_a_full_disk_is_one_line_whichever_file_meets_it_first(
    run: Run, small_disk: Path, after: int, code: int, text: str
) -> None:
    options = (
        f"{DATASET}._target_={__name__}.Filling", f"{DATASET}.disk={small_disk}",
        f"{DATASET}.fill_after={after}", f"EXPERIMENT.OUTPUT_DIR={small_disk}/runs",
    )  # fmt: skip
    outcome = run(*FRESH, *options)
    assert outcome.code == code
    assert outcome.err.endswith(text.format(folder=small_disk / "runs/plain") + "\n")
    assert len(outcome.err.splitlines()) <= 2
    assert outcome.out.count("ends here, it cannot be written") <= 1
    assert "Logging error" not in outcome.out


# Keys.


def test_deterministic_kernels_set_up_cublas(
    run: Run, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    for before, after in ((None, ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        if before is not None:
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before)
        assert run(*FRESH, "TRAIN.DETERMINISTIC=True").code == 0
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == after
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert run(*FRESH, "TRAIN.DETERMINISTIC=False").code == 0
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(("seed", "code"), [(-1, 2), (2**63, 2), (2**63 - 1, 0)])
def test_a_seed_lies_in_63_bits(run: Run, seed: int, code: int) -> None:
    outcome = run(*SMALL, f"EXPERIMENT.SEED={seed}", "--print-config")
    assert outcome.code == code
    assert ("EXPERIMENT.SEED" in outcome.err) == (code == 2)


def test_the_largest_seed_trains(run: Run) -> None:
    assert run(*FRESH, f"EXPERIMENT.SEED={2**63 - 1}").code == 0
