"""What the integrations share; its errors are in `tests/messages/integrations.txt`."""

from __future__ import annotations

import logging

import pytest

from linnaeus.autobatch.split import Split
from linnaeus.integrations.common import (
    SET_BY_TRAINER,
    check_divisors,
    check_effective_batch,
    check_values,
    checked_options,
    search_options,
    split_effective_batch,
)


def test_options_are_those_of_the_search_without_the_refused() -> None:
    assert {"tolerance", "predict", "max_batch_size"} <= search_options()
    assert not search_options() & SET_BY_TRAINER
    assert search_options({"predict"}) >= SET_BY_TRAINER
    given = {"tolerance": 0.1}
    checked = checked_options("val_options", given)
    assert checked == given
    assert checked is not given
    assert checked_options("val_options", {"bounds": {}}, refused={"start"}) == {"bounds": {}}
    check_values({"tolerance": 0.1, "memory_limit_gb": None})


def test_an_effective_batch_is_split_without_a_rest(caplog: pytest.LogCaptureFixture) -> None:
    check_effective_batch(96, 2)
    check_divisors(96, 2, 40, 24)
    with caplog.at_level(logging.WARNING, "linnaeus.autobatch"):
        assert split_effective_batch(96, 2, 40) == Split(24, 2)
        assert split_effective_batch(4096, 1, 128) == Split(128, 32), "no other size takes fewer steps"
        assert split_effective_batch(96, 2, 40, multiple_of=12) == Split(24, 2)
        assert split_effective_batch(96, 2, 40, multiple_of=16) == Split(16, 3)
        assert split_effective_batch(96, 2, 7, multiple_of=32) == Split(6, 8), "sizes below it are exact"
        assert not caplog.records
        assert split_effective_batch(514, 2, 40) == Split(1, 257)
    assert "512" in caplog.text
