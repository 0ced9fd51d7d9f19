"""Ranks that differ, fail, are stopped and start again, as real processes under torchrun."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from linnaeus.config.schema import DistConfig
from linnaeus.dist import join
from linnaeus.errors import ConfigError
from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.odd_ranks import KINDS, PLACES
from tests.helpers.runs import SMALL, assert_same_bits, free_ports, wait_until, weights

pytestmark = pytest.mark.distributed

JOB = (
    *(option for option in SMALL if not option.startswith(("MODEL.", "DATA.DATASET."))),
    "DATA.DATASET._target_=tests.helpers.odd_ranks.Dataset",
    "MODEL.NAME=test_resnet",
    "DATA.IMG_SIZE=8",
    "DATA.BATCH_SIZE=8",
    "DATA.AUTOBATCH.ENABLED=True",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=8",
    "TRAIN.AUTO_RESUME=True",
)


class Ended(NamedTuple):
    code: int
    text: str
    seconds: float


class Ranks:
    """A torchrun whose ranks may be odd; see `tests.helpers.odd_ranks`. Nothing of it outlives the test."""

    def __init__(self, folder: Path, *argv: str, options: Sequence[str] = (), **env: str) -> None:
        self.folder = folder
        self.log = folder / f"torchrun{len(list(folder.glob('torchrun*')))}.txt"
        options = options or ("--standalone", "--nproc_per_node=2")
        command = ["-m", "torch.distributed.run", *options, "-m", "tests.helpers.odd_ranks", *argv]
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = forks.start(
                command, cwd=folder, env={"PYTHONPATH": str(ROOT), "QUICK_BEATS": "1", **env}, stdout=log,
                stderr=log,
            )  # fmt: skip

    def children(self) -> list[psutil.Process]:
        """Torchrun's descendants, in the order of their start."""
        with suppress(psutil.Error):
            found = psutil.Process(self.process.pid).children(recursive=True)
            return sorted(found, key=lambda child: (child.create_time(), child.pid))
        return []

    def wait_for(self, path: str) -> None:
        """Until this file of the folder exists."""
        wait_until((self.folder / path).exists, self.process, self.log)

    def end(self, timeout_s: float = 120) -> Ended:
        """Wait for the end; a job that hangs, or leaves a process behind, fails the test."""
        seen = set(self.children())
        try:
            deadline = time.monotonic() + timeout_s
            while (code := self.process.poll()) is None:
                assert time.monotonic() < deadline, f"it hangs: {self.log.read_text()}"
                seen.update(self.children())
                time.sleep(0.1)
            seconds = time.monotonic() - self.started
            _, alive = psutil.wait_procs(seen, timeout=5)
            assert not alive, f"{alive} are left: {self.log.read_text()}"
        finally:
            self.process.kill()
            for child in seen:
                with suppress(psutil.Error):
                    child.kill()
        return Ended(code, self.log.read_text(), seconds)


def run_job(folder: Path, *argv: str, **env: str) -> Ended:
    return Ranks(folder, *JOB, *argv, **env).end()


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "runs/small/metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["split"] == "val"]


# --- ranks that differ ---


def test_the_sizes_of_the_checkpoint_are_kept_where_the_device_has_another_name_on_each_rank(
    tmp_path: Path,
) -> None:
    first = run_job(tmp_path, "TRAIN.EPOCHS=1", ODD_DEVICES="1")
    assert first.code == 0, first.text
    again = run_job(tmp_path, "TRAIN.EPOCHS=2", ODD_DEVICES="1")
    assert again.code == 0, again.text
    assert "the checkpoint's batch sizes are kept" in again.text
    assert len(losses(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_start_and_build_its_data_later_than_silence_lasts(tmp_path: Path, rank: int) -> None:
    """Silence is 3 s here, and each delay 5 s."""
    ended = run_job(tmp_path, "TRAIN.EPOCHS=1", LATE=f"{rank}:5", LATE_DATA=f"{1 - rank}:5")
    assert ended.code == 0, ended.text


@pytest.mark.slow
def test_rank_0_may_need_longer_at_the_end_than_silence_lasts(tmp_path: Path) -> None:
    ended = run_job(tmp_path, LATE_END="0:6")
    assert ended.code == 0, ended.text
    assert (tmp_path / "runs/small/result.json").exists()


def test_ranks_with_different_data_are_refused(tmp_path: Path) -> None:
    ended = run_job(tmp_path, SHORTER="1:40")
    assert ended.code != 0
    assert "ranks 0 and 1 do not train the same: training samples: 96 and 56. All ranks need" in ended.text
    assert "linnaeus/run.py" not in ended.text, "a traceback of ours"


def test_ranks_with_different_options_are_refused(tmp_path: Path) -> None:
    ended = run_job(tmp_path, OTHER="1:OPTIMIZER.LR=0.5")
    assert ended.code != 0
    assert "ranks 0 and 1 do not train the same: OPTIMIZER.LR: 0.002 and 0.5. All ranks need" in ended.text


def test_ranks_of_which_one_is_to_resume_are_refused(tmp_path: Path) -> None:
    ended = run_job(tmp_path, OTHER="1:TRAIN.AUTO_RESUME=False")
    assert ended.code != 0
    assert "ranks 0 and 1 do not train the same: TRAIN.AUTO_RESUME: true and false. All" in ended.text


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, 5])
def test_a_checkpoint_at_the_end_of_an_epoch_changes_nothing_about_the_next(
    tmp_path: Path, every: int
) -> None:
    """An epoch of 6 steps that is not validated: BatchNorm's statistics stay as they are."""
    options = ("TRAIN.EPOCHS=2", "TRAIN.VALIDATE_EVERY=2", "TRAIN.CHECKPOINT_EVERY=9")
    often = f"TRAIN.CHECKPOINT_EVERY_STEPS={every}"
    assert run_job(tmp_path, *options).code == 0
    assert run_job(tmp_path, *options, often, "EXPERIMENT.NAME=often").code == 0
    assert_same_bits(weights(tmp_path / "runs/small"), weights(tmp_path / "runs/often"))


def test_tasks_of_slurm_without_torchrun_are_refused_with_the_command_that_works(tmp_path: Path) -> None:
    outcome = forks.python(
        "-m", "linnaeus.main", *JOB, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "SLURM_STEP_NUM_TASKS": "2"}
    )
    assert outcome.code == 2
    assert "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 torchrun" in outcome.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("in_job", "in_step", "is_refused"),
    [("2", "2", True), ("2", None, False), ("2", "1", False), ("1", "2", False)],
    ids=["srun", "sbatch", "salloc", "sbatch by a task of another step"],
)
def test_only_tasks_that_run_side_by_side_are_refused(
    monkeypatch: pytest.MonkeyPatch, in_job: str, in_step: str | None, is_refused: bool
) -> None:
    """The variables are those of SLURM 22.05."""
    monkeypatch.setenv("SLURM_NTASKS", in_job)
    if in_step is not None:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", in_step)
    with (
        pytest.raises(ConfigError, match="SLURM has started 2 tasks") if is_refused else nullcontext(),
        join("cpu", DistConfig()) as world,
    ):
        assert world.world_size == 1


def test_a_mistake_in_the_configuration_is_shown_when_rank_0_is_behind(tmp_path: Path) -> None:
    ended = Ranks(tmp_path, *JOB, "MODEL.NAME=resnet5O", LATE="0:1").end()
    assert ended.code != 0
    assert "'resnet5O' is not a timm model" in ended.text


# --- stopping ---


LONG = ("TRAIN.EPOCHS=12", "DATA.NUM_WORKERS=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_job(folder, *LONG, WANDB_MODE="offline").code == 0
    return folder / "runs/small"


@pytest.mark.parametrize("name", [pytest.param("SIGINT", marks=pytest.mark.slow), "SIGTERM"])
def test_a_signal_to_torchrun_ends_the_run_with_a_checkpoint(
    tmp_path: Path, undisturbed: Path, name: str
) -> None:
    job = Ranks(tmp_path, *JOB, *LONG)
    job.wait_for("runs/small/checkpoints/last.pt")
    job.process.send_signal(signal.Signals[name])
    ended = job.end()
    assert ended.code != 0
    assert f"stopped by {name}; TRAIN.AUTO_RESUME True goes on" in ended.text
    assert "linnaeus/training" not in ended.text, "a traceback of ours"
    assert "linnaeus/run.py" not in ended.text, "a traceback of ours"
    assert run_job(tmp_path, *LONG).code == 0
    assert_same_bits(weights(tmp_path / "runs/small"), weights(undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_of_them(tmp_path: Path, rank: int) -> None:
    ended = run_job(tmp_path, FAULT=f"SIGUSR1:{rank}:training in epoch 2")
    assert ended.code != 0
    assert "stopped by SIGUSR1; TRAIN.AUTO_RESUME True goes on" in ended.text
    again = run_job(tmp_path)
    assert again.code == 0, again.text
    assert len(losses(tmp_path)) == 2


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_whose_torchrun_was_killed_save_a_checkpoint_and_end(tmp_path: Path, num_ranks: int) -> None:
    options = ("--standalone", f"--nproc_per_node={num_ranks}")
    job = Ranks(tmp_path, *JOB, "TRAIN.EPOCHS=400", options=options)
    job.wait_for("runs/small/checkpoints/last.pt")
    ranks = job.children()
    job.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, job.log.read_text()
    assert "stopped by SIGTERM; TRAIN.AUTO_RESUME True goes on" in job.log.read_text()


@pytest.mark.slow
def test_a_step_of_five_seconds_leaves_time_for_the_checkpoint(tmp_path: Path) -> None:
    model = ("MODEL._target_=tests.helpers.odd_ranks.Slow", "DATA.AUTOBATCH.ENABLED=False", "TRAIN.EPOCHS=40")
    options = [option for option in JOB if not option.startswith("MODEL.")]
    job = Ranks(tmp_path, *options, *model, STEP_S="5")
    job.wait_for("runs/small/checkpoints/last.pt")
    job.process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    ended = job.end()
    assert "stopped by SIGTERM; TRAIN.AUTO_RESUME True goes on" in ended.text
    assert time.monotonic() - sent < 30, "torchrun's grace"


@pytest.mark.slow
def test_ranks_that_were_both_suspended_go_on(tmp_path: Path) -> None:
    """For longer than silence lasts: the one that wakes up first must not give up the other."""
    job = Ranks(tmp_path, *JOB, "TRAIN.EPOCHS=200")
    job.wait_for("runs/small/checkpoints/last.pt")
    ranks = job.children()
    for rank in ranks:
        rank.suspend()
    time.sleep(5)
    for rank in ranks:
        rank.resume()
    time.sleep(2)
    job.process.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM; TRAIN.AUTO_RESUME True goes on" in job.end().text


# --- other numbers of processes ---


def run_on(num_ranks: int, folder: Path, *argv: str, **env: str) -> int:
    if num_ranks == 1:
        env = {"PYTHONPATH": str(ROOT), **env}
        return forks.python("-m", "tests.helpers.odd_ranks", *argv, cwd=folder, env=env).code
    options = ("--standalone", f"--nproc_per_node={num_ranks}")
    return Ranks(folder, *argv, options=options, **env).end(200).code


def rates(folder: Path) -> dict[int, float]:
    """The learning rate of each optimizer step."""
    lines = map(json.loads, (folder / "runs/small/metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["lr"] for line in lines if line["split"] == "train"}


@pytest.mark.slow
def test_a_run_goes_on_over_one_two_four_and_one_process_as_if_nothing_had_happened(tmp_path: Path) -> None:
    options = [option for option in JOB if not option.startswith(("MODEL.", "DATA.AUTOBATCH"))]
    options += [
        "MODEL._target_=tests.helpers.odd_ranks.Perceptron",
        "TRAIN.EFFECTIVE_BATCH_SIZE=16", "TRAIN.EPOCHS=8",
        "TRAIN.LOG_EVERY=1", "SCHEDULE.NAME=cosine", "SCHEDULE.WARMUP_EPOCHS=1",
    ]  # fmt: skip
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    for folder in (alone, moved):
        folder.mkdir()
    assert run_on(1, alone, *options) == 0
    for num_ranks, epoch in ((1, 2), (2, 4), (4, 6)):
        (moved / "fault_happened").unlink(missing_ok=True)
        fault = f"SIGUSR1:{num_ranks - 1}:training in epoch {epoch}"
        assert run_on(num_ranks, moved, *options, FAULT=fault) != 0
    assert run_on(1, moved, *options) == 0
    assert rates(moved) == pytest.approx(rates(alone), rel=1e-12)
    assert list(rates(moved)) == list(range(1, 49))
    assert losses(moved) == pytest.approx(losses(alone), rel=1e-4)


# --- restarts ---


@pytest.mark.slow
def test_two_agents_recover_at_the_first_attempt(tmp_path: Path) -> None:
    options = (
        "--nnodes=2", "--nproc_per_node=1", "--max-restarts=1", "--rdzv_id=a", "--rdzv_backend=c10d",
        f"--rdzv_endpoint=localhost:{free_ports(1)[0]}",
    )  # fmt: skip
    env = {"FAULT": "SIGKILL:1:training in epoch 2"}
    agents = [Ranks(tmp_path, *JOB, "TRAIN.EPOCHS=4", options=options, **env) for _ in range(2)]
    ended = [agent.end(200) for agent in agents]
    assert [end.code for end in ended] == [0, 0], ended
    assert len(losses(tmp_path)) == 4


# --- faults, anywhere ---

QUICK = {("error", 1, "in training"), ("SIGKILL", 0, "in training")}


def cells() -> list[object]:
    """All combinations; a few of them are among the quick tests."""
    return [
        pytest.param(
            kind, rank, place, id=f"{kind}-{rank}-{place.replace(' ', '_')}",
            marks=() if (kind, rank, place) in QUICK else pytest.mark.slow,
        )
        for kind in KINDS for rank in (0, 1) for place in PLACES
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "rank", "place"), cells())
def test_a_fault_ends_all_with_its_cause_and_the_next_start_goes_on(
    tmp_path: Path, kind: str, rank: int, place: str
) -> None:
    ended = run_job(tmp_path, FAULT=f"{kind}:{rank}:{PLACES[place]}")
    assert (tmp_path / "fault_happened").exists(), ended.text
    trains = place in ("in training", "in validation", "while a checkpoint is written")
    if kind in ("SIGTERM", "SIGUSR1") and trains:
        assert f"stopped by {kind}" in ended.text
    else:
        assert ended.code != 0
        cause = {
            "error": "ValueError: this rank is broken",
            "SIGKILL": "its process died",
            "SIGSTOP": "no sign of life",
        }.get(kind, f"stopped by {kind}")
        assert re.search(rf"\[rank {1 - rank}\] rank {rank}: .*{cause}", ended.text), ended.text
    again = run_job(tmp_path)
    assert again.code == 0, again.text
    assert len(losses(tmp_path)) == 2
