"""AutoBatch under torchrun, with real processes and faults; more is in test_group and test_cluster."""

import json

import pytest

from tests.autobatch.faulty import TINY
from tests.helpers.runs import assert_same_bits, weights

pytestmark = [pytest.mark.e2e]


def sizes(folder):
    found = json.loads((folder / "runs/small/autobatch.json").read_text())
    return found["train"]["batch_size"], found["val"]["batch_size"]


def test_the_size_that_all_ranks_ran_trains_as_one_set_by_hand(torchrun, tmp_path, monkeypatch):
    """Also a model with a branch that no step uses."""
    monkeypatch.setenv("FAULT", "oom:1:backward")
    outcome = torchrun(2, *TINY)
    assert outcome.code == 0, outcome.err
    assert "rank 1" in outcome.out + outcome.err, "which fits no more"
    monkeypatch.delenv("FAULT")
    train, val = sizes(tmp_path)
    assert (train, val) == (8, 16)
    outcome = torchrun(
        2,
        *TINY,
        "DATA.AUTOBATCH.ENABLED=False",
        f"DATA.BATCH_SIZE={train}",
        f"DATA.BATCH_SIZE_VAL={val}",
        "EXPERIMENT.NAME=by_hand",
    )
    assert outcome.code == 0, outcome.err
    assert_same_bits(weights(tmp_path / "runs/small"), weights(tmp_path / "runs/by_hand"))
