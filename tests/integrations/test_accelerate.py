"""AutoBatch in training loops with accelerate, in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.ledger import held_bytes
from tests.helpers.runs import TORCHRUN

PROGRAM = ("-m", "tests.integrations.accelerate_ranks")
SCENARIOS = {
    1: ("not_restored", "find_first", "lengths", "errors"),
    2: ("find_first", "errors"),
}
"""By the number of processes."""

Found = dict[str, Any]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Found]]:
    """Of each number of processes: what each of these found."""
    found = {}
    for num_processes, scenarios in SCENARIOS.items():
        folder = tmp_path_factory.mktemp("job")
        launcher = (*TORCHRUN, f"--nproc_per_node={num_processes}") if num_processes > 1 else ()
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = forks.python(*launcher, *PROGRAM, folder, *scenarios, cwd=folder, env=env)
        assert done.code == 0, done.err
        files = [folder / f"{rank}.json" for rank in range(num_processes)]
        found[num_processes] = [json.loads(Path(file).read_text()) for file in files]
    return found


@pytest.mark.parametrize("num_processes", SCENARIOS)
def test_a_run_is_the_one_with_the_size_found_by_hand(
    jobs: dict[int, list[Found]], num_processes: int
) -> None:
    main, *others = (found["find_first"] for found in jobs[num_processes])
    assert main["same"], main
    assert others == [main] * (num_processes - 1)
    assert 8 < main["size"] < 1024  # found, not a bound
    assert main["sizes"] == [main["size"]]


@pytest.mark.parametrize("num_processes", SCENARIOS)
def test_afterwards_all_processes_are_there_again(jobs: dict[int, list[Found]], num_processes: int) -> None:
    for found in jobs[num_processes]:
        for name in SCENARIOS[num_processes]:
            assert found[f"{name}: processes"] == [num_processes] * 2


def test_without_restored_generators_the_run_differs(jobs: dict[int, list[Found]]) -> None:
    assert not jobs[1][0]["not_restored"]["same"]


def test_batches_of_trials_hold_the_longest_samples(jobs: dict[int, list[Found]]) -> None:
    assert jobs[1][0]["lengths"] == [56]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [("sharded", "AutoBatchError", "FSDP"), ("stream", "TypeError", "index")],
)
@pytest.mark.parametrize("num_processes", SCENARIOS)
def test_what_cannot_be_searched_is_one_clear_error(
    jobs: dict[int, list[Found]], num_processes: int, name: str, kind: str, text: str
) -> None:
    for found in jobs[num_processes]:
        assert found["errors"][name][0] == kind
        assert text in found["errors"][name][1]


def test_split_batches_are_refused_where_they_are_split(jobs: dict[int, list[Found]]) -> None:
    assert isinstance(jobs[1][0]["errors"]["split"], int)
    for found in jobs[2]:
        assert "split_batches" in found["errors"]["split"][1]


def test_an_error_of_the_data_is_told_to_all(jobs: dict[int, list[Found]]) -> None:
    assert jobs[1][0]["errors"]["broken"] == ["KeyError", "'mine'"]
    told, own = (found["errors"]["broken"] for found in jobs[2])
    assert own == ["KeyError", "'mine'"]
    assert told[0] == "AutoBatchError"
    assert told[1].endswith(": KeyError: 'mine'")


def test_the_example_learns_with_the_size_that_it_finds(tmp_path: Path) -> None:
    limit = str((held_bytes() + 2**28) / 0.8 / 2**30)
    argv = (ROOT / "examples" / "accelerate_digits.py", "--cpu", "--epochs", "2", "--memory-limit-gb", limit)
    done = forks.python(*argv, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "trained"]
    assert float(lines[1].split()[-1]) > 0.5
    assert 8 < int(lines[2].split()[4]) <= 512
