"""AutoBatch under torchrun, with real processes and faults; more is in test_group and test_cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.autobatch.faulty import TINY
from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import TORCHRUN, assert_same_bits, weights

pytestmark = pytest.mark.distributed


def job(folder: Path, *argv: str, **env: str) -> tuple[int, str]:
    """The exit code of a torchrun of two ranks, and all that it prints; one that hangs fails the test."""
    text, ranks = folder / "torchrun.txt", []
    with text.open("w") as file:
        process = forks.start(
            [*TORCHRUN, "--nproc_per_node=2", "-m", "linnaeus.main", *argv], cwd=folder,
            env={"PYTHONPATH": str(ROOT), **env}, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        with suppress(psutil.Error):
            ranks = psutil.Process(process.pid).children(recursive=True)
        code = process.wait(150)
    finally:
        process.kill()
        for rank in ranks:
            with suppress(psutil.Error):
                rank.kill()
    return code, text.read_text()


def sizes(folder: Path) -> tuple[int, int]:
    found = json.loads((folder / "runs/small/autobatch.json").read_text())
    return found["train"]["batch_size"], found["val"]["batch_size"]


def test_the_size_that_every_rank_has_run_trains_as_one_set_by_hand(tmp_path: Path) -> None:
    code, text = job(tmp_path, *TINY, FAULT="oom:1:backward")
    assert code == 0, text
    assert "rank 1" in text, "which fits no more"
    train, val = sizes(tmp_path)
    assert (train, val) == (8, 16)
    code, text = job(
        tmp_path, *TINY, "DATA.AUTOBATCH.ENABLED=False", f"DATA.BATCH_SIZE={train}",
        f"DATA.BATCH_SIZE_VAL={val}", "EXPERIMENT.NAME=by_hand",
    )  # fmt: skip
    assert code == 0, text
    assert_same_bits(weights(tmp_path / "runs/small"), weights(tmp_path / "runs/by_hand"))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "fault", "told", "has_traceback"),
    [
        ((), "error:0", "[rank 1] rank 0: ValueError", True),
        (("DATA.AUTOBATCH.MEMORY_LIMIT_GB=0.05",), "", "DATA.AUTOBATCH.MEMORY_LIMIT_GB", False),
    ],
    ids=["an error of the model", "nothing fits"],
)
def test_what_ends_the_search_ends_all_ranks_with_the_cause(
    tmp_path: Path, options: Sequence[str], fault: str, told: str, has_traceback: bool
) -> None:
    code, text = job(tmp_path, *TINY, *options, FAULT=fault)
    assert code != 0
    assert told in text
    assert ("linnaeus/autobatch" in text) == has_traceback
