"""AutoBatch in training loops with accelerate, in one process and in two."""

import pytest

pytest.importorskip("accelerate")

from tests.helpers import children
from tests.helpers.children import ROOT
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.processes import compute

RANKS = "tests.integrations.accelerate_ranks"
pytestmark = pytest.mark.timeout(600)  # two ranks run all searches for the fixtures, on busy cores


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process found."""
    return compute(RANKS, 1, tmp_path_factory.mktemp("one"))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUM_RANKS", "2")
        return compute(RANKS, 2, tmp_path_factory.mktemp("two"))


def test_a_run_is_the_one_with_the_size_found_by_hand(one, two):
    assert two[0]["found"] == two[1]["found"]
    for found in (one["found"], two[0]["found"]):
        assert found["same"], found
        assert 8 < found["size"] < 1024  # found, not a bound
        assert found["sizes"] == [found["size"]]


def test_batches_within_a_budget_hold_every_sample_once(one, two):
    for ranks in ([one], two):
        parts = [rank["within"] for rank in ranks]
        assert all(part["same"] and part["budget"] == 500 for part in parts)
        for epoch in (0, 1):
            shares = [part["shapes"][epoch] for part in parts]
            assert len({len(share) for share in shares}) == 1
            assert sum(rows for share in shares for rows, _ in share) == 200
            assert all(rows * length <= 500 for share in shares for rows, length in share)
        assert parts[0]["shapes"][0] != parts[0]["shapes"][1]


def test_trials_hold_the_longest_samples_until_the_update(one):
    assert one["trials"] == {"lengths": [56], "held": True}


def test_an_error_of_the_data_is_told_to_all(one, two):
    told, own = (found["broken"] for found in two)
    assert own == one["broken"] == "KeyError: 'mine'"
    assert told.startswith("AutoBatchError: ")
    assert told.endswith(own)


def test_the_example_learns_with_the_size_that_it_finds(tmp_path):
    argv = ("--cpu", "--epochs", "2", "--memory-limit-gb", limit_with_room_for(256) / 0.8)
    done = children.python(ROOT / "examples" / "accelerate_digits.py", *argv, cwd=tmp_path)
    lines = done.ok().out.splitlines()
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "trained"]
    assert float(lines[1].split()[-1]) > 0.5
    assert 8 < int(lines[2].split()[4]) <= 512
