"""The examples do what their text says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.ledger import held_bytes
from tests.helpers.runs import assert_same_bits

EXAMPLES = Path(__file__).parents[1] / "examples"
GPT = EXAMPLES / "gpt.py"
GIB = 1024**3


@pytest.fixture(scope="module")
def gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt", GPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _limit_gb(room_bytes: int) -> float:
    """A limit that leaves the search this much beyond what the process holds."""
    return (held_bytes() + room_bytes) / 0.8 / GIB


def test_the_search_leaves_no_trace_in_the_training_that_follows(gpt: ModuleType):
    gpt.run("cpu", 1, 1, None)  # everything is imported when the limit is taken
    searched = gpt.run("cpu", 5, None, _limit_gb(GIB // 32))
    assert searched.batch_size > 1
    plain = gpt.run("cpu", 5, searched.batch_size, None)
    assert plain.losses == searched.losses
    assert_same_bits(plain.model.state_dict(), searched.model.state_dict())


def test_training_learns(gpt: ModuleType):
    losses = gpt.run("cpu", 12, 16, None).losses
    assert losses[-1] < 0.9 * losses[0]
