"""`linnaeus average`: the weights are a mean, and BatchNorm's statistics are of the training data."""

import pytest
import torch

from linnaeus.inference.trained import load_run
from tests.helpers.runs import SMALL, checkpoint_of
from tests.helpers.small_runs import PLAIN, Clusters

KEPT = ("TRAIN.KEEP_CHECKPOINTS=3", "TRAIN.EPOCHS=4")
LAST = ("step_00000008.pt", "step_00000012.pt", "step_00000016.pt")


class Still(Clusters):
    """Points without noise."""

    def __getitem__(self, index):
        return self.points[index], int(self.labels[index])


RUN = (
    *PLAIN,
    *KEPT,
    f"DATA.DATASET._target_={__name__}.Still",
    "MODEL.norm=BatchNorm1d",
    "DATA.BATCH_SIZE=25",
)
TRUSTED = "--trust-code"


@pytest.fixture
def folder(run, tmp_path):
    assert run(*RUN).code == 0
    return tmp_path / "runs/plain"


@pytest.mark.parametrize("ema", [False, True])
def test_the_last_checkpoints_are_averaged_equally(run, tmp_path, ema):
    assert run(*RUN, f"TRAIN.EMA.ENABLED={ema}").code == 0
    folder = tmp_path / "runs/plain"
    outcome = run("average", "runs/plain", "--last", "3", TRUSTED)
    assert outcome.code == 0, outcome.err
    assert all(name in outcome.out for name in ("average.pt", *LAST))
    states = [checkpoint_of(folder, name)["state"] for name in LAST]
    parts = [state["ema"]["module"] if ema else state["model"] for state in states]
    average = checkpoint_of(folder, "average.pt")["state"]["model"]
    for name in ("0.weight", "1.bias", "4.bias"):
        torch.testing.assert_close(
            average[name], torch.stack([part[name] for part in parts]).mean(0)
        )
    with torch.no_grad():
        found = load_run(folder, checkpoint="average.pt", device="cpu", trust_code=True).model
        expected = found[0](Still("train").points).mean(0)
    torch.testing.assert_close(average["1.running_mean"], expected)
    mean = torch.stack([part["1.running_mean"] for part in parts]).mean(0)
    assert (mean - expected).abs().max() > 0.01, "the test would not see statistics that stay"


def test_one_checkpoint_gets_new_statistics_alone(run, folder):
    assert run("average", "runs/plain", "--last", "1", TRUSTED).code == 0
    last, average = (checkpoint_of(folder, f"{each}.pt")["state"] for each in ("last", "average"))
    changed = {
        name for name, value in average["model"].items() if not value.equal(last["model"][name])
    }
    assert {"1.running_mean", "1.running_var"} <= changed
    assert all(name.startswith("1.") and "weight" not in name for name in changed)


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_of_frozen_layers_stay(run, tmp_path, frozen):
    more = ("MODEL.FREEZE=backbone",) if frozen else ()
    assert run(*SMALL, *more, "TRAIN.KEEP_CHECKPOINTS=2").code == 0
    assert run("average", "runs/small", "--last", "2").code == 0
    states = [
        checkpoint_of(tmp_path / "runs/small", f"{name}.pt")["state"]["model"]
        for name in ("last", "average")
    ]
    names = [name for name in states[0] if name.endswith("running_mean")]
    assert all(states[0][name].equal(states[1][name]) for name in names) == frozen


def test_an_average_is_evaluated_and_not_resumed(run, folder):
    assert run("average", "runs/plain", "--last", "2", TRUSTED).code == 0
    assert run("evaluate", "runs/plain", "--checkpoint", "average.pt", TRUSTED).code == 0
    assert run(*RUN, "TRAIN.EPOCHS=5", "TRAIN.AUTO_RESUME=True", "SCHEDULE.NAME=cosine").code == 0
    steps = [
        checkpoint_of(folder, f"{name}.pt")["progress"]["step"] for name in ("last", "average")
    ]
    assert steps == [20, 16]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("runs/plain", "--last", "4", TRUSTED), 2, "TRAIN.KEEP_CHECKPOINTS=4"),
        (("runs/plain", "--last", "0"), 2, "--last"),
        (("runs/plain",), 2, TRUSTED),
        (("runs/plain/checkpoints/last.pt",), 2, "RUN"),
        (("runs/plain", "runs/plain"), 2, "RUN"),
        (("runs/none",), 2, "runs/plain"),
    ],
)
def test_what_cannot_be_averaged_is_an_error(run, folder, words, code, named):
    outcome = run("average", *words)
    assert (outcome.code, named in outcome.err) == (code, True), outcome.err
    assert not (folder / "checkpoints/average.pt").exists()
