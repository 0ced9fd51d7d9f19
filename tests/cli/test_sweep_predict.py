from __future__ import annotations

import re

import pytest

from linnaeus.autobatch.predict.gpus import find_gpu
from linnaeus.cli import sweep
from linnaeus.cli.sweep_predict import check_predictions, groups_of
from linnaeus.sweep.folder import Plan
from tests.helpers.consoles import plain_console

pytestmark = pytest.mark.usefixtures("run")  # in an empty folder
ON = "DATA.AUTOBATCH.ENABLED=True"
POINTS = (
    "MODEL._target_=tests.cli.tiny.Growing",
    "DATA.DATASET._target_=tests.cli.tiny.Points",
    "DATA.DATASET.length=96",
    "DATA.BATCH_SIZE_VAL=7",
    "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
)


def planned(*argv: str) -> list[Plan]:
    request = sweep.read([*POINTS, *argv])
    assert not isinstance(request, str)
    return request[2]


def test_runs_whose_sizes_cannot_differ_are_one_group() -> None:
    rates = ("OPTIMIZER.LR=0.1,0.2", "EXPERIMENT.SEED=0,1")
    assert [len(group) for group in groups_of(planned(ON, *rates)).values()] == [4]
    assert [
        len(group) for group in groups_of(planned(ON, *rates[:1], "TRAIN.AMP=off,bf16")).values()
    ] == [
        2,
        2,
    ]
    assert len(groups_of(planned("DATA.BATCH_SIZE=8,16"))) == 2, "they are what was asked for"


def tables_of(*argv: str, world_size: int = 1) -> list[list[str]]:
    """The cells of each line of the tables: device, fraction, budget, two sizes for each mode."""
    console, output = plain_console()
    check_predictions(planned(*argv), [find_gpu("rtx-4090")], console, world_size=world_size)
    lines = re.findall(r"^│(.*)│$", output.getvalue(), re.MULTILINE)
    return [[cell.strip() for cell in line.split("│")] for line in lines]


def test_sizes_are_shown_for_each_group_and_gpu() -> None:
    """The processes of a run share the samples. What cannot be built is not predicted."""
    argv = (ON, "OPTIMIZER.LR=1,2", "MODEL._target_=tests.cli.tiny.Growing,tests.cli.tiny.Nothing")
    [first] = tables_of(*argv)
    assert (first[0], first[3], first[5]) == ("rtx-4090", "96", "96")
    [shared] = tables_of(ON, "OPTIMIZER.LR=1,2", world_size=8)
    assert (shared[3], shared[5]) == ("12", "12")
