"""What the integrations share; its errors are in `tests/messages/integrations.txt`."""

from __future__ import annotations

import logging

import pytest

from linnaeus.autobatch.split import Split
from linnaeus.integrations.common import split_effective_batch, warn_of_many_steps


def test_an_effective_batch_is_split_without_a_rest(caplog: pytest.LogCaptureFixture) -> None:
    assert split_effective_batch(96, 2, 40, 24, epoch=48) == Split(24, 2)
    assert split_effective_batch(96, 2, 40, multiple_of=12) == Split(24, 2)
    assert split_effective_batch(96, 2, 40, multiple_of=16) == Split(16, 3)
    assert split_effective_batch(96, 2, 7, multiple_of=32) == Split(6, 8), "sizes below it are exact"
    many, few = split_effective_batch(514, 2, 40), split_effective_batch(4096, 1, 128)
    assert (many, few) == (Split(1, 257), Split(128, 32))
    with caplog.at_level(logging.WARNING, "linnaeus.autobatch"):
        warn_of_many_steps(few, 1, 128)
        assert not caplog.records, "no other size takes fewer steps"
        warn_of_many_steps(many, 2, 40)
    assert "multiple of 80" in caplog.text
