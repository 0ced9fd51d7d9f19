"""The callback for Lightning on two ranks of DDP, on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from tests.helpers.forks import ROOT
from tests.helpers.runs import free_ports
from tests.integrations.lightning_ranks import CASES

Ranks = list[dict[str, Any]]


def run_ranks(folder: Path, names: Sequence[str]) -> tuple[Ranks, list[int], str]:
    """What two ranks have found in each case, their exit codes, and all that they wrote."""
    (port,) = free_ports(1)
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.integrations.lightning_ranks", str(folder), *names]
    with (folder / "log.txt").open("w") as log:
        ranks = [
            subprocess.Popen(command, env={**env, "LOCAL_RANK": str(rank)}, cwd=ROOT, stdout=log, stderr=log)
            for rank in range(2)
        ]
        try:
            codes = [process.wait(timeout=200) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    written = [folder / f"rank{rank}.json" for rank in range(2)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in written]
    return found, codes, (folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Of all cases, which run in the same two processes, until one of these is killed in the last case."""
    ranks, codes, text = run_ranks(tmp_path_factory.mktemp("ranks"), list(CASES))
    assert codes[1] == -signal.SIGKILL, text
    assert [len(each) for each in ranks] == [len(CASES), len(CASES) - 1], text
    return ranks


@pytest.mark.parametrize("name", ["loaders", "collectives"])
def test_both_ranks_train_as_with_the_size_by_hand(name: str, found: Ranks) -> None:
    first, second = (ranks[name] for ranks in found)
    assert first["size"] == second["size"] == 12
    assert first["differences"] == second["differences"] == []
    assert first["weights"] == second["weights"]
    assert set(first["sizes"][:4]) == {12}
    assert first["ran_on_every_rank"] == [12]
    assert first["accumulate"] == second["accumulate"] == (2 if name == "collectives" else 1), "48 on both"


def test_the_rank_with_less_memory_decides(found: Ranks) -> None:
    first, second = (ranks["unequal"] for ranks in found)
    assert first["size"] == second["size"]
    assert 20 <= first["size"] <= 40, "the rank with more would fit about twice as many"
    assert first["limited_by"] == second["limited_by"] == "memory"
    assert first["differences"] == second["differences"] == []


def test_ranks_with_data_of_their_own_agree_on_a_size(found: Ranks) -> None:
    for ranks in found:
        assert (ranks["uneven_data"]["size"], ranks["uneven_data"]["limited_by"]) == (8, "dataset")
        assert ranks["uneven_data"]["differences"] == []


def test_training_takes_the_memory_that_the_search_measured_and_the_buckets(found: Ranks) -> None:
    for ranks in found:
        assert ranks["memory"]["taken"] == pytest.approx(ranks["memory"]["measured"], rel=0.005)


def test_an_error_of_one_rank_ends_all_with_the_cause(found: Ranks) -> None:
    other, own = (ranks["unprepared"]["error"] for ranks in found)
    assert own == "ZeroDivisionError: sample"
    assert other.startswith("AutoBatchError: ")
    assert " rank 1: " in other
    assert "sample" in other


def test_a_rank_that_is_killed_ends_the_other_with_the_cause(found: Ranks) -> None:
    assert found[0]["killed"]["error"].startswith("AutoBatchError: ")
    assert " 1: " in found[0]["killed"]["error"], "the rank"


def test_the_example_trains_on_two_ranks_of_lightnings_own_launcher() -> None:
    command = [sys.executable, str(ROOT / "examples" / "lightning_digits.py"), "--epochs", "1"]
    done = subprocess.run(
        [*command, "--devices", "2", "--accelerator", "cpu", "--effective-batch-size", "200"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, accuracy = done.stdout.splitlines()[-2:]
    assert (found.split()[2], accuracy.split()[-2]) == ("50", "8")
