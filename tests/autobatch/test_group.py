"""`auto_find_batch_size` in a process group: real ranks, all cases of one kind in one job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.autobatch.group_ranks import WRAPPERS
from tests.helpers import forks
from tests.helpers.forks import ROOT, Process
from tests.helpers.runs import TORCHRUN, free_ports

pytestmark = pytest.mark.distributed

Found = list[dict[str, Any]]
"""Of each rank: what each scenario gave."""

PROGRAM = ("-m", "tests.autobatch.group_ranks")


def read(folder: Path, num_ranks: int) -> Found:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    def run(*scenarios: str, num_ranks: int = 2) -> Found:
        folder = tmp_path_factory.mktemp("job")
        command = (*TORCHRUN, f"--nproc_per_node={num_ranks}", *PROGRAM, folder, *scenarios)
        done = forks.python(*command, cwd=folder, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        assert done.code == 0, done.err
        return read(folder, num_ranks)

    return run


ERRORS = (
    "raises_on_main",
    "raises_on_other",
    "nothing_fits_on_other",
    "different_arguments",
    "wrong_argument",
    "prepares",
)
LONGER = (
    "slower_than_the_group",
    "together_twice",
    "fails_in_the_second",
    "not_called",
    "collective_in_make_batch",
    "functional",
    "refused_on_one",
    "unequal_wrappers",
    "bare_model",
    "sync_batchnorm",
    "refused",
)


@pytest.fixture(scope="module")
def together(job: Callable[..., Found]) -> Found:
    """The scenarios in one job, a good search after those that fail."""
    return job(
        "unequal_limits", "unequal_bounds", "alone", *ERRORS, "collective", "good_again", "what_remains"
    )


@pytest.fixture(scope="module")
def longer(job: Callable[..., Found]) -> Found:
    return job(*LONGER)


def test_all_ranks_get_the_size_that_fits_on_each(together: Found) -> None:
    main, other = (found["unequal_limits"] for found in together)
    assert main == other
    assert 15 <= main["size"] <= 20  # 20 samples fit on rank 1, 40 on rank 0
    assert main["ran"] == [main["size"]]


@pytest.mark.slow
def test_a_search_may_take_longer_than_the_timeout_of_the_group(longer: Found) -> None:
    for found in longer:
        assert found["slower_than_the_group"]["seconds"] > 4
        assert found["slower_than_the_group"]["size"] == 4


def test_of_bounds_that_differ_the_lowest_holds(together: Found) -> None:
    for found in together:
        assert found["unequal_bounds"] == {"size": 7, "ran": [7], "limited_by": "dataset"}


@pytest.mark.slow
def test_searches_in_one_context_share_its_control_plane(longer: Found) -> None:
    for found in longer:
        assert found["together_twice"] == ["of 0", 0, 4, 8, True]


def test_a_rank_may_search_alone(together: Found) -> None:
    assert together[0]["alone"] == {"size": 8, "ran": []}


def test_different_arguments_are_one_error_on_all_ranks(together: Found) -> None:
    for found in together:
        assert found["different_arguments"]["kind"] == "AutoBatchError"
        assert "max_batch_size is 8 and 9" in found["different_arguments"]["text"]


@pytest.mark.parametrize(
    ("scenario", "failing", "kind", "text"),
    [
        ("raises_on_main", 0, "KeyError", "'a broken step'"),
        ("raises_on_other", 1, "KeyError", "'a broken step'"),
        ("nothing_fits_on_other", 1, "AutoBatchError", "AutoBatch (train): no batch size fits"),
        ("wrong_argument", 1, "TypeError", "max_batch_size is 'many'; it must be an integer"),
        ("prepares", 1, "OSError", "no such data set"),
    ],
)
def test_an_error_of_one_rank_is_raised_there_and_named_on_the_others(
    together: Found, scenario: str, failing: int, kind: str, text: str
) -> None:
    own, others = together[failing][scenario], together[1 - failing][scenario]
    assert own["kind"] == kind
    assert own["text"].startswith(text)
    named = own["text"] if kind == "AutoBatchError" else f"{kind}: {own['text']}"
    assert others == {"kind": "AutoBatchError", "text": f"AutoBatch: rank {failing}: {named}"}


@pytest.mark.slow
def test_a_rank_that_does_not_call_is_named(longer: Found) -> None:
    assert longer[0]["not_called"]["text"].startswith("AutoBatch: rank 1 has not called auto_find_batch_size")


def test_earlier_failures_do_not_reach_later_searches(together: Found) -> None:
    for found in together:
        assert found["good_again"] == {"size": 4, "ran": [4]}


@pytest.mark.slow
def test_an_error_of_a_later_search_in_one_context_is_told_too(longer: Found) -> None:
    other, own = (found["fails_in_the_second"] for found in longer)
    assert own == {"kind": "KeyError", "text": "'a broken step'"}
    assert other == {"kind": "AutoBatchError", "text": "AutoBatch: rank 1: KeyError: 'a broken step'"}


@pytest.mark.slow
def test_a_collective_in_make_batch_is_an_error_too(longer: Found) -> None:
    for found in longer:
        assert "make_batch runs a collective, barrier" in found["collective_in_make_batch"]["text"]


@pytest.mark.slow
def test_of_functional_collectives_only_those_of_several_ranks_are_refused(longer: Found) -> None:
    for found in longer:
        assert found["functional"]["alone"] == {"size": 4, "ran": [4]}
        assert "the step runs a collective, all_reduce" in found["functional"]["all"]["text"]


@pytest.mark.slow
def test_state_that_one_rank_refuses_is_named_before_any_collective(longer: Found) -> None:
    other, own = (found["refused_on_one"]["text"] for found in longer)
    assert own.startswith("AutoBatch: DeepSpeedEngine in state")
    assert other == own.replace("AutoBatch: ", "AutoBatch: rank 1: ", 1)


@pytest.mark.slow
def test_wrappers_that_only_one_rank_has_are_an_error_unless_they_are_garbage(longer: Found) -> None:
    for found in longer:
        different, same, _ = found["unequal_wrappers"]
        assert "DistributedDataParallel of state is ['Linear with 2 parameters" in different["text"]
        assert same == {"size": 4, "ran": [4]}


def test_a_collective_in_the_step_is_an_error_and_no_hang(together: Found) -> None:
    for found in together:
        assert "the step runs a collective, allreduce" in found["collective"]["text"]


def test_thread_and_connection_of_a_search_are_gone_afterwards(together: Found) -> None:
    for found in together:
        before, after = found["what_remains"]
        assert after == before
        assert before[0] == ["MainThread"]


@pytest.mark.slow
def test_a_wrapper_that_state_does_not_hold_is_silent_too(longer: Found) -> None:
    for found in longer:
        assert found["bare_model"] == {"size": 8, "ran": [8]}


@pytest.mark.slow
def test_sync_batchnorm_normalises_over_one_rank_in_a_search(longer: Found) -> None:
    assert [found["sync_batchnorm"] for found in longer] == [[1, 2], [1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("FSDP1", "FullyShardedDataParallel"),
        ("FSDP2", "FSDPModule"),
        ("DeepSpeed", "DeepSpeedEngine"),
        ("ZeRO", "ZeroRedundancyOptimizer"),
        ("hook", "static_graph and a built-in hook"),
    ],
)
def test_what_no_rank_can_step_alone_is_refused_by_name(longer: Found, part: str, name: str) -> None:
    for found in longer:
        assert found["refused"][part]["kind"] == "AutoBatchError"
        assert name in found["refused"][part]["text"]


@pytest.fixture(scope="module")
def wrapped(job: Callable[..., Found]) -> Found:
    return job("wrappers", "negative_control")


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_training_after_a_search_is_that_without_one(wrapped: Found, name: str) -> None:
    for found in wrapped:
        assert "kind" not in found["wrappers"], found["wrappers"]
        cases = {case: facts for case, facts in found["wrappers"].items() if case.rpartition(" ")[0] == name}
        assert cases
        assert all(facts == {"same": True, "size": 16} for facts in cases.values()), cases


@pytest.mark.slow
def test_without_undoing_the_notes_of_the_reducer_training_differs(wrapped: Found) -> None:
    for found in wrapped:
        unused, static = (found["negative_control"][name] for name in ("unused", "static"))
        assert static == {"same": False, "size": 16}
        assert unused.get("same") is False or "gradient which is undefined" in unused["text"]  # torch notices


@pytest.mark.slow
def test_two_groups_search_at_once(job: Callable[..., Found]) -> None:
    found = [each["subgroups"] for each in job("subgroups", num_ranks=4)]
    assert found[0]["size"] == found[1]["size"] > found[2]["size"] == found[3]["size"]
    assert all("process group of other ranks" in each["refused"] for each in found)
    told = {"kind": "AutoBatchError", "text": "AutoBatch: rank 3: KeyError: 'a broken step'"}
    assert found[2]["error"] == told
    assert found[3]["error"]["kind"] == "KeyError"
    assert found[0]["error"] == {"size": 4, "ran": [4]}
    assert "ranks 2 and 3 call" in found[3]["different"]["text"]


def ranks_without_a_launcher(folder: Path, scenario: str, **env: str) -> list[Process]:
    """Two ranks that nothing ends when one of them dies."""
    (port,) = free_ports(1)
    started = []
    for rank in range(2):
        place = {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (folder / f"{rank}.txt").open("w") as log:
            argv = (*PROGRAM, folder, scenario)
            started.append(forks.start(argv, cwd=folder, env={**place, **env}, stdout=log, stderr=log))
    return started


@pytest.mark.parametrize("dead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_others_with_the_cause(tmp_path: Path, dead: int) -> None:
    processes = ranks_without_a_launcher(tmp_path, "dies", DIES=str(dead))
    began = time.monotonic()
    try:
        assert processes[dead].wait(60) == -9
        processes[1 - dead].wait(60)
    finally:
        for process in processes:
            process.kill()
    found = json.loads((tmp_path / f"{1 - dead}.json").read_text())["dies"]
    assert found["kind"] == "AutoBatchError"
    cause = "has ended" if dead == 0 else "rank 1: its process died"  # rank 0 serves the store
    assert cause in found["text"]
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_ranks_of_mp_spawn_search_together(tmp_path: Path) -> None:
    """Its processes share no parent that says how many they are, and a file is their store."""
    program = tmp_path / "spawn.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nimport torch.multiprocessing as mp\n"
        "from tests.autobatch.group_ranks import spawned\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(spawned, (Path(sys.argv[1]), ['unequal_limits']), nprocs=2)\n"
    )
    done = forks.python(program, tmp_path, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.err
    main, other = (found["unequal_limits"] for found in read(tmp_path, 2))
    assert main == other
    assert 15 <= main["size"] <= 20
