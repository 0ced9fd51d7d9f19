"""What is seen of a search while it runs: events, log lines, and rows on a terminal."""

import json
import logging
import re

import pytest
import torch

from linnaeus.autobatch import auto_find_batch_size
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.observer import SearchObserver
from tests.helpers.ledger import room
from tests.helpers.runs import SMALL
from tests.helpers.searches import OWN_MODEL

AUTOBATCH = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=24", "TRAIN.EPOCHS=1")


def make_batch(size):
    return torch.empty(size, 256 * 1024)


def step(batch):
    """Twice the batch at its peak: two MiB a sample."""
    torch.empty_like(batch)


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


# --- events ---


@pytest.mark.usefixtures("few_timed_steps")
def test_the_events_of_a_search_come_in_their_order():
    recorder = Recorder()
    result = auto_find_batch_size(
        step,
        make_batch,
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


# --- a search without a terminal ---


def test_where_no_terminal_is_a_run_prints_one_line_a_trial(run, tmp_path):
    bare = [option for option in SMALL if not option.startswith("MODEL.")]
    outcome = run(*bare, OWN_MODEL, *AUTOBATCH, "DATA.AUTOBATCH.MEMORY_LIMIT_GB=8")
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "runs/small/autobatch.json").read_text())
    lines = re.findall(r" (train|val), trial \d+: batch size (\d+) ", outcome.out)
    trials = [(mode, trial) for mode in ("train", "val") for trial in found[mode]["trials"]]
    assert lines == [(mode, str(trial["batch_size"])) for mode, trial in trials]
    assert (found["train"]["total_bytes"], found["train"]["total_is_limit"]) == (8 * GIB, True)
    assert outcome.out.count("(DATA.AUTOBATCH.MEMORY_LIMIT_GB)") == 4, "two searches, two summaries"
    assert logging.getLogger("linnaeus.autobatch").level == logging.NOTSET
