"""Batch sizes that are predicted before a sweep starts anything."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from linnaeus.commands.sweep import options
from linnaeus.commands.sweep.predict import check_predictions, groups_of
from linnaeus.memory.gpus import find_gpu
from tests.helpers.runs import SMALL, Run

ON = "DATA.AUTOBATCH.ENABLED=True"


def planned(*argv: str) -> list[options.PlannedRun]:
    request = options.read([*SMALL, *argv])
    assert not isinstance(request, str)
    return request[1]


def test_runs_whose_sizes_cannot_differ_are_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rates = ("OPTIMIZER.LR=0.1,0.2", "EXPERIMENT.SEED=0,1")
    assert [len(group.runs) for group in groups_of(planned(ON, *rates))] == [4]
    assert [len(group.runs) for group in groups_of(planned(ON, *rates, "TRAIN.AMP=off,bf16"))] == [4, 4]
    sizes = "DATA.BATCH_SIZE=8,16"
    assert len(groups_of(planned(ON, sizes, "DATA.BATCH_SIZE_VAL=8"))) == 1, "they are searched for"
    assert len(groups_of(planned(sizes, "DATA.BATCH_SIZE_VAL=8"))) == 2, "they are what was asked for"


def test_sizes_are_shown_for_each_group_and_gpu() -> None:
    runs = planned(ON, "DATA.AUTOBATCH.ENABLED_VAL=False", "DATA.BATCH_SIZE_VAL=7", "OPTIMIZER.LR=1,2",
                   "MODEL.NAME=test_resnet,no_such_model")  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    check_predictions(runs, [find_gpu("rtx-4090")], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"NAME=test_resnet +│ 2 +│ rtx-4090 │ 96 +│ 7 ", text), text
    assert re.search(r"NAME=no_such_model +│ 2 +│ rtx-4090 │ not predicted │ not predicted ", text)


def test_nothing_is_started_where_nothing_is_predicted_to_fit(run: Run, tmp_path: Path) -> None:
    argv = ("sweep", *SMALL, "DATA.BATCH_SIZE=1000000,8", "DATA.BATCH_SIZE_VAL=8")
    outcome = run(*argv, "DATA.DATASET.NUM_SAMPLES=2000000", "--predict-gpu", "rtx-4090")
    assert outcome.code == 3
    assert re.search(
        r"- BATCH_SIZE=1000000 \(1 run\): DATA.BATCH_SIZE is 1000000, which is predicted", outcome.err
    )
    assert "BATCH_SIZE=8 (" not in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_processes_that_a_job_of_slurm_asks_for_share_the_samples(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    argv = ("sweep", *SMALL, ON, "OPTIMIZER.LR=1,2", "--predict-gpu", "rtx-4090", "--launcher", "slurm")
    sizes = []
    for asked in (("nodes=1",), ("nodes=2", "gpus-per-node=4")):
        outcome = run(*argv, "--slurm", *asked)
        assert (outcome.code, "there is no sbatch here" in outcome.err) == (2, True)
        [size] = re.findall(r"all +│ 2 +│ rtx-4090 │ (\d+) ", outcome.out)
        sizes.append(int(size))
    assert sizes == [96, 96 // 8]


def test_a_gpu_that_is_not_known_is_refused_with_the_closest(run: Run) -> None:
    outcome = run("sweep", *SMALL, "OPTIMIZER.LR=1,2", "--predict-gpu", "rtx-409")
    assert outcome.code == 2
    assert "--predict-gpu: 'rtx-409' (did you mean rtx-4090?) is not a GPU of the list" in outcome.err
