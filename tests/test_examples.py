from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ledger import held_bytes
from tests.helpers.runs import assert_same_bits

EXAMPLES = Path(__file__).parents[1] / "examples"
GPT = EXAMPLES / "gpt.py"
GIB = 1024**3


@pytest.fixture(scope="module")
def run() -> Any:
    return runpy.run_path(str(GPT))["run"]


def _limit_gb(room_bytes: int) -> float:
    """A limit that leaves the search this much beyond what the process holds."""
    return (held_bytes() + room_bytes) / 0.8 / GIB


def test_the_search_leaves_no_trace_in_the_training_that_follows(run: Any) -> None:
    run("cpu", 1, 1, None)  # everything is imported when the limit is taken
    searched = run("cpu", 5, None, _limit_gb(GIB // 32))
    assert searched.batch_size > 1
    plain = run("cpu", 5, searched.batch_size, None)
    assert plain.losses == searched.losses
    assert_same_bits(plain.model.state_dict(), searched.model.state_dict())


def test_training_learns(run: Any) -> None:
    losses = run("cpu", 12, 16, None).losses
    assert losses[-1] < 0.9 * losses[0]
