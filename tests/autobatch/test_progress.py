"""What is seen of a search while it runs: events, log lines, and rows on a terminal."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import select
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from linnaeus.autobatch.find import BatchSizeFinder
from linnaeus.autobatch.observer import Purpose, SearchLimits, SearchLog, SearchObserver
from linnaeus.autobatch.progress import SearchProgress
from linnaeus.autobatch.protocol import RankStatus
from linnaeus.autobatch.result import Timing
from linnaeus.autobatch.search import TrialRecord
from linnaeus.memory.device import GIB
from tests.helpers import forks
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.runs import SMALL, Run

AUTOBATCH = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=24", "TRAIN.EPOCHS=1")
ROWS = r"^ +{number}  +{size}  {status} +\d+\.\d{{3}} +\d+\.\d% +\d+\.\d\d"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def make_batch(size: int) -> Tensor:
    return torch.ones(size, 256 * 1024)


def step(batch: Tensor) -> None:
    """Twice the batch at its peak: two MiB a sample."""
    (batch * 2).sum()


class Recorder(SearchObserver):
    """All events, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def search_started(self, limits: SearchLimits) -> None:
        self.events.append(("search", limits))

    def trial_started(self, size: int, purpose: Purpose) -> None:
        self.events.append((purpose, size))

    def trial_finished(self, trial: TrialRecord, budget_bytes: int) -> None:
        self.events.append(("finished", trial, budget_bytes))

    def size_timed(self, timing: Timing) -> None:
        self.events.append(("timed", timing))


@pytest.fixture(scope="module", autouse=True)
def _modules_loaded() -> None:
    """Memory of the first search of a process does not count here."""
    with BatchSizeFinder(step, make_batch, max_batch_size=2, device="cpu") as finder:
        finder.find()


def room(extra_mib: float) -> dict[str, Any]:
    """Arguments that leave so much above what the process holds."""
    return {"memory_limit_gb": limit_with_room_for(extra_mib), "device": "cpu"}


# --- events ---


def test_the_events_of_a_search_come_in_their_order() -> None:
    recorder = Recorder()
    with BatchSizeFinder(step, make_batch, max_batch_size=300, observer=recorder, **room(150)) as finder:
        result = finder.find(1.0)
    warm_up, (name, limits), *events = recorder.events
    assert warm_up == ("warm-up", 1)
    assert (name, limits.min_size, limits.max_size, limits.target_memory_fraction) == ("search", 1, 300, 1.0)
    assert (limits.total_bytes, limits.total_is_limit) == (result.total_bytes, True)
    starts, ends = events[::2], events[1::2]
    assert [(name, size) for name, size in starts[:-1] if name == "trial"]
    assert {name for name, _ in starts} <= {"trial", "confirmation"}
    assert [size for _, size in starts] == [trial.size for _, trial, _ in ends]
    assert [trial.size for _, trial, _ in ends] == [trial.size for trial in result.trials]
    budgets = [budget_bytes for _, _, budget_bytes in ends]
    assert budgets[0] == limits.budget_bytes
    assert budgets[-1] == result.budget_bytes


def test_a_size_found_is_confirmed_unless_it_ran_last() -> None:
    """The size found is not the last one tried when the next one had to fail after it."""
    recorder = Recorder()
    with BatchSizeFinder(step, make_batch, max_batch_size=300, observer=recorder, **room(150)) as finder:
        result = finder.find(1.0, strategy="power")
    tried = [size for name, size in (event[:2] for event in recorder.events) if name == "trial"]
    assert tried[-1] != result.batch_size
    assert ("confirmation", tried[-2]) in recorder.events


@pytest.mark.usefixtures("few_timed_steps")
def test_sizes_that_are_timed_are_events() -> None:
    recorder = Recorder()
    with BatchSizeFinder(step, make_batch, max_batch_size=8, observer=recorder, **room(400)) as finder:
        result = finder.prefer_throughput(finder.find(1.0))
    timed = [event[1] for event in recorder.events if event[0] == "timed"]
    assert {timing.batch_size for timing in timed} == {timing.batch_size for timing in result.timings}
    assert all(timing.samples_per_s > 0 for timing in timed)
    assert [name for name, *_ in recorder.events].count("timing") == len(timed)


# --- a search without a terminal ---


def test_without_an_observer_each_trial_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "linnaeus.autobatch"),
        BatchSizeFinder(step, make_batch, max_batch_size=300, **room(150)) as finder,
    ):
        result = finder.find(1.0)
    records = [record for record in caplog.records if record.name == "linnaeus.autobatch"]
    first, *lines = [record.getMessage() for record in records if record.levelno == logging.INFO]
    assert re.fullmatch(
        r"AutoBatch train: trying batch sizes from 1 to 300; budget \d+\.\d\d GiB of \d+\.\d\d GiB "
        r"\(memory_limit_gb\)", first,
    )  # fmt: skip
    assert len(lines) == len(result.trials)
    for number, (line, trial) in enumerate(zip(lines, result.trials, strict=True), start=1):
        assert line.startswith(f"train, trial {number}: batch size {trial.size} ")
        assert trial.peak_bytes is None or f" {trial.peak_bytes / GIB:.3f} of " in line
    assert any("fits, " in line for line in lines)


def trial_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if ", trial " in line]


def test_where_no_terminal_is_a_run_prints_one_line_a_trial(run: Run, tmp_path: Path) -> None:
    outcome = run(*SMALL, *AUTOBATCH, "DATA.AUTOBATCH.MEMORY_LIMIT_GB=8")
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "runs/small/autobatch.json").read_text())
    trials = [(mode, trial) for mode in ("train", "val") for trial in found[mode]["trials"]]
    lines = trial_lines(outcome.out)
    for line, (mode, trial) in zip(lines, trials, strict=True):
        assert re.search(rf" {mode}, trial \d+: batch size {trial['batch_size']} fits, ", line)
    about_data = outcome.out.index("synthetic: 96 training and 31 validation samples")
    assert about_data < outcome.out.index("AutoBatch train: trying") < outcome.out.index(lines[0])
    assert found["train"]["total_bytes"] == 8 * GIB
    assert found["train"]["total_is_limit"] is True
    assert outcome.out.count("of 8.00 GiB (MEMORY_LIMIT_GB)") == 4, "two searches, two summaries"
    assert logging.getLogger("linnaeus.autobatch").level == logging.NOTSET


@pytest.mark.parametrize(
    ("silent", "loud"), [("LOG_LEVEL_VAL", "train"), pytest.param("LOG_LEVEL", "val", marks=pytest.mark.slow)]
)
def test_a_mode_at_warning_shows_no_trial_and_the_level_ends_with_the_search(
    run: Run, silent: str, loud: str
) -> None:
    levels = {"LOG_LEVEL": "INFO", "LOG_LEVEL_VAL": "INFO", silent: "WARNING"}
    outcome = run(*SMALL, *AUTOBATCH, *(f"DATA.AUTOBATCH.{key}={level}" for key, level in levels.items()))
    assert outcome.code == 0, outcome.err
    assert trial_lines(outcome.out)
    assert all(f" {loud}, trial " in line for line in trial_lines(outcome.out))
    assert outcome.out.count(": trying batch sizes") == 1
    assert logging.getLogger("linnaeus.autobatch").level == logging.NOTSET


# --- rows ---


def record(size: int, status: Any, peak_gib: float | None) -> TrialRecord:
    return TrialRecord(size, status, None if peak_gib is None else int(peak_gib * GIB), 0.25)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return _ESCAPES.sub("", console.file.getvalue())


def go_on(progress: SearchProgress, trials: list[TrialRecord]) -> None:
    for trial in trials:
        progress.trial_started(trial.size, "trial")
        progress.trial_finished(trial, GIB)


def test_the_rows_of_a_table_and_the_status_of_the_next_trial(
    terminal: Console, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "linnaeus.autobatch")
    told: list[str] = []
    progress = SearchProgress("train", RankStatus(told.append), terminal)
    progress.trial_started(1, "warm-up")
    go_on(progress, [record(16, "fits", 0.5), record(64, "oom", None)])
    progress.trial_started(16, "confirmation")
    progress.trial_finished(record(16, "over", 1.25), GIB)
    progress.trial_started(8, "timing")
    progress.size_timed(Timing(8, 0.002, 4000.0))
    assert shown(terminal).splitlines() == [
        "trial  batch size  status  peak GiB  of budget  seconds",
        "    1          16  fits       0.500      50.0%     0.25",
        "    2          64  oom                             0.25",
        "    3          16  over       1.250     125.0%     0.25  confirmation",
        "                8  timed                          0.002  4000 samples/s",
    ]
    assert told == [
        "train: warming up with batch size 1",
        "train: trying batch size 16, trial 1",
        "train: trying batch size 64, trial 2 (16: 0.500 of 1.000 GiB)",
        "train: confirming batch size 16, trial 3 (64: oom, best 16: 0.500 of 1.000 GiB)",
        "train: timing batch size 8 (16: 1.250, best none of 1.000 GiB)",
    ]


TIMINGS = [(64, 200.0), (32, 190.0), (64, 210.0), (32, 195.0), (64, 0.0)]
"""Sizes and samples per second: a close comparison, then a size for which memory has become too little."""


def tell_timings(log: SearchLog) -> None:
    for size, samples_per_s in TIMINGS:
        log.trial_started(size, "timing")
        seconds = size / samples_per_s if samples_per_s else math.inf
        log.size_timed(Timing(size, seconds, samples_per_s))


def test_a_size_that_is_timed_again_has_one_row_unless_it_no_longer_fits(
    terminal: Console, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "linnaeus.autobatch"):
        tell_timings(SearchProgress("train", RankStatus(), terminal))
    _, *rows = [line.split(maxsplit=3) for line in shown(terminal).splitlines()]
    assert rows == [
        ["64", "timed", "0.320", "200 samples/s"],
        ["32", "timed", "0.168", "190 samples/s"],
        ["64", "timed", "inf", "no longer fits"],
    ]


def test_further_timings_of_a_size_are_for_the_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    lines = {}
    for level in (logging.INFO, logging.DEBUG):
        caplog.clear()
        with caplog.at_level(level, "linnaeus.autobatch"):
            tell_timings(SearchLog("val"))
        lines[level] = [text for text in caplog.messages if "val, timing: " in text]
    assert lines[logging.INFO] == [
        "val, timing: batch size 64: 200 samples/s",
        "val, timing: batch size 32: 190 samples/s",
        "val, timing: batch size 64: no longer fits",
    ]
    assert len(lines[logging.DEBUG]) == len(TIMINGS)


@pytest.mark.parametrize("has_terminal", [False, True])
def test_rows_are_for_terminals_and_levels_up_to_info(terminal: Console, has_terminal: bool) -> None:
    trials = [record(16, "fits", 0.5)]
    elsewhere = Console(file=io.StringIO(), width=80)
    console = terminal if has_terminal else elsewhere
    logger = logging.getLogger("linnaeus.autobatch")
    for level, num_lines in ((logging.WARNING, 0), (logging.INFO, 2 if has_terminal else 0)):
        logger.setLevel(level)
        try:
            go_on(SearchProgress("val", RankStatus(), console), trials)
        finally:
            logger.setLevel(logging.NOTSET)
        assert len(shown(console).splitlines()) == num_lines


# --- a real terminal ---


class Terminal:
    """A command line on a terminal of its own."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self._master, slave = os.openpty()
        termios.tcsetwinsize(slave, (40, 120))
        with os.fdopen(slave, "wb") as file:
            self.process = forks.start(
                ["-m", "linnaeus.main", *argv], cwd=folder, stdout=file, stderr=file,
                env={"PYTHONPATH": str(forks.ROOT), "CI": "", "TERM": "xterm", "NO_COLOR": "1"},
            )  # fmt: skip
        self._bytes = b""

    @property
    def text(self) -> str:
        """What has been written so far, without escape sequences; a return begins a line."""
        return _ESCAPES.sub("", self._bytes.decode(errors="replace")).replace("\r", "\n")

    def read_to_end(self) -> None:
        """Read all that is written until the process has ended well; fail after two minutes."""
        deadline = time.monotonic() + 120
        with suppress(OSError):  # the other side is closed
            while select.select([self._master], [], [], max(deadline - time.monotonic(), 0))[0]:
                self._bytes += os.read(self._master, 1 << 16)
            pytest.fail(f"it has not ended: {self.text}")
        assert self.process.wait(60) == 0, self.text

    def close(self) -> None:
        self.process.kill()
        with suppress(OSError):
            os.close(self._master)


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Any]:
    started: list[Terminal] = []

    def start(*argv: str) -> Terminal:
        started.append(Terminal(tmp_path, *argv))
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


def row(number: int, size: int, status: str = "fits") -> str:
    return ROWS.format(number=number, size=size, status=status)


def place(pattern: str, text: str) -> int:
    """Where the first match begins; what is written earlier comes earlier."""
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, text
    return found.start()


def test_a_run_on_a_terminal_shows_each_trial_as_it_ends(on_terminal: Any, tmp_path: Path) -> None:
    terminal = on_terminal(*SMALL, *AUTOBATCH)
    terminal.read_to_end()
    text, folder = terminal.text, tmp_path / "runs/small"
    assert text.index("synthetic: 96 training") < text.index("warming up") < text.index("trial  batch size")
    next_trial = r"^. 0:\d\d train: trying batch size 24, trial 2 \(16: "
    assert place(row(1, 16), text) < place(next_trial, text) < place(row(2, 24), text)
    found = json.loads((folder / "autobatch.json").read_text())
    log = (folder / "logs/rank0.log").read_text()
    for mode, part in zip(("train", "val"), text.split("AutoBatch val: trying"), strict=True):
        for number, trial in enumerate(found[mode]["trials"], start=1):
            size = trial["batch_size"]
            assert len(re.findall(row(number, size), part, re.MULTILINE)) == 1
            assert (
                log.count(f" INFO [rank 0] linnaeus.autobatch: {mode}, trial {number}: batch size {size} ")
                == 1
            )
    assert "batch size 16 fits" not in text, "the line is for the file alone"
    assert text.count("AutoBatch train: batch size 24") == 1


def test_a_terminal_shows_no_trial_at_warning(on_terminal: Any) -> None:
    terminal = on_terminal(*SMALL, *AUTOBATCH, "DATA.AUTOBATCH.LOG_LEVEL=WARNING")
    terminal.read_to_end()
    assert "AutoBatch train: batch size 24" in terminal.text
    for text in ("trying", "warming up", "of budget", "starting"):
        assert text not in terminal.text


@pytest.mark.slow
def test_an_analysis_shows_each_trial_as_it_ends(on_terminal: Any) -> None:
    terminal = on_terminal(
        "analyze", *SMALL, "--fractions", "0.9", "--max-bs", "24", "--modes", "train", "--throughput"
    )
    terminal.read_to_end()
    timing = r"^. 0:\d\d train: timing batch size 24 "
    assert place(row(1, 16), terminal.text) < place(timing, terminal.text)
    assert re.search(r"^ +24  timed +\d\.\d{3}  [\d.]+ samples/s", terminal.text, re.MULTILINE)
