"""`DATA.AUTOBATCH.FIT`: remedies that a run switches on by itself until the wanted size fits."""

import json
import os
import re
import weakref
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.ledger import limit_with_room_for
from tests.helpers.runs import SMALL, assert_same_bits, weights

LARGEST = 8
"""Samples that fit without gradient checkpointing."""


class Plain(nn.Module):
    """Two layers, which need too much memory for more than `LARGEST` samples, on all ranks or on one."""

    is_checkpointed = False
    alive, num_alive = [], []

    def __init__(self, num_classes, largest=10**6, rank=None):
        super().__init__()
        self.largest, self.is_here = largest, rank in (None, int(os.environ.get("RANK", "0")))
        self.layers = nn.Sequential(nn.Linear(3 * 8 * 8, 64), nn.Dropout(0.1), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(64, count) for count in num_classes.values())
        self.alive.append(weakref.ref(self))
        self.num_alive.append(sum(model() is not None for model in self.alive))

    def forward(self, images):
        most = self.largest if self.is_checkpointed else LARGEST
        if self.training and self.is_here and len(images) > most:
            torch.empty(1 << 50, dtype=torch.uint8)
        x = images.flatten(1)
        x = (
            checkpoint(self.layers, x, use_reentrant=False)
            if self.is_checkpointed
            else self.layers(x)
        )
        return tuple(head(x) for head in self.heads)


class Switchable(Plain):
    def set_grad_checkpointing(self, enable=True):
        self.is_checkpointed = enable


FIT = (
    *(option for option in SMALL if not option.startswith("MODEL.")),
    f"MODEL._target_={__name__}.Switchable",
    "DATA.IMG_SIZE=8",
    "TRAIN.EPOCHS=1",
    "DATA.AUTOBATCH.ENABLED=True",
    "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=24",
    "DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL=1",
    "DATA.AUTOBATCH.FIT=[none,checkpointing]",
)
WANTED = "DATA.AUTOBATCH.MIN_BATCH_SIZE=12"


@pytest.fixture(autouse=True)
def _no_models():
    Plain.alive.clear()
    Plain.num_alive.clear()


def attempts(folder):
    """The remedy, the size found and the wanted one, of each attempt."""
    fit = json.loads((folder / "autobatch.json").read_text())["train"].get("fit", [])
    return [(entry["remedy"], entry["batch_size"], entry["wanted"]) for entry in fit]


def saved(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


@pytest.mark.e2e
def test_a_remedy_found_for_a_size_trains_as_one_set_by_hand(run, tmp_path):
    folder = tmp_path / "runs/small"
    outcome = run(*FIT, WANTED)
    assert outcome.code == 0, outcome.err
    assert "TRAIN.GRADIENT_CHECKPOINTING True (DATA.AUTOBATCH.FIT)" in outcome.out
    assert attempts(folder) == [("none", None, 12), ("checkpointing", 24, 12)]
    assert saved(folder)["TRAIN"]["GRADIENT_CHECKPOINTING"] is True
    assert Plain.num_alive == [1, 1], "the first model is gone when the second is made"
    data = saved(folder)["DATA"]
    by_hand = (
        "DATA.AUTOBATCH.ENABLED=False",
        "TRAIN.GRADIENT_CHECKPOINTING=True",
        "EXPERIMENT.NAME=by_hand",
        f"DATA.BATCH_SIZE={data['BATCH_SIZE']}",
        f"DATA.BATCH_SIZE_VAL={data['BATCH_SIZE_VAL']}",
    )
    assert run(*FIT, *by_hand).code == 0
    assert_same_bits(weights(folder), weights(tmp_path / "runs/by_hand"))
    # Resumed, it has the remedy from the start, whatever fits.
    Plain.num_alive.clear()
    assert run(*FIT, "TRAIN.EPOCHS=2", "TRAIN.AUTO_RESUME=True", "MODEL.largest=1000000").code == 0
    assert len(Plain.num_alive) == 1
    assert attempts(folder)[-1][:2] == ("checkpointing", 24)
    assert saved(folder)["TRAIN"]["GRADIENT_CHECKPOINTING"] is True


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", [("none", 8, 1)]),
        ("DATA.AUTOBATCH.FIT=[checkpointing]", [("checkpointing", 24, 1)]),
        ("TRAIN.EFFECTIVE_BATCH_SIZE=32 DATA.AUTOBATCH.MIN_BATCH_SIZE=4", [("none", 8, 4)]),
        (
            "TRAIN.EFFECTIVE_BATCH_SIZE=16 MODEL.largest=10 DATA.AUTOBATCH.TOLERANCE=0",
            [("none", 8, 16), ("checkpointing", 10, 16)],
        ),
        ("TRAIN.EFFECTIVE_BATCH_SIZE=16 DATA.AUTOBATCH.MAX_BATCH_SIZE=8", [("none", 8, 16)]),
    ],
)
def test_a_remedy_is_on_only_where_the_wanted_size_does_not_fit(options, found, run, tmp_path):
    outcome = run(*FIT, *options.split())
    assert outcome.code == 0, outcome.err
    assert attempts(tmp_path / "runs/small") == found
    is_on = saved(tmp_path / "runs/small")["TRAIN"]["GRADIENT_CHECKPOINTING"]
    assert is_on == ("checkpointing" in [remedy for remedy, *_ in found])


class Uneven(Switchable):
    """Has much to compute in one of the two ways."""

    def __init__(self, num_classes, slow_if_checkpointed):
        super().__init__(num_classes)
        self.slow_if_checkpointed = slow_if_checkpointed

    def forward(self, images):
        if self.is_checkpointed == self.slow_if_checkpointed:
            torch.linalg.svd(torch.ones(700, 700))  # far above what a busy machine adds
        return super().forward(images)


@pytest.mark.e2e
@pytest.mark.usefixtures("few_timed_steps")
@pytest.mark.parametrize("slow_if_checkpointed", [False, True])
def test_the_faster_of_both_ways_is_kept(slow_if_checkpointed, run, tmp_path):
    options = (
        *FIT,
        f"MODEL._target_={__name__}.Uneven",
        f"MODEL.slow_if_checkpointed={slow_if_checkpointed}",
        "DATA.AUTOBATCH.OBJECTIVE=throughput",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=8",
    )
    is_kept = not slow_if_checkpointed
    for argv in ((), ("TRAIN.EPOCHS=2", "TRAIN.AUTO_RESUME=True")):
        outcome = run(*options, *argv)
        assert outcome.code == 0, outcome.err
        tried = [remedy for remedy, *_ in attempts(tmp_path / "runs/small")]
        assert tried == ["none", "checkpointing"] + ["none"] * slow_if_checkpointed
        assert saved(tmp_path / "runs/small")["TRAIN"]["GRADIENT_CHECKPOINTING"] == is_kept


def test_messages(golden, run):
    """What a run says of its remedies, without the figures of this machine."""
    told = re.search(r"AutoBatch: .*FIT\)", run(*FIT, WANTED).out).group()
    failed = {
        "no remedy helps": (3, run(*FIT, WANTED, "MODEL.largest=8", "EXPERIMENT.NAME=none")),
        "one process": (2, run(*FIT, "DATA.AUTOBATCH.FIT=[shard]")),
        "no checkpointing": (2, run(*FIT, f"MODEL._target_={__name__}.Plain")),
    }
    for title, (code, outcome) in failed.items():
        assert outcome.code == code, title
        assert ("oom" in outcome.out) == (code == 3), "what it cannot have ends it before a trial"
    assert not Path("runs/none").exists()
    messages = {title: outcome.err for title, (_, outcome) in failed.items()}
    messages["no remedy helps"] = messages["no remedy helps"].rpartition(". ")[2]
    switched_on = re.sub(r"(Budget ).*( Tried)", r"\1<figures>.\2", told)
    golden("autobatch_fit", {"a remedy is switched on": switched_on, **messages})


@pytest.mark.e2e
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_that_a_size_does_not_fit_on_one_of_them(torchrun, tmp_path, rank):
    folder = tmp_path / "runs/small"
    outcome = torchrun(2, *FIT, WANTED, f"MODEL.rank={rank}")
    assert outcome.code == 0, outcome.err
    assert attempts(folder) == [("none", None, 12), ("checkpointing", 24, 12)]


@pytest.mark.e2e
def test_checkpointing_fits_a_limit_that_the_model_alone_exceeds(run, tmp_path):
    options = (
        *(option for option in FIT if "MODEL." not in option),
        "MODEL.NAME=test_vit",
        "DATA.IMG_SIZE=160",
        "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=1.0",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=48",
    )
    assert run(*options, "DATA.AUTOBATCH.MAX_BATCH_SIZE=4", "EXPERIMENT.NAME=first").code == 0
    limit = f"DATA.AUTOBATCH.MEMORY_LIMIT_GB={limit_with_room_for(65)}"
    outcome = run(*options, "DATA.AUTOBATCH.MIN_BATCH_SIZE=40", limit)
    assert outcome.code == 0, outcome.err
    (_, without, _), (remedy, size, _) = attempts(tmp_path / "runs/small")
    assert (without, remedy) == (None, "checkpointing")
    assert size >= 40
