"""The metric that decides which checkpoint is best, and the checkpoints that are kept for it."""

import json
import re

import pytest

from linnaeus.training.checkpoint import TrainingProgress
from tests.helpers.runs import checkpoint_of
from tests.helpers.small_runs import PLAIN, Clusters, lines_of


class Uneven(Clusters):
    """Thirty times as many samples of one class as of another."""

    def __init__(self, split):
        super().__init__(split, length=96)
        self.labels[:] = 0
        self.labels[:3], self.labels[3:12] = 1, 2
        self.points += self.labels[:, None]
        self.targets = self.labels


UNEVEN = (*PLAIN, f"DATA.DATASET._target_={__name__}.Uneven")


@pytest.mark.parametrize("metric", ["macro/class", "loss"])
def test_the_best_checkpoints_are_those_of_the_metric(run, tmp_path, metric):
    options = (f"TRAIN.BEST_METRIC={metric}", "TRAIN.KEEP_BEST=2", "TRAIN.EPOCHS=6")
    run(*UNEVEN, *options, "OPTIMIZER.LR=0.1").ok()
    folder = tmp_path / "runs/plain"
    sign = -1 if metric == "loss" else 1
    lines = lines_of(folder, "val")
    ranked = sorted((sign * line[metric], -line["loss"], line["step"]) for line in lines)[::-1]
    steps = [step for *_, step in ranked[:2]]
    assert checkpoint_of(folder, "best.pt")["progress"]["step"] == steps[0]
    kept = {path.name for path in (folder / "checkpoints").glob("best_*")}
    assert kept == {f"best_{step:08d}.pt" for step in steps}
    result = json.loads((folder / "result.json").read_text())
    assert (result["headline"], result["best_epoch"]) == (metric, steps[0] // 3)


@pytest.mark.parametrize(
    ("validations", "best"),
    [
        ([(0.5, 1.0), (0.5, 0.9), (0.5, 1.1)], [2, 1]),  # the loss decides
        ([(0.5, 1.0), (0.5, 1.0), (0.5, 1.0)], [3, 2]),  # then the later one
        ([(0.5, float("nan")), (0.5, 9.0), (float("nan"), 0.1)], [2, 1]),
    ],
)
def test_equal_validations_are_ranked_by_loss_then_age(validations, best):
    progress = TrainingProgress()
    for progress.step, (value, loss) in enumerate(validations, start=1):
        progress.epoch = progress.step
        progress.rank("top1", {"top1": value, "loss": loss}, keep=2)
    assert (progress.best_steps, progress.best_epoch) == (best, best[0])


@pytest.mark.parametrize(("metric", "num_lines"), [("null", 1), ("loss", 0)])
def test_uneven_classes_are_said_once_unless_chosen(run, metric, num_lines):
    outcome = run(*UNEVEN, f"TRAIN.BEST_METRIC={metric}", "TRAIN.EPOCHS=1").ok()
    said = [line for line in outcome.out.splitlines() if "TRAIN.BEST_METRIC" in line]
    assert len(said) == num_lines
    for line in said:
        assert {"84", "3", "macro/class"} <= {*re.split(r"[,= ]+", line)}


def test_early_stopping_follows_the_best_metric(run, tmp_path):
    """The loss that grows ends the run, top-1 that stays would too, but macro F1 is not watched."""
    stopping = ("TRAIN.EARLY_STOPPING.PATIENCE=1", "TRAIN.EARLY_STOPPING.MIN_DELTA=9")
    run(*UNEVEN, *stopping, "TRAIN.BEST_METRIC=loss", "TRAIN.EPOCHS=4").ok()
    lines = lines_of(tmp_path / "runs/plain", "val")
    assert len(lines) == 2
    progress = checkpoint_of(tmp_path / "runs/plain")["progress"]
    assert progress["watched_best"] == -lines[0]["loss"]
