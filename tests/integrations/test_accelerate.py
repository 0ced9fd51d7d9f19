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
    1: (
        "plain", "not_restored", "own_accelerator", "find_first", "errors", "gan",
        "single_sample",
    ),
    2: (
        "plain", "accumulation", "split", "split_unknown", "given_parts", "find_split", "errors",
        "split_sizes", "one_fails_before",
    ),
}  # fmt: skip
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


RUNS = ("plain", "own_accelerator", "find_first", "accumulation", "split", "given_parts", "find_split")
CASES = [
    (num_processes, name) for num_processes, names in SCENARIOS.items() for name in names if name in RUNS
]


@pytest.mark.parametrize(("num_processes", "name"), CASES)
def test_a_run_is_the_one_with_the_size_found_by_hand(
    jobs: dict[int, list[Found]], num_processes: int, name: str
) -> None:
    main, *others = (found[name] for found in jobs[num_processes])
    assert main["same"], main
    assert others == [main] * (num_processes - 1)
    assert 8 < main["size"] < 1024  # found, not a bound
    share = num_processes if "split" in name else 1
    assert main["sizes"] == [main["size"] // share]


@pytest.mark.parametrize("num_processes", SCENARIOS)
def test_afterwards_all_processes_are_there_again(jobs: dict[int, list[Found]], num_processes: int) -> None:
    for found in jobs[num_processes]:
        for name in SCENARIOS[num_processes]:
            assert found[f"{name}: processes"] == [num_processes] * 2


def test_without_restored_generators_the_run_differs(jobs: dict[int, list[Found]]) -> None:
    assert not jobs[1][0]["not_restored"]["same"]


def test_batches_that_are_split_unexpectedly_are_an_error(jobs: dict[int, list[Found]]) -> None:
    for found in jobs[2]:
        assert "split_batches=True" in found["split_unknown"][1]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [("size given", "TypeError", "@autobatch"), ("no step", "AutoBatchError", "step"),
     ("sharded", "AutoBatchError", "FSDP")],
)  # fmt: skip
@pytest.mark.parametrize("num_processes", SCENARIOS)
def test_what_cannot_be_searched_is_one_clear_error(
    jobs: dict[int, list[Found]], num_processes: int, name: str, kind: str, text: str
) -> None:
    for found in jobs[num_processes]:
        assert found["errors"][name][0] == kind
        assert text in found["errors"][name][1]


def test_an_error_of_the_function_is_its_own(jobs: dict[int, list[Found]]) -> None:
    assert jobs[1][0]["errors"]["broken"] == ["KeyError", "'mine'"]
    own, told = (found["errors"]["broken"] for found in jobs[2])
    assert own == ["KeyError", "'mine'"]
    assert told[0] == "AutoBatchError"
    assert told[1].endswith(": KeyError: 'mine'")


def test_a_trial_lasts_until_every_optimizer_has_stepped(jobs: dict[int, list[Found]]) -> None:
    *trials, run = jobs[1][0]["gan"]
    assert run == {"critic": 50, "generator": 10}
    assert trials
    assert all(trial == {"critic": 10, "generator": 2} for trial in trials)


def test_of_split_batches_all_sizes_are_those_of_all_processes(jobs: dict[int, list[Found]]) -> None:
    for found in (each["split_sizes"] for each in jobs[2]):
        assert found["least"][0] == "AutoBatchError"
        assert found["multiple"]["found"] == [6, 3]
        assert found["multiple"]["ran"] == 6
        assert found["bound"]["found"] == [12, 6]
        assert "min_batch_size" in found["none_between"][1]
        assert found["found_by_hand"] == 64  # max_batch_size


def test_an_error_before_the_search_is_told_to_the_others(jobs: dict[int, list[Found]]) -> None:
    other, failed = (found["one_fails_before"] for found in jobs[2])
    assert failed[0] == "TypeError"
    assert other[0] == "AutoBatchError"
    assert other[1].endswith(f": TypeError: {failed[1]}")


def test_batchnorm_with_a_single_sample_is_an_error_with_a_remedy(jobs: dict[int, list[Found]]) -> None:
    kind, text = jobs[1][0]["single_sample"]
    assert kind == "AutoBatchError"
    assert "BatchNorm" in text
    assert "min_batch_size" in text


def test_processes_that_are_not_connected_are_told_what_to_do(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from linnaeus.integrations.accelerate import autobatch\n"
        "@autobatch\n"
        "def train(batch_size): ...\n"
        "train()\n"
    )
    done = forks.python(program, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"})
    assert done.code != 0
    assert "Accelerator" in done.err


def test_the_example_learns_with_the_size_that_it_finds(tmp_path: Path) -> None:
    limit = str((held_bytes() + 2**28) / 0.8 / 2**30)
    argv = (ROOT / "examples" / "accelerate_digits.py", "--cpu", "--epochs", "2", "--memory-limit-gb", limit)
    done = forks.python(*argv, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "trained"]
    assert float(lines[1].split()[-1]) > 0.5
    assert 8 < int(lines[2].split()[4]) <= 512
