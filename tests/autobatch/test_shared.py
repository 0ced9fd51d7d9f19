"""Runs that find batch sizes for each other."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from linnaeus.autobatch.protocol import exchange
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.shared import SIZES, Sharing, find_shared_sizes
from linnaeus.autobatch.sizes import SizeSearch
from linnaeus.files import LOCK, FolderLock
from tests.helpers.forks import ROOT
from tests.helpers.planes import Script, nothing
from tests.helpers.runs import SMALL, Run, assert_same_bits, weights
from tests.helpers.searches import ON, OWN_DATA, OWN_MODEL, prepared

SHARED = "DATA.AUTOBATCH.SHARED_FOLDER=shared"
SHORT = (*SMALL, ON, "TRAIN.EPOCHS=1", "DATA.AUTOBATCH.MAX_BATCH_SIZE=24")


def place_in(folder: Path) -> Path:
    """The only folder of conditions."""
    [place] = folder.iterdir()
    return place


def found_by(run: Path) -> str | None:
    """Who found the sizes of a run."""
    found: dict[str, Any] = json.loads((run / "autobatch.json").read_text())
    return found.get("found_by")


@pytest.mark.e2e
def test_a_run_takes_what_another_one_has_found_and_trains_the_same(run: Run, tmp_path: Path) -> None:
    other = ("OPTIMIZER.LR=0.01", "EXPERIMENT.SEED=3", "OPTIMIZER.WEIGHT_DECAY=0.2")
    resumed = ("TRAIN.EPOCHS=2", "TRAIN.AUTO_RESUME=True")
    runs = {
        "first": (SHARED,),
        "second": (SHARED, *other),
        "alone": other,
        "third": (SHARED, "TRAIN.AMP=bf16"),
    }
    for name, options in runs.items():
        outcome = run(*SHORT, *options, f"EXPERIMENT.NAME={name}")
        assert outcome.code == 0, outcome.err
    content = json.loads((tmp_path / "runs/second/autobatch.json").read_text())
    assert content["train"] == json.loads((tmp_path / "runs/first/autobatch.json").read_text())["train"]
    assert [found_by(tmp_path / "runs" / name) for name in runs] == [None, "first", None, None]
    assert len(list((tmp_path / "shared").iterdir())) == 2, "with bf16 the step needs other memory"
    assert_same_bits(weights(tmp_path / "runs/second"), weights(tmp_path / "runs/alone"))
    assert run(*SHORT, SHARED, *other, *resumed, "EXPERIMENT.NAME=second").code == 0
    assert found_by(tmp_path / "runs/second") == "first", "the checkpoint says so"


def search_of(*argv: str) -> SizeSearch:
    search, _ = prepared(OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.MAX_BATCH_SIZE=4", *argv)
    return search


def shared(folder: Path, name: str, *argv: str) -> tuple[dict[str, AutoBatchResult], str | None]:
    return find_shared_sizes(search_of(*argv), "key", Sharing(folder, name))


def sizes(found: dict[str, AutoBatchResult]) -> dict[str, int]:
    return {mode: result.batch_size for mode, result in found.items()}


EXPECTED = {"train": 4, "val": 8}


@pytest.fixture(scope="module")
def of_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    found, by = shared(folder, "first")
    assert (sizes(found), by) == (EXPECTED, None)
    return folder


@pytest.fixture
def folder(of_first: Path, tmp_path: Path) -> Path:
    """Where the first run has saved its sizes."""
    return Path(shutil.copytree(of_first, tmp_path / "folder"))


def test_a_search_is_saved_for_the_next_run_and_a_damaged_file_replaced(folder: Path) -> None:
    path = place_in(folder) / SIZES
    for damage in ("{", '{"found_by": "x", "autobatch": {"train": 1}}'):
        path.write_text(damage)
        assert shared(folder, "second")[1] is None
    found, by = shared(folder, "third")
    assert (sizes(found), by) == (EXPECTED, "second")


def test_sizes_that_no_longer_fit_are_not_taken_and_stay(folder: Path) -> None:
    path = place_in(folder) / SIZES
    content = json.loads(path.read_text())
    for trial in content["autobatch"]["train"]["trials"]:
        trial["peak_bytes"] = 1 << 60
    path.write_text(text := json.dumps(content))
    found, by = shared(folder, "second")
    assert (sizes(found), by) == (EXPECTED, None)
    assert path.read_text() == text


@pytest.mark.parametrize("growth_bytes", [0, 1 << 60])
def test_what_a_search_loads_outside_the_allocator_must_be_free_too(folder: Path, growth_bytes: int) -> None:
    """On a GPU the kernels and libraries of a step are not loaded yet when sizes are taken."""
    path = place_in(folder) / SIZES
    content = json.loads(path.read_text())
    assert content["growth_bytes"] == 0, "on the CPU they belong to the process"
    path.write_text(json.dumps(content | {"growth_bytes": growth_bytes}))
    assert shared(folder, "second")[1] == (None if growth_bytes else "first")


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


def test_sizes_beyond_the_host_memory_of_this_machine_are_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linnaeus.autobatch.bounds.available_host_bytes", lambda: 1)
    found, by = shared(folder, "second")
    assert (sizes(found), by) == ({"train": 1, "val": 1}, None)


def test_a_run_that_cannot_share_its_sizes_warns_and_searches(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder is a file, or its lock a folder."""
    monkeypatch.setattr(logging.getLogger("linnaeus"), "propagate", True)
    (tmp_path / "file").touch()
    place = place_in(folder)
    (place / SIZES).unlink()
    (place / LOCK).mkdir()
    for unusable in (tmp_path / "file", folder):
        caplog.clear()
        found, by = shared(unusable, "second")
        assert (sizes(found), by) == (EXPECTED, None)
        [text] = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
        assert ("SHARED_FOLDER" in text, "OUTPUT_DIR" in text, "\n" in text) == (True, False, False)


@pytest.fixture
def searched(folder: Path) -> Path:
    """The folder of conditions of a run whose sizes are still to be found by another one."""
    place = place_in(folder)
    (place / SIZES).rename(folder.parent / "saved.json")
    return place


def test_a_run_waits_for_the_one_that_searches(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FolderLock(searched)

    def save() -> None:
        (searched.parent.parent / "saved.json").rename(searched / SIZES)

    clock = Script(nothing, save, pytest.fail)
    monkeypatch.setattr("linnaeus.autobatch.shared.time", clock)
    found, by = shared(searched.parent, "waiting")
    assert (sizes(found), by, clock.events) == (EXPECTED, "first", [pytest.fail])
    lock.release()


HOLDER = "import sys; from pathlib import Path; from linnaeus.files import FolderLock\n"
HOLDER += "lock = FolderLock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"


def test_a_run_searches_once_the_one_that_was_searching_has_died(
    searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", HOLDER, str(searched)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()

        def die() -> None:
            holder.kill()
            holder.wait()

        clock = Script(nothing, die)
        monkeypatch.setattr("linnaeus.autobatch.shared.time", clock)
        found, by = shared(searched.parent, "waiting")
        assert (sizes(found), by, clock.events) == (EXPECTED, None, [])
    assert not (searched / LOCK).exists()
    assert shared(searched.parent, "last")[1] == "waiting"


def test_a_run_searches_by_itself_where_the_other_takes_too_long(
    searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FolderLock(searched)
    clock = Script()
    monkeypatch.setattr("linnaeus.autobatch.shared.time", clock)
    assert shared(searched.parent, "waiting")[1] is None
    limit_s = 60 * search_of().config.AUTOBATCH.TIMEOUT_MINUTES
    assert limit_s < clock.seconds < limit_s + 2
    lock.release()
    assert shared(searched.parent, "last")[1] == "waiting"


def test_a_search_that_fails_leaves_nothing_and_lets_others_search(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        shared(tmp_path, "first", "MODEL.fails_at=1")
    assert [path.name for path in place_in(tmp_path).iterdir()] == []
    with pytest.raises(ZeroDivisionError):
        shared(tmp_path, "second", "MODEL.fails_at=1")


def test_the_runs_of_a_sweep_share_a_folder_unless_another_one_is_set(run: Run) -> None:
    argv = ("sweep", *SMALL, "OPTIMIZER.LR=1,2", "EXPERIMENT.NAME=rates", "--print-config")
    for options, folder in (((), "runs/rates/autobatch"), (("DATA.AUTOBATCH.SHARED_FOLDER=mine",), "mine")):
        lines = [line.split() for line in run(*argv, *options).out.splitlines()]
        assert [line[1] for line in lines if line[:1] == ["SHARED_FOLDER:"]] == [folder] * 2


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sweep_searches_once_for_the_runs_that_cannot_differ(
    run_in_child: Run, tmp_path: Path, jobs: str
) -> None:
    argv = ("sweep", *SHORT, "OPTIMIZER.LR=0.1,0.2", "EXPERIMENT.NAME=rates", "--jobs", jobs)
    outcome = run_in_child(*argv)
    assert outcome.code == 0, outcome.err
    folders = [tmp_path / f"runs/rates/OPTIMIZER.LR={rate}" for rate in ("0.1", "0.2")]
    took = [found_by(folder) for folder in folders]
    assert took.count(None) == 1, "whichever came first searched"
    assert took[1] is not None or jobs == "2"
