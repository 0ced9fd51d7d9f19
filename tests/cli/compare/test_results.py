"""How runs are put side by side: statuses, metrics, and the lines of the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linnaeus.cli.compare.differences import SEED
from linnaeus.cli.compare.folders import natural
from linnaeus.cli.compare.results import Comparison, Row
from linnaeus.cli.compare.series import Group, axis_of, groups_by, point_of
from linnaeus.launchers.outcome import Outcome
from tests.helpers.run_files import result, write_validations


def row(values: dict[str, str], found: dict[str, Any] | None, exit_code: int = 0) -> Row:
    return Row(values, Path("runs"), Outcome(exit_code, 9.0, None, found))


def drawn(rows: list[Row]) -> list[Group]:
    """The lines of the panels against the axis of the rows."""
    axis = axis_of(rows)
    return groups_by((row for row in rows if axis.place(row) is not None), axis.keys | {SEED})


def means(group: Group, name: str, rows: list[Row]) -> list[tuple[float, float]]:
    axis = axis_of(rows)
    return [mean[:2] for mean in group.means(lambda row: point_of(row, axis, name))]


def test_runs_that_differ_in_size_and_seed_are_one_series() -> None:
    rows = [
        row({"DATA.BATCH_SIZE": str(size), "X.LR_SCALING": rule, "EXPERIMENT.SEED": seed}, result(size, top1))
        for size in (16, 8)
        for rule in ("none", "linear")
        for seed, top1 in (("0", 0.25), ("1", 0.75 if rule == "none" else 0.5))
    ]
    assert axis_of(rows).is_size
    none, linear = drawn(rows)
    assert (none.label, linear.label) == ("LR_SCALING=none", "LR_SCALING=linear")
    assert means(none, "top1/kind", rows) == [(48, 0.5), (96, 0.5)]
    assert means(linear, "top1/kind", rows) == [(48, 0.375), (96, 0.375)]
    assert means(none, "training_s", rows) == [(48, 12.5), (96, 6.25)]
    assert [len(one.rows) for one in (none, linear)] == [4, 4]


def test_runs_without_a_result_are_left_out_of_the_series() -> None:
    rows = [row({"DATA.BATCH_SIZE": "8"}, result(8)), row({"DATA.BATCH_SIZE": "9"}, None, exit_code=1)]
    [series] = drawn(rows)
    assert (series.label, series.rows) == ("BATCH_SIZE=8", rows[:1])
    assert drawn(rows[1:]) == []


def test_the_metric_that_is_compared() -> None:
    rows = [row({"A": "1"}, None, exit_code=3), row({"A": "2"}, result(8))]
    assert Comparison(rows).metric == "top1/kind"
    assert Comparison(rows, "loss").metric == "loss"
    assert Comparison(rows, "top5/kind").metric == "top1/kind"
    assert Comparison(rows[:1]).metric == "loss"


def test_status() -> None:
    assert Row({}, Path()).status == "not run"
    assert row({}, result(8)).status == "finished"
    assert row({}, None, exit_code=1).status == "failed"
    assert row({}, None, exit_code=0).status == "failed"
    assert row({}, None, exit_code=130).status == "interrupted"
    assert row({}, None, exit_code=-9).status == "interrupted", "a sweep resumes it"


def row_of(folder: Path, values: dict[str, str]) -> Row:
    return Row(values, folder, file_status="running")


def test_runs_that_differ_in_the_seed_alone_are_one_curve_with_a_band(tmp_path: Path) -> None:
    of_run = {"one": [0.25, 0.5], "two": [0.5, 0.5, 0.75], "other": [0.125]}
    for name, values in of_run.items():
        write_validations(tmp_path / name, [*values])
    rows = [
        row_of(tmp_path / "one", {"OPTIMIZER.LR": "1", "EXPERIMENT.SEED": "0"}),
        row_of(tmp_path / "two", {"OPTIMIZER.LR": "1", "EXPERIMENT.SEED": "1"}),
        row_of(tmp_path / "other", {"OPTIMIZER.LR": "2", "EXPERIMENT.SEED": "1"}),
        row_of(tmp_path / "none", {"OPTIMIZER.LR": "3", "EXPERIMENT.SEED": "1"}),
    ]
    both, other, nothing = groups_by(rows, frozenset({SEED}))
    assert (both.label, other.label) == ("LR=1", "LR=2")
    of = lambda row: row.history.finite("top1/kind")  # noqa: E731
    assert both.means(of) == [(1, 0.375, 0.25, 0.5, 2), (2, 0.5, 0.5, 0.5, 2), (3, 0.75, 0.75, 0.75, 1)]
    assert other.means(of) == [(1, 0.125, 0.125, 0.125, 1)]
    assert nothing.means(of) == []


def test_what_a_run_has_measured_so_far_is_shown_and_read_again_when_there_is_more(tmp_path: Path) -> None:
    write_validations(tmp_path, [0.25, 0.75, None])
    running = row_of(tmp_path, {})
    assert running.value("top1/kind") is None, "the last one is not finite"
    best = running.history.best("top1/kind")
    assert best is not None
    assert (best.value, best.epoch) == (0.75, 2)
    assert (running.history.epoch, running.headline) == (3, "top1/kind")
    write_validations(tmp_path, [0.25, 0.75, None, 0.5])
    assert (running.value("top1/kind"), running.history.epoch) == (0.5, 4)
    assert Row({}, tmp_path).metrics == [], "of a run that has not begun, nothing counts"


def test_the_lowest_loss_is_the_best(tmp_path: Path) -> None:
    write_validations(tmp_path, [0.5, 0.25, 0.25], metric="aux/loss")
    best = row_of(tmp_path, {}).history.best("aux/loss")
    assert best is not None
    assert (best.value, best.epoch) == (0.25, 2)


def axis_labels(**values: list[str]) -> tuple[str, bool, tuple[str, ...]]:
    """The axis of runs of one size whose keys have these values."""
    keys = [key.replace("_0", ".") for key in values]
    points = [dict(zip(keys, texts, strict=True)) for texts in zip(*values.values(), strict=True)]
    rows = [row(point, result(8)) for point in points]
    axis = axis_of(rows)
    assert not axis.is_size
    return axis.label, axis.is_log, axis.categories


def test_the_key_with_the_most_values_is_the_axis() -> None:
    spread = ["1e-4", "1e-3", "1e-2"]
    assert axis_labels(OPTIMIZER_0LR=spread, TRAIN_0AMP=["off", "off", "bf16"]) == ("LR", True, ())
    assert axis_labels(OPTIMIZER_0LR=["1", "2", "3"]) == ("LR", False, ())
    assert axis_labels(MODEL_0NAME=["a", "b", "b"]) == ("NAME", False, ("a", "b"))


def test_the_batch_size_is_the_axis_where_a_number_changes_it_or_only_the_seed_differs() -> None:
    of_size = [row({"DATA.BATCH_SIZE": str(size), "A.B": "x"}, result(size)) for size in (8, 16)]
    assert axis_of(of_size).is_size
    of_model = [row({"MODEL.NAME": name}, result(size)) for name, size in (("a", 8), ("b", 16))]
    assert axis_of(of_model).categories == ("a", "b"), "AutoBatch found other sizes"
    assert axis_of([row({"EXPERIMENT.SEED": seed}, result(8)) for seed in "01"]).is_size


def test_numbers_in_names_are_sorted_by_their_value() -> None:
    rates = ["LR=5e-05,SEED=1", "LR=0.001,SEED=0", "LR=0.001,SEED=10", "LR=0.01", "LR=0.05", "LR=0.1", "LR=2"]
    assert sorted(set(rates), key=natural) == rates
    assert natural("1") != natural("01"), "no tie is left to the order of the disk"
