"""What an observer is told of a search. Log lines, and rows on a terminal: `test_messages.py`."""

import pytest
import torch

from linnaeus.autobatch import auto_find_batch_size
from linnaeus.autobatch.observer import SearchObserver
from tests.helpers.ledger import room


class Recorder(SearchObserver):
    """All events, in order."""

    def __init__(self):
        self.events = []

    def search_started(self, limits):
        self.events.append(("search", limits))

    def trial_started(self, size, purpose):
        self.events.append((purpose, size))

    def trial_finished(self, trial, budget_bytes):
        self.events.append(("finished", trial, budget_bytes))

    def size_timed(self, timing):
        self.events.append(("timed", timing))


@pytest.mark.usefixtures("few_timed_steps")
def test_the_events_of_a_search_come_in_their_order():
    recorder = Recorder()
    result = auto_find_batch_size(
        torch.empty_like,
        lambda size: torch.empty(size, 256 * 1024),
        device="cpu",
        observer=recorder,
        objective="throughput",
        max_batch_size=300,
        **room(150),
    )
    warm_up, (_, limits), *events = recorder.events
    timings = [event for event in events if event[0] in ("timing", "timed")]
    trials = [event for event in events if event not in timings]
    assert warm_up == ("warm-up", 1)
    assert (limits.min_size, limits.max_size, limits.total_name) == (1, 300, "memory_limit_gb")
    starts, ends = trials[::2], trials[1::2]
    assert {name for name, _ in starts} <= {"trial", "confirmation"}
    assert [size for _, size in starts] == [trial.size for trial in result.trials]
    assert [trial for _, trial, _ in ends] == list(result.trials)
    assert (ends[0][2], ends[-1][2]) == (limits.budget_bytes, result.budget_bytes)
    assert [name for name, _ in timings] == ["timing", "timed"] * (len(timings) // 2)
    timed = {timing.batch_size for _, timing in timings[1::2]}
    assert timed == {timing.batch_size for timing in result.timings}
