"""Runs that find batch sizes for each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.files import FolderLock
from linnaeus.sizing.shared import SIZES, Sharing, find_shared_sizes
from linnaeus.sizing.sizes import SizeSearch
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
    assert shared(folder, "next")[1] == "first"
    (place_in(folder) / SIZES).write_text("{")
    assert shared(folder, "second")[1] is None
    found, by = shared(folder, "third")
    assert (sizes(found), by) == (EXPECTED, "second")


@pytest.mark.parametrize("needs", ["more than the budget", "kernels and libraries beyond it"])
def test_sizes_that_no_longer_fit_are_not_taken_and_stay(folder: Path, needs: str) -> None:
    path = place_in(folder) / SIZES
    content = json.loads(path.read_text())
    if needs == "more than the budget":
        for trial in content["autobatch"]["train"]["trials"]:
            trial["peak_bytes"] = 1 << 60
    else:
        content["growth_bytes"] = 1 << 60
    path.write_text(text := json.dumps(content))
    found, by = shared(folder, "second")
    assert (sizes(found), by) == (EXPECTED, None)
    assert path.read_text() == text


def test_a_run_waits_for_the_one_that_searches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_in(folder)
    saved = (place / SIZES).rename(folder.parent / "saved.json")
    lock = FolderLock(place)
    clock = Script(nothing, lambda: shutil.copy(saved, place / SIZES), pytest.fail)
    monkeypatch.setattr("linnaeus.sizing.shared.time", clock)
    found, by = shared(folder, "waiting")
    assert (sizes(found), by, clock.events) == (EXPECTED, "first", [pytest.fail])
    (place / SIZES).unlink()
    clock.events[:] = [nothing, lock.release]
    assert shared(folder, "again")[1] is None, "the other one has ended without a result"
    assert shared(folder, "last")[1] == "again"


def test_a_search_that_fails_leaves_nothing_and_lets_others_search(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            shared(tmp_path, "first", "MODEL.fails_at=1")
        assert [path.name for path in place_in(tmp_path).iterdir()] == []


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
