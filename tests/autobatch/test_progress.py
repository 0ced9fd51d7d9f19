"""What is seen of a search while it runs: events, log lines, and rows on a terminal."""

import json
import logging
import re

import pytest
import torch

from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.observer import SearchObserver
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.search import TrialRecord
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.size_search.report import SearchProgress
from tests.helpers import consoles
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.runs import SMALL, freeze_what_is_there
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


@pytest.fixture(scope="module", autouse=True)
def _modules_loaded():
    """Memory of the first search of a process does not count here."""
    with BatchSizeFinder(
        step, make_batch, SearchSettings(max_batch_size=2), device="cpu"
    ) as finder:
        finder.find()
    freeze_what_is_there()


def settings(extra_mib, **others):
    """Settings that leave so much above what the process holds."""
    return SearchSettings(
        target_memory_fraction=1.0,
        tolerance=0.0,
        memory_limit_gb=limit_with_room_for(extra_mib),
        **others,
    )


# --- events ---


@pytest.mark.usefixtures("few_timed_steps")
def test_the_events_of_a_search_come_in_their_order():
    recorder = Recorder()
    with BatchSizeFinder(
        step, make_batch, settings(150, max_batch_size=300), observer=recorder, device="cpu"
    ) as finder:
        result = finder.find()
        num_searched = len(recorder.events)
        timings = finder.prefer_throughput(result).timings
    warm_up, (name, limits), *events = recorder.events[:num_searched]
    assert warm_up == ("warm-up", 1)
    assert (name, limits.min_size, limits.max_size, limits.target_memory_fraction) == (
        "search",
        1,
        300,
        1.0,
    )
    assert (limits.total_bytes, limits.total_name) == (result.total_bytes, "memory_limit_gb")
    starts, ends = events[::2], events[1::2]
    assert [(name, size) for name, size in starts[:-1] if name == "trial"]
    assert {name for name, _ in starts} <= {"trial", "confirmation"}
    assert [size for _, size in starts] == [trial.size for _, trial, _ in ends]
    assert [trial.size for _, trial, _ in ends] == [trial.size for trial in result.trials]
    budgets = [budget_bytes for _, _, budget_bytes in ends]
    assert budgets[0] == limits.budget_bytes
    assert budgets[-1] == result.budget_bytes
    timed = [event[1] for event in recorder.events if event[0] == "timed"]
    assert {timing.batch_size for timing in timed} == {timing.batch_size for timing in timings}
    assert all(timing.samples_per_s > 0 for timing in timed)
    assert [name for name, *_ in recorder.events].count("timing") == len(timed)


# --- a search without a terminal ---


def trial_lines(text):
    """Mode and size of each trial."""
    found = re.findall(r" (train|val), trial \d+: batch size (\d+) ", text)
    return [(mode, int(size)) for mode, size in found]


def test_where_no_terminal_is_a_run_prints_one_line_a_trial(run, tmp_path):
    bare = [option for option in SMALL if not option.startswith("MODEL.")]
    outcome = run(*bare, OWN_MODEL, *AUTOBATCH, "DATA.AUTOBATCH.MEMORY_LIMIT_GB=8")
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "runs/small/autobatch.json").read_text())
    trials = [
        (mode, trial["batch_size"]) for mode in ("train", "val") for trial in found[mode]["trials"]
    ]
    assert trial_lines(outcome.out) == trials
    assert (found["train"]["total_bytes"], found["train"]["total_is_limit"]) == (8 * GIB, True)
    assert outcome.out.count("(DATA.AUTOBATCH.MEMORY_LIMIT_GB)") == 4, "two searches, two summaries"
    assert logging.getLogger("linnaeus.autobatch").level == logging.NOTSET


# --- rows ---


def test_rows_are_for_terminals_and_levels_up_to_info(monkeypatch, caplog):
    terminal, plain = consoles.terminal(monkeypatch), consoles.plain_console()
    cases = ((plain, logging.INFO, 0), (terminal, logging.WARNING, 0), (terminal, logging.INFO, 2))
    for (console, output), level, num_lines in cases:
        caplog.set_level(level, "linnaeus.autobatch")
        progress = SearchProgress("val", RankStatus(), console)
        progress.trial_started(16, "trial")
        progress.trial_finished(TrialRecord(16, "fits", GIB // 2, 0.25), GIB)
        assert len(output.getvalue().splitlines()) == num_lines


# --- a real terminal ---
