"""What is kept of runs, and how they are grouped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from linnaeus.commands.sweep.folder import locked, prepare
from linnaeus.commands.sweep.results import Row, Sweep, series_of
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.launchers.outcome import Outcome, read_outcome, save_outcome


def result(batch_size: int, top1: float = 0.5, **more: Any) -> dict[str, Any]:
    """The content of a run's `result.json`."""
    sizes = {"batch_size": batch_size, "effective_batch": batch_size * 2 * 3}
    metrics = {"loss": 1 - top1, "top1/kind": top1}
    speed = {"training_s": 100 / batch_size, "images_per_s": 7.0}
    return {"metrics": metrics, "headline": "top1/kind", **speed, **sizes, **more}


def row(values: dict[str, str], found: dict[str, Any] | None, exit_code: int = 0) -> Row:
    return Row(values, Path("runs"), Outcome(exit_code, 9.0, None, found))


def test_runs_that_differ_in_size_and_seed_are_one_series() -> None:
    rows = [
        row({"DATA.BATCH_SIZE": str(size), "X.LR_SCALING": rule, "EXPERIMENT.SEED": seed}, result(size, top1))
        for size in (16, 8)
        for rule in ("none", "linear")
        for seed, top1 in (("0", 0.25), ("1", 0.75 if rule == "none" else 0.5))
    ]
    none, linear = series_of(rows)
    assert (none.label, linear.label) == ("LR_SCALING=none", "LR_SCALING=linear")
    assert none.means("top1/kind") == [(48, 0.5), (96, 0.5)]
    assert linear.means("top1/kind") == [(48, 0.375), (96, 0.375)]
    assert none.means("training_s") == [(48, 12.5), (96, 6.25)]
    assert [len(one.rows) for one in (none, linear)] == [4, 4]


def test_runs_without_a_result_are_left_out_of_the_series() -> None:
    rows = [row({"DATA.BATCH_SIZE": "8"}, result(8)), row({"DATA.BATCH_SIZE": "9"}, None, exit_code=1)]
    [series] = series_of(rows)
    assert (series.label, series.rows) == ("BATCH_SIZE=8", rows[:1])
    assert series_of(rows[1:]) == []


def test_a_key_that_does_not_change_the_size_labels_the_series() -> None:
    rows = [row({"OPTIMIZER.LR": text}, result(8)) for text in ("0.1", "0.2")]
    assert [one.label for one in series_of(rows)] == ["LR=0.1", "LR=0.2"]


def test_the_metric_that_is_compared() -> None:
    rows = [row({"A": "1"}, None, exit_code=3), row({"A": "2"}, result(8))]
    assert Sweep(rows).metric == "top1/kind"
    assert Sweep(rows, "loss").metric == "loss"
    assert Sweep(rows, "top5/kind").metric == "top1/kind"
    assert Sweep(rows[:1]).metric == "loss"


def test_status() -> None:
    assert Row({}, Path()).status == "not run"
    assert row({}, result(8)).status == "finished"
    assert row({}, None, exit_code=1).status == "failed"
    assert row({}, None, exit_code=0).status == "failed"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config([f"EXPERIMENT.OUTPUT_DIR={tmp_path}", "DATA.BATCH_SIZE=8"]).config


def other(config: Config) -> Config:
    return load_config([f"EXPERIMENT.OUTPUT_DIR={config.EXPERIMENT.OUTPUT_DIR}", "DATA.BATCH_SIZE=9"]).config


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_finished_run_is_left_alone_until_its_configuration_changes(tmp_path: Path, config: Config) -> None:
    folder = tmp_path / "LR=0"
    assert prepare(folder, config) is None
    finished = Outcome(0, 3.0, None, result(8))
    save_outcome(folder, finished)
    (folder / "weights").touch()
    assert prepare(folder, config) == finished
    assert names(tmp_path) == ["LR=0"]
    assert prepare(folder, other(config)) is None
    assert names(tmp_path) == ["LR=0", "LR=0.earlier-1"]
    assert names(folder) == ["asked.yaml", "logs"]
    assert (tmp_path / "LR=0.earlier-1/weights").exists()


@pytest.mark.parametrize("exit_code", [130, 138, 143, -9])
def test_an_interrupted_run_goes_on(tmp_path: Path, config: Config, exit_code: int) -> None:
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
    prepare(folder, other(config))
    assert not (folder / "checkpoint").exists()


@pytest.mark.parametrize("exit_code", [1, 2, 3])
def test_a_failed_run_begins_again(tmp_path: Path, config: Config, exit_code: int) -> None:
    folder = tmp_path / "run"
    prepare(folder, config)
    save_outcome(folder, Outcome(exit_code, 3.0, "why"))
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


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_damaged_outcome_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "outcome.json").write_text(text)
    assert read_outcome(tmp_path) is None


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "new/folder") as lock:
        lock.write("12 34")
        lock.flush()
        with pytest.raises(ConfigError, match="another sweep is at work here \\(process 12, 34\\)"):
            locked(tmp_path / "new/folder").__enter__()
    with locked(tmp_path / "new/folder"):
        pass
