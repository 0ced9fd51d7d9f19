"""The callback for Lightning on two ranks of DDP, on the CPU."""

import subprocess
import sys

import pytest

pytest.importorskip("lightning")

from tests.helpers.children import ROOT
from tests.helpers.processes import compute
from tests.helpers.runs import free_ports


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of all cases, which run in the same two processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(free_ports(1)[0]))
        return compute("tests.integrations.lightning_ranks", 2, tmp_path_factory.mktemp("ranks"))


def test_both_ranks_train_as_with_the_size_by_hand(found):
    first, second = (ranks["collectives"] for ranks in found)
    assert first["size"] == second["size"] == 12
    assert first["differences"] == second["differences"] == []
    assert first["weights"] == second["weights"]
    assert set(first["sizes"][:4]) == {12}
    assert first["accumulate"] == second["accumulate"] == 2, "48 on both"


def test_both_ranks_share_the_batches_of_a_cost_out(found):
    (budget, first), (other, second) = (ranks["budget"] for ranks in found)
    assert budget == other
    assert len(first) == len(second)
    assert sum(first) + sum(second) == 2 * 96
    assert max(first + second) <= 9


def test_the_rank_with_less_memory_decides(found):
    first, second = (ranks["unequal"] for ranks in found)
    assert first["size"] == second["size"]
    assert 20 <= first["size"] <= 40, "the rank with more would fit about twice as many"
    assert first["limited_by"] == second["limited_by"] == "memory"
    assert first["differences"] == second["differences"] == []


def test_ranks_with_data_of_their_own_agree_on_a_size(found):
    for ranks in found:
        assert (ranks["uneven_data"]["size"], ranks["uneven_data"]["limited_by"]) == (8, "dataset")
        assert ranks["uneven_data"]["differences"] == []


def test_an_error_of_one_rank_ends_all_with_the_cause(found):
    other, own = (ranks["unprepared"] for ranks in found)
    assert own == "ZeroDivisionError: sample"
    assert other.startswith("AutoBatchError: ")
    assert " rank 1: " in other
    assert "sample" in other


def test_the_example_trains_on_two_ranks_started_by_lightning():
    example = ROOT / "examples" / "lightning_digits.py"
    argv = ("--epochs", "1", "--devices", "2", "--accelerator", "cpu")
    command = [sys.executable, example, *argv, "--effective-batch-size", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found, accuracy = done.stdout.splitlines()[-2:]
    assert (found.split()[2], accuracy.split()[-2]) == ("50", "8")
