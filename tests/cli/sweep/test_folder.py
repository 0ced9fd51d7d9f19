"""What is kept of the runs of a sweep."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from linnaeus.cli.sweep.folder import is_asked, lock_folder, prepare
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.launchers.outcome import Outcome, save_outcome
from tests.helpers.run_files import result
from tests.helpers.runs import SMALL, Run


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(["DATA.BATCH_SIZE=8"]).config


@pytest.fixture(scope="module")
def other() -> Config:
    return load_config(["DATA.BATCH_SIZE=9"]).config


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_finished_run_is_left_alone_until_its_configuration_changes(
    tmp_path: Path, config: Config, other: Config
) -> None:
    folder = tmp_path / "LR=0"
    assert prepare(folder, config) is None
    finished = Outcome(0, 3.0, None, result(8))
    save_outcome(folder, finished)
    (folder / "weights").touch()
    assert prepare(folder, config) == finished
    assert names(tmp_path) == ["LR=0"]
    assert prepare(folder, other) is None
    assert names(tmp_path) == ["LR=0", "LR=0.earlier-1"]
    assert names(folder) == ["asked.yaml", "logs"]
    assert (tmp_path / "LR=0.earlier-1/weights").exists()


def test_an_upgrade_that_adds_keys_repeats_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    now = load_config(["DATA.AUTOBATCH.START=8"]).config
    prepare(folder, now)
    save_outcome(folder, Outcome(0, 3.0, None, result(8)))
    new = ("FOCAL_GAMMA", "START:", "BATCH_SIZE_VAL")
    lines = (folder / "asked.yaml").read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.strip().startswith(new)]
    assert len(older) == len(lines) - len(new)
    (folder / "asked.yaml").write_text("".join(older))
    assert is_asked(folder, now)
    for chosen in ("LOSS.FOCAL_GAMMA=3", "DATA.BATCH_SIZE_VAL=7", "OPTIMIZER.LR=0.5"):
        assert not is_asked(folder, load_config([chosen]).config), chosen
    (folder / "asked.yaml").write_text("".join(older) + "NO_LONGER: 1\n")
    assert not is_asked(folder, now)


def test_a_run_starts_at_the_newest_sizes_that_a_run_of_the_sweep_has_found(tmp_path: Path) -> None:
    def starts(name: str, *argv: str) -> tuple[int | None, int | None]:
        prepare(tmp_path / name, load_config(argv).config)
        autobatch = load_config(["--cfg", str(tmp_path / name / "asked.yaml")]).config.DATA.AUTOBATCH
        return autobatch.START, autobatch.START_VAL

    def find(name: str, at: int, **sizes: int | None) -> None:
        found = {mode: size and {"batch_size": size} for mode, size in sizes.items()}
        (tmp_path / name / "autobatch.json").write_text(json.dumps(found))
        os.utime(tmp_path / name / "autobatch.json", (at, at))

    assert starts("first") == starts("second") == (None, None)
    find("second", 2, train=64, val=None)
    assert starts("third") == (64, None)
    find("first", 1, train=9, val=9)
    assert starts("third") == (64, None), "of the newest"
    find("third", 3, train=8, val=16)
    assert starts("fourth") == (8, 16)
    assert starts("fifth", "DATA.AUTOBATCH.START=5") == (5, 16), "as typed"
    assert is_asked(tmp_path / "fourth", load_config([]).config), "no result depends on it"
    (tmp_path / "third/autobatch.json").write_text("[]")
    assert starts("sixth") == (None, None)


@pytest.mark.parametrize("exit_code", [130, -9])
def test_an_interrupted_run_goes_on(tmp_path: Path, config: Config, other: Config, exit_code: int) -> None:
    folder = tmp_path / "run"
    prepare(folder, config)
    save_outcome(folder, Outcome(exit_code, 3.0))
    (folder / "checkpoint").touch()
    earlier = prepare(folder, config)
    assert earlier is not None
    assert (earlier.seconds, earlier.finished) == (3.0, False)
    assert names(folder) == ["asked.yaml", "checkpoint", "logs"], "nothing is known of the process to come"
    assert prepare(folder, config) is None, "that one's end was not seen"
    assert (folder / "checkpoint").exists()
    prepare(folder, other)
    assert not (folder / "checkpoint").exists()


def test_a_failed_run_begins_again(tmp_path: Path, config: Config) -> None:
    folder = tmp_path / "run"
    prepare(folder, config)
    save_outcome(folder, Outcome(1, 3.0, "why"))
    (folder / "checkpoint").touch()
    assert prepare(folder, config) is None
    assert not (folder / "checkpoint").exists()
    assert (tmp_path / "run.earlier-1/checkpoint").exists()


def test_a_run_that_outlived_its_sweep_counts(tmp_path: Path, config: Config) -> None:
    folder = tmp_path / "run"
    prepare(folder, config)
    (folder / "result.json").write_text('{"training_s": 2.5, "metrics": {}}')
    outcome = prepare(folder, config)
    assert outcome is not None
    assert outcome.finished
    assert outcome.seconds == 2.5


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "new/folder")
    with pytest.raises(ConfigError, match=str(os.getpid())):
        lock_folder(tmp_path / "new/folder")
    lock.release()
    lock_folder(tmp_path / "new/folder").release()
    assert names(tmp_path / "new/folder") == []


@pytest.mark.parametrize("name", ["sweep.json", "study.journal"])
def test_no_run_trains_into_the_folder_of_a_sweep(run: Run, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "runs/mine"
    folder.mkdir(parents=True)
    (folder / name).touch()
    outcome = run(*SMALL, "EXPERIMENT.NAME=mine")
    assert (outcome.code, "EXPERIMENT.NAME: " in outcome.err) == (2, True)
    assert names(folder) == [name]
