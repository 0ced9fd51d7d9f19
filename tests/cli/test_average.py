"""`linnaeus average`: the weights are a mean, and BatchNorm's statistics are of the training data."""

import pytest
import torch

from linnaeus.inference.trained import load_run
from tests.helpers.runs import SMALL, checkpoint_of, weights
from tests.helpers.small_runs import PLAIN, Clusters

LAST = ("step_00000008.pt", "step_00000012.pt", "step_00000016.pt")
NAMES = ("0.weight", "1.bias", "4.bias", "1.running_mean")


class Still(Clusters):
    """Points without noise."""

    def __getitem__(self, index):
        return self.points[index], int(self.labels[index])


RUN = (
    *PLAIN,
    "TRAIN.KEEP_CHECKPOINTS=3",
    "TRAIN.EPOCHS=4",
    f"DATA.DATASET._target_={__name__}.Still",
    "MODEL.norm=BatchNorm1d",
    "DATA.BATCH_SIZE=25",
)
TRUSTED = "--trust-code"


@pytest.fixture
def folder(run, tmp_path):
    run(*RUN).ok()
    return tmp_path / "runs/plain"


@pytest.fixture
def average(run):
    """Averages the last checkpoints of the run; gives the outcome."""

    def average(number, code=0):
        outcome = run("average", "runs/plain", "--last", str(number), TRUSTED)
        assert outcome.code == code, outcome.err
        return outcome

    return average


@pytest.mark.parametrize("ema", [False, True])
def test_the_last_checkpoints_are_averaged_equally(run, average, tmp_path, ema):
    run(*RUN, f"TRAIN.EMA.ENABLED={ema}").ok()
    folder = tmp_path / "runs/plain"
    outcome = average(3)
    assert all(name in outcome.out for name in ("average.pt", *LAST))
    states = [checkpoint_of(folder, name)["state"] for name in LAST]
    parts = [state["ema"]["module"] if ema else state["model"] for state in states]
    means = {name: torch.stack([part[name] for part in parts]).mean(0) for name in NAMES}
    found = weights(folder, "average.pt")
    for name in NAMES[:-1]:
        torch.testing.assert_close(found[name], means[name])
    with torch.no_grad():
        model = load_run(folder, checkpoint="average.pt", device="cpu", trust_code=True).model
        expected = model[0](Still("train").points).mean(0)
    torch.testing.assert_close(found[NAMES[-1]], expected)
    difference = (means[NAMES[-1]] - expected).abs().max()
    assert difference > 0.01, "the test would not see statistics that stay"


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_of_frozen_layers_stay(run, tmp_path, frozen):
    more = ("MODEL.FREEZE=backbone",) if frozen else ()
    run(*SMALL, *more, "TRAIN.KEEP_CHECKPOINTS=2").ok()
    run("average", "runs/small", "--last", "2").ok()
    before, after = (weights(tmp_path / "runs/small", f"{name}.pt") for name in ("last", "average"))
    statistics = [name for name in before if name.endswith("running_mean")]
    assert all(before[name].equal(after[name]) for name in statistics) == frozen


def test_an_average_is_evaluated_and_not_resumed(run, folder, average):
    average(2)
    run("evaluate", "runs/plain", "--checkpoint", "average.pt", TRUSTED).ok()
    run(*RUN, "TRAIN.EPOCHS=5", "TRAIN.AUTO_RESUME=True", "SCHEDULE.NAME=cosine").ok()
    for name, step in (("last.pt", 20), ("average.pt", 16)):
        assert checkpoint_of(folder, name)["progress"]["step"] == step


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"runs/plain --last 4 {TRUSTED}", "TRAIN.KEEP_CHECKPOINTS=4"),
        ("runs/plain", TRUSTED),
        ("runs/plain/checkpoints/last.pt", "RUN"),
        ("runs/plain runs/plain", "RUN"),
    ],
)
def test_what_cannot_be_averaged_is_an_error(run, folder, words, named):
    outcome = run("average", *words.split())
    assert (outcome.code, named in outcome.err) == (2, True), outcome.err
    assert not (folder / "checkpoints/average.pt").exists()
