"""What the integrations share."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from linnaeus.batching.stages import Split
from linnaeus.errors import AutoBatchError
from linnaeus.integrations.common import (
    SET_BY_TRAINER,
    check_divisors,
    check_effective_batch,
    check_values,
    checked_options,
    group_of_this_process,
    min_samples,
    refill,
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


def test_an_unknown_option_and_a_refused_one_are_named() -> None:
    with pytest.raises(
        TypeError, match=r"^val_options has no argument 'size'; it takes length, max_batch_size"
    ):
        checked_options("val_options", {"size": 1}, own=["length"])
    with pytest.raises(TypeError, match="val_options takes no 'bounds': the integration sets it itself"):
        checked_options("val_options", {"bounds": {}})
    assert checked_options("val_options", {"bounds": {}}, refused={"start"}) == {"bounds": {}}
    with pytest.raises(ValueError, match=r"val_options\['max_batch_size'\] is 0; it must be at least 1"):
        checked_options("val_options", {"max_batch_size": 0})
    with pytest.raises(TypeError, match=r"^max_batch_size is '4'; it must be an integer"):
        checked_options("autobatch()", {"max_batch_size": "4"}, own=["max_batch_size"])


def test_an_effective_batch_is_split_without_a_rest() -> None:
    assert split_effective_batch(96, 2, 40) == Split(24, 2)
    assert split_effective_batch(4096, 1, 128) == Split(128, 32), "no other size takes fewer steps"
    check_effective_batch(96, 2)
    with pytest.raises(AutoBatchError, match="is 97, which does not divide by 2 processes; 98 would"):
        check_effective_batch(97, 2)
    with pytest.raises(ValueError, match="effective_batch_size is 0; it must be at least 1"):
        check_effective_batch(0, 2)


def test_a_split_into_many_steps_warns_with_better_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "linnaeus.autobatch"):
        assert split_effective_batch(96, 2, 40) == Split(24, 2)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "linnaeus.autobatch"):
        assert split_effective_batch(514, 2, 40) == Split(1, 257)
    assert "257 accumulation steps are slow" in caplog.text
    assert "512 or 518 would do better" in caplog.text


def test_a_split_into_too_few_samples_is_refused() -> None:
    with pytest.raises(
        AutoBatchError, match="256 or 259 would do better, because a batch must have at least 2"
    ):
        split_effective_batch(257, 1, 40, smallest=2)
    assert min_samples(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) == 2
    assert min_samples(nn.Linear(2, 2)) == 1


def test_a_split_keeps_to_multiples() -> None:
    assert split_effective_batch(96, 2, 40, multiple_of=12) == Split(24, 2)
    assert split_effective_batch(96, 2, 40, multiple_of=16) == Split(16, 3)
    assert split_effective_batch(96, 2, 7, multiple_of=32) == Split(6, 8), "sizes below it are exact"
    with pytest.raises(AutoBatchError, match=r"no divisor of 48 is a multiple of 32.*; 64 or 128 would do"):
        split_effective_batch(96, 2, 40, multiple_of=32)
    check_divisors(96, 2, 40, 24)
    with pytest.raises(AutoBatchError, match=r"no divisor of 48 has at least 25 samples and at most 40"):
        check_divisors(96, 2, 40, 25)


def test_values_of_options_are_checked_as_by_the_search() -> None:
    check_values({"tolerance": 0.1, "memory_limit_gb": None})
    with pytest.raises(ValueError, match="tolerance is 2"):
        check_values({"tolerance": 2})
    with pytest.raises(ValueError, match="max_batch_size is 512; it must be at least min_batch_size, 600"):
        check_values({"min_batch_size": 600})


def test_a_container_is_refilled_in_place() -> None:
    numbers, names = [1, 2], {"a": 1}
    refill(numbers, [3])
    refill(names, {"b": 2})
    assert (numbers, names) == ([3], {"b": 2})


def test_a_process_alone_needs_no_group_of_its_own() -> None:
    with group_of_this_process() as group:
        assert group is None
