"""Runs that find batch sizes for each other."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from linnaeus.autobatch.protocol import exchange
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.shared import SIZES, Sharing, find_shared_sizes
from linnaeus.autobatch.sizes import SizeSearch
from linnaeus.files import LOCK, FolderLock
from tests.autobatch.test_sizes import ON, OWN_DATA, OWN_MODEL, one_line, prepared
from tests.helpers.forks import ROOT
from tests.helpers.runs import SMALL, Run, assert_same_bits, wait_until, weights

SHARED = "DATA.AUTOBATCH.SHARED_FOLDER=shared"
SHORT = (*SMALL, ON, "TRAIN.EPOCHS=1", "DATA.AUTOBATCH.MAX_BATCH_SIZE=24")


def place_in(folder: Path) -> Path:
    """The only folder of conditions."""
    [place] = folder.iterdir()
    return place


def test_a_run_takes_what_another_one_has_found_and_trains_the_same(run: Run, tmp_path: Path) -> None:
    other = ("OPTIMIZER.LR=0.01", "EXPERIMENT.SEED=3", "OPTIMIZER.WEIGHT_DECAY=0.2")
    assert "found by" not in run(*SHORT, SHARED, "EXPERIMENT.NAME=first").out
    content = json.loads((place_in(tmp_path / "shared") / SIZES).read_text())
    assert content["found_by"] == "first"
    second = run(*SHORT, SHARED, *other, "EXPERIMENT.NAME=second")
    text = "AutoBatch: batch size 24 (train) and 31 (val), found by run first under the same conditions"
    assert text in one_line(second.out)
    assert "trying" not in second.out
    found = json.loads((tmp_path / "runs/second/autobatch.json").read_text())
    assert (found["found_by"], found["train"]) == ("first", content["autobatch"]["train"])

    alone = run(*SHORT, *other, "EXPERIMENT.NAME=alone")
    assert alone.code == 0
    assert_same_bits(weights(tmp_path / "runs/second"), weights(tmp_path / "runs/alone"))
    assert "found_by" not in json.loads((tmp_path / "runs/alone/autobatch.json").read_text())

    third = run(*SHORT, SHARED, "TRAIN.AMP=bf16", "EXPERIMENT.NAME=third")
    assert "found by" not in third.out, "the step needs other memory"
    assert len(list((tmp_path / "shared").iterdir())) == 2


def search_of(*argv: str) -> SizeSearch:
    search, _ = prepared(OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.MAX_BATCH_SIZE=4", *argv)
    return search


def shared(folder: Path, name: str, *argv: str) -> tuple[dict[str, AutoBatchResult], str | None]:
    return find_shared_sizes(search_of(*argv), "key", Sharing(folder, name))


def sizes(found: dict[str, AutoBatchResult]) -> dict[str, int]:
    return {mode: result.batch_size for mode, result in found.items()}


EXPECTED = {"train": 4, "val": 8}


@pytest.mark.parametrize("damage", ["{", '{"found_by": "x", "autobatch": {"train": 1}}'])
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: str) -> None:
    shared(tmp_path, "first")
    path = place_in(tmp_path) / SIZES
    path.write_text(damage)
    assert shared(tmp_path, "second")[1] is None
    assert shared(tmp_path, "third")[1] == "second"


def test_sizes_that_no_longer_fit_are_not_taken_and_stay(tmp_path: Path) -> None:
    shared(tmp_path, "first")
    path = place_in(tmp_path) / SIZES
    content = json.loads(path.read_text())
    for trial in content["autobatch"]["train"]["trials"]:
        trial["peak_bytes"] = 1 << 60
    path.write_text(text := json.dumps(content))
    found, by = shared(tmp_path, "second")
    assert (sizes(found), by) == (EXPECTED, None)
    assert path.read_text() == text


@pytest.mark.parametrize("growth_bytes", [0, 1 << 60])
def test_what_a_search_loads_outside_the_allocator_must_be_free_too(
    tmp_path: Path, growth_bytes: int
) -> None:
    """On a GPU the kernels and libraries of a step are not loaded yet when sizes are taken."""
    shared(tmp_path, "first")
    path = place_in(tmp_path) / SIZES
    content = json.loads(path.read_text())
    assert content["growth_bytes"] == 0, "on the CPU they belong to the process"
    path.write_text(json.dumps(content | {"growth_bytes": growth_bytes}))
    assert shared(tmp_path, "second")[1] == (None if growth_bytes else "first")


def test_growth_outside_the_allocator_is_measured_around_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = iter([100, 130])
    monkeypatch.setattr("linnaeus.autobatch.shared._non_allocator_bytes", lambda search: next(outside))
    shared(tmp_path, "first")
    assert json.loads((place_in(tmp_path) / SIZES).read_text())["growth_bytes"] == 30


def test_the_growth_that_is_saved_is_that_of_the_rank_with_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels and buffers differ between ranks, and the budget of each is reduced by it."""

    def of_ranks(control: Any, work: Any, **options: Any) -> list[Any]:
        mine = exchange(control, work, **options)
        return [*mine, other] if type(mine[0]) is int else mine

    monkeypatch.setattr("linnaeus.autobatch.shared.exchange", of_ranks)
    for other in (500, 3):
        outside = iter([100, 130])
        monkeypatch.setattr("linnaeus.autobatch.shared._non_allocator_bytes", lambda search: next(outside))  # noqa: B023
        shared(tmp_path / str(other), "first")
        saved = json.loads((place_in(tmp_path / str(other)) / SIZES).read_text())
        assert saved["growth_bytes"] == max(other, 30)


def test_sizes_are_shared_only_where_all_ranks_have_the_same_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices of the other ranks may be of another kind."""
    others = ["{}"]

    def of_ranks(control: Any, work: Any, **options: Any) -> list[Any]:
        mine = exchange(control, work, **options)[0]
        return [mine, *others] if isinstance(mine, str) else [mine]

    monkeypatch.setattr("linnaeus.autobatch.shared.exchange", of_ranks)
    shared(tmp_path, "first")
    assert shared(tmp_path, "second")[1] == "first"
    others[0] = '{"process": 2}'
    assert shared(tmp_path, "third")[1] is None


@pytest.mark.slow
def test_a_resumed_run_still_says_who_found_its_sizes(run: Run, tmp_path: Path) -> None:
    assert run(*SHORT, SHARED, "EXPERIMENT.NAME=first").code == 0
    assert run(*SHORT, SHARED, "EXPERIMENT.NAME=second").code == 0
    again = run(*SHORT, SHARED, "EXPERIMENT.NAME=second", "TRAIN.EPOCHS=2", "TRAIN.AUTO_RESUME=True")
    assert "the checkpoint's batch sizes are kept" in one_line(again.out)
    assert json.loads((tmp_path / "runs/second/autobatch.json").read_text())["found_by"] == "first"


def test_sizes_beyond_the_host_memory_of_this_machine_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared(tmp_path, "first")
    monkeypatch.setattr("linnaeus.autobatch.bounds.available_host_bytes", lambda: 1)
    found, by = shared(tmp_path, "second")
    assert (sizes(found), by) == ({"train": 1, "val": 1}, None)


def test_a_folder_that_cannot_be_written_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("linnaeus"), "propagate", True)
    (tmp_path / "file").touch()
    found, by = shared(tmp_path / "file", "first")
    assert (sizes(found), by) == (EXPECTED, None)
    [text] = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert re.fullmatch(r"AutoBatch: sizes are not shared: .*: Not a directory \(DATA.*SHARED_FOLDER\)", text)


def test_a_lock_that_cannot_be_made_names_no_other_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("linnaeus"), "propagate", True)
    shared(tmp_path, "first")
    (place_in(tmp_path) / SIZES).unlink()
    (place_in(tmp_path) / LOCK).mkdir()
    assert shared(tmp_path, "second")[1] is None
    [text] = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert ("Is a directory" in text, "OUTPUT_DIR" in text, "\n" in text) == (True, False, False)


class InThread:
    """A run that finds its sizes in a thread."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.outcome: Any = None
        search = search_of(*argv)

        def work() -> None:
            self.outcome = find_shared_sizes(search, "key", Sharing(folder, "waiting"))

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def is_waiting(self, caplog: pytest.LogCaptureFixture) -> bool:
        return any("another run is searching" in record.getMessage() for record in caplog.records)

    def result(self) -> tuple[dict[str, int], str | None]:
        self.thread.join(60)
        assert self.outcome is not None, "it waits for ever"
        return sizes(self.outcome[0]), self.outcome[1]


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged, the notes too."""
    monkeypatch.setattr(logging.getLogger("linnaeus"), "propagate", True)
    caplog.set_level(logging.INFO, logger="linnaeus.run")
    return caplog


def test_a_run_waits_for_the_one_that_searches(tmp_path: Path, heard: pytest.LogCaptureFixture) -> None:
    shared(tmp_path, "first")
    place = place_in(tmp_path)
    text = (place / SIZES).read_text()
    (place / SIZES).unlink()
    lock = FolderLock(place)
    waiting = InThread(tmp_path)
    wait_until(lambda: waiting.is_waiting(heard))
    assert waiting.thread.is_alive()
    (place / SIZES).write_text(text)
    lock.release()
    assert waiting.result() == (EXPECTED, "first")


HOLDER = "import sys, time; from pathlib import Path; from linnaeus.files import FolderLock\n"
HOLDER += "lock = FolderLock(Path(sys.argv[1])); print(flush=True); time.sleep(100)"


def test_a_run_searches_once_the_one_that_was_searching_has_died(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    shared(tmp_path, "first")
    place = place_in(tmp_path)
    (place / SIZES).unlink()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        waiting = InThread(tmp_path)
        wait_until(lambda: waiting.is_waiting(heard))
        assert waiting.thread.is_alive()
        holder.kill()
    assert waiting.result() == (EXPECTED, None)
    assert not (place / LOCK).exists()
    assert shared(tmp_path, "last")[1] == "waiting"


@pytest.mark.slow
def test_a_run_searches_by_itself_where_the_other_takes_too_long(tmp_path: Path) -> None:
    limit = "DATA.AUTOBATCH.TIMEOUT_MINUTES=0.02"
    shared(tmp_path, "first", limit)
    place = place_in(tmp_path)
    (place / SIZES).unlink()
    lock = FolderLock(place)
    began = time.monotonic()
    assert InThread(tmp_path, limit).result()[1] is None
    assert time.monotonic() - began >= 1.2
    lock.release()
    assert shared(tmp_path, "last", limit)[1] == "waiting"


def test_a_search_that_fails_leaves_nothing_and_lets_others_search(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        shared(tmp_path, "first", "MODEL.fails_at=1")
    assert [path.name for path in place_in(tmp_path).iterdir()] == []
    with pytest.raises(ZeroDivisionError):
        shared(tmp_path, "second", "MODEL.fails_at=1")


@pytest.mark.distributed
@pytest.mark.slow
def test_with_two_processes_rank_0_decides(torchrun: Run, tmp_path: Path) -> None:
    for name in ("first", "second"):
        outcome = torchrun(2, *SHORT, SHARED, f"EXPERIMENT.NAME={name}")
        assert outcome.code == 0, outcome.err
        assert ("found by run first" in outcome.out) == (name == "second")
    first, second = (
        json.loads((tmp_path / f"runs/{name}/autobatch.json").read_text()) for name in ("first", "second")
    )
    assert second["train"] == first["train"]
    assert second["train"]["ran_on_every_rank"]
    assert_same_bits(weights(tmp_path / "runs/first"), weights(tmp_path / "runs/second"))


def test_the_runs_of_a_sweep_share_a_folder_unless_another_one_is_set(run: Run) -> None:
    argv = ("sweep", *SMALL, "OPTIMIZER.LR=1,2", "EXPERIMENT.NAME=rates", "--print-config")
    assert run(*argv).out.count("SHARED_FOLDER: runs/rates/autobatch\n") == 2
    assert run(*argv, "DATA.AUTOBATCH.SHARED_FOLDER=mine").out.count("SHARED_FOLDER: mine\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sweep_searches_once_for_the_runs_that_cannot_differ(
    run_in_child: Run, tmp_path: Path, jobs: str
) -> None:
    argv = ("sweep", *SHORT, "OPTIMIZER.LR=0.1,0.2", "EXPERIMENT.NAME=rates", "--jobs", jobs)
    outcome = run_in_child(*argv)
    assert outcome.code == 0, outcome.err
    folders = [tmp_path / f"runs/rates/OPTIMIZER.LR={rate}" for rate in ("0.1", "0.2")]
    texts = [(folder / "logs/output.txt").read_text() for folder in folders]
    took = ["found by run OPTIMIZER.LR=" in text for text in texts]
    assert sorted(took) == [False, True], "whichever came first searched"
    assert took[1] or jobs == "2"
    again = run_in_child("compare", "runs/rates")
    assert again.out.count("finished") == 2
