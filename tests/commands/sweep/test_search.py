"""Searches: the space, the study in its file, and whole searches through the command line."""

from __future__ import annotations

import doctest
import json
import signal
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.commands.compare.results import Comparison, Row
from linnaeus.commands.sweep import space as module
from linnaeus.commands.sweep.folder import prepare
from linnaeus.commands.sweep.grid import read_grid
from linnaeus.commands.sweep.options import Options, PlannedRun, plan_run, read
from linnaeus.commands.sweep.search import Search, SearchPlan
from linnaeus.commands.sweep.search_plot import save_search_plot
from linnaeus.commands.sweep.space import Axis, read_space
from linnaeus.config.sweep_values import sweep_values
from linnaeus.errors import ConfigError
from linnaeus.files import STUDY
from linnaeus.launchers.interface import Job
from linnaeus.launchers.outcome import Outcome
from tests.helpers.runs import Child, Run

optuna = pytest.importorskip("optuna")


def test_the_examples_in_the_docstrings() -> None:
    found = doctest.testmod(module)
    assert (found.failed, found.attempted > 0) == (0, True)


LR = "OPTIMIZER.LR"
AXES = [
    (LR, "interval(0.1,0.9)", Axis(LR, 0.1, 0.9)),
    (LR, "interval(1e-4,1e-1)", Axis(LR, 1e-4, 1e-1, is_log=True)),
    (LR, "tag(linear,interval(1e-4,1e-1))", Axis(LR, 1e-4, 1e-1)),
    (LR, "tag(log,interval(1,9))", Axis(LR, 1, 9, is_log=True)),
    (LR, "range(0.1,0.6,0.2)", Axis(LR, 0.1, 0.5, step=0.2)),
    (LR, "0.1,0.2", Axis(LR, choices=("0.1", "0.2"))),
    ("DATA.BATCH_SIZE", "interval(8,64)", Axis("DATA.BATCH_SIZE", 8, 64, is_whole=True)),
    ("MODEL.width", "int(interval(8,64))", Axis("MODEL.width", 8, 64, is_whole=True)),
    ("MODEL.width", "interval(8,64)", Axis("MODEL.width", 8, 64)),
    ("MODEL.width", "range(8,64,16)", Axis("MODEL.width", 8, 56, step=16, is_whole=True)),
    ("model", "resnet18,vit_tiny", Axis("model", choices=("resnet18", "vit_tiny"))),
]


@pytest.mark.parametrize(("key", "text", "expected"), AXES, ids=[f"{key}={text}" for key, text, _ in AXES])
def test_the_values_of_a_key(key: str, text: str, expected: Axis) -> None:
    space = read_space([f"{key}={text}", "TRAIN.EPOCHS=2"])
    assert space.problems == []
    [axis] = space.axes
    for name in ("low", "high", "step"):
        assert getattr(axis, name) == pytest.approx(getattr(expected, name))
    for name in ("key", "is_log", "is_whole", "choices"):
        assert getattr(axis, name) == getattr(expected, name)


@given(st.decimals(-10, 10, places=3), st.decimals("0.001", 3, places=3), st.integers(2, 9), st.booleans())
def test_no_value_of_a_range_is_lost(start: Decimal, step: Decimal, count: int, falls: bool) -> None:
    """The control is the step between the numbers as they are in binary."""
    step = -step if falls else step
    text = f"range({start},{start + count * step},{step})"
    [axis] = read_space([f"{LR}={text}"]).axes
    kind = optuna.distributions.IntDistribution if axis.is_whole else optuna.distributions.FloatDistribution
    found = kind(axis.low, axis.high, step=axis.step)
    assert (found.low, found.high) == (axis.low, axis.high)
    values = [axis.text(axis.low + number * (axis.step or 0)) for number in range(count)]
    assert sorted(map(float, values)) == sorted(map(float, sweep_values(text)))


@pytest.mark.parametrize("again", ["0.1,0.2", "0.2"])
def test_a_search_and_a_grid_read_a_key_that_is_typed_again_alike(again: str) -> None:
    argv = [f"{LR}=0.1,0.4", "OPTIMIZER={LR: 0.3}", f"{LR}={again}", "TRAIN.EPOCHS=1,2"]
    points = [read_grid(argv).combinations[0], next(read_space(argv).corners())]
    assert [plan_run(point).config.OPTIMIZER.LR for point in points] == [float(again.split(",")[0])] * 2
    argv = [f"{LR}=0.1,0.4", "OPTIMIZER={LR: 0.3}", "TRAIN.EPOCHS=1,2"]
    points = [read_grid(argv).combinations[0], next(read_space(argv).corners())]
    assert [plan_run(point).config.OPTIMIZER.LR for point in points] == [0.3] * 2, "the control"


BAD = [
    (["--trials", "3", "TRAIN.EPOCHS=2"], "there is nothing to search"),
    (["--trials", "3", "OPTIMIZER.LR=interval(2,1)"], "OPTIMIZER.LR: 'interval(2,1)': the first end"),
    (["--trials", "3", "OPTIMIZER.LR=tag(log,interval(0,1))"], "tag(log, ...) needs ends above 0"),
    (["--trials", "3", "EXPERIMENT.NAME=a,b"], "EXPERIMENT.NAME: says where the sweep's files are"),
    (["--trials", "3", "OPTIMIZER.LR=interval(-1,1)"], "OPTIMIZER.LR"),
    (["--trials", "3", "DATA.BATCH_SIZE=interval(8.2,8.8)"], "there is no whole number in it"),
    (["--trials", "3", "MODEL.NAME=interval(1,2)"], "MODEL.NAME: 'interval(1,2)': an interval has numbers"),
    (["--trials", "3", "OPTIMIZER.LR=interval(1e-4)"], "OPTIMIZER.LR: 'interval(1e-4)' is no interval"),
    (["--trials", "0", "OPTIMIZER.LR=1,2"], "--trials: '0' is not a whole number"),
    (["OPTIMIZER.LR=1,2"], "--trials: say how many runs"),
]


@pytest.mark.parametrize(("argv", "text"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_mistakes(argv: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(["--search", "optuna", *argv])
    assert text in str(caught.value)


def test_options_of_a_search_are_refused_without_one() -> None:
    with pytest.raises(ConfigError) as caught:
        read(["DATA.BATCH_SIZE=8,16", "--trials", "3", "--no-prune"])
    assert "--trials: is for --search optuna" in str(caught.value)
    assert "--no-prune: is for --search optuna" in str(caught.value)


def test_an_interval_without_a_search_is_refused() -> None:
    with pytest.raises(ConfigError, match="interval"):
        read(["OPTIMIZER.LR=interval(1,2)"])


def plan_of(*argv: str, folder: Path) -> SearchPlan:
    found = read(["--search", "optuna", *argv, f"EXPERIMENT.OUTPUT_DIR={folder}", "EXPERIMENT.NAME=s"])
    assert isinstance(found, tuple)
    options = found[0]
    assert isinstance(options, Options)
    assert options.plan is not None
    (folder / "s").mkdir(exist_ok=True)
    return options.plan


def end(search: Search, planned: PlannedRun, value: float | None, exit_code: int = 0) -> bool:
    """Let a run end; None for one without a result."""
    result: dict[str, Any] | None = None if value is None else {"metrics": {"loss": 1.0, "top1/a": value}}
    row = Row(planned.combination.values, planned.folder, Outcome(exit_code, 1.0, None, result))
    return search.record_end(row)


def rate(planned: PlannedRun) -> float:
    return float(planned.combination.values[LR])


def bowl(planned: PlannedRun) -> float:
    """Best where the rate is 0.3."""
    return 1 - (rate(planned) - 0.3) ** 2


def run_all(search: Search, value: Callable[[PlannedRun], float]) -> list[PlannedRun]:
    seen = []
    while search.num_left:
        for planned in search.more(1):
            seen.append(planned)
            assert end(search, planned, value(planned))
    return seen


@pytest.mark.parametrize(("metric", "draws_near"), [("top1/a", True), ("error", False)])
def test_a_search_draws_near_to_the_best(tmp_path: Path, metric: str, draws_near: bool) -> None:
    """Over several seeds; the control searches for the smallest value of the same bowl."""
    first, last = 0.0, 0.0
    for seed in range(3):
        argv = (f"{LR}=tag(linear,interval(0.01,10))", "--trials", "20", "--no-prune", "--metric", metric)
        (tmp_path / str(seed)).mkdir()
        plan = plan_of(*argv, f"EXPERIMENT.SEED={seed}", folder=tmp_path / str(seed))
        search = Search(tmp_path / str(seed) / "s", plan)
        distances = []
        while search.num_left:
            for planned in search.more(1):
                result = {"metrics": {metric: bowl(planned)}}
                assert search.record_end(
                    Row(planned.combination.values, planned.folder, Outcome(0, 1, None, result))
                )
                distances.append(abs(rate(planned) - 0.3))
        assert len(distances) == 20
        first, last = first + sum(distances[:10]), last + sum(distances[-10:])
    assert (last < first) == draws_near


def test_the_best_trial_in_words(tmp_path: Path) -> None:
    search = Search(tmp_path / "s", plan_of(f"{LR}=interval(0.01,10)", "--trials", "5", folder=tmp_path))
    assert search.best() is None
    best = min(run_all(search, bowl), key=lambda planned: abs(rate(planned) - 0.3))
    assert search.best() == f"{best.combination.title} with {bowl(best):.4f}"


@pytest.mark.parametrize(
    ("metric", "values", "shown"),
    [
        ("gain", (-0.5, -0.25), "-0.2500"),
        ("loss", (-0.5, -0.25), "-0.5000"),
        (None, (0.5, 0.25), "0.2500"),
        (None, (-0.5, -0.25), "-0.5000"),
    ],
)
def test_the_best_value_keeps_its_sign(
    tmp_path: Path, metric: str | None, values: tuple[float, float], shown: str
) -> None:
    """Also in the next process, and for the logarithm of a density, a loss that may be negative."""
    argv = (f"{LR}=interval(0.01,10)", "--trials", "2", *([] if metric is None else ["--metric", metric]))
    plan = plan_of(*argv, folder=tmp_path)
    for value in values:
        search = Search(tmp_path / "s", plan)
        [planned] = search.more(1)
        result = {"metrics": {metric or "loss": value}}
        search.record_end(Row(planned.combination.values, planned.folder, Outcome(0, 1.0, None, result)))
    assert (Search(tmp_path / "s", plan).best() or "").endswith(f" with {shown}")


def test_a_loss_is_made_small(tmp_path: Path) -> None:
    argv = (f"{LR}=interval(0.01,10)", "--trials", "3", "--metric", "loss")
    search = Search(tmp_path / "s", plan_of(*argv, folder=tmp_path))
    runs = search.more(3)
    for planned in runs:
        result = {"metrics": {"loss": rate(planned), "top1/a": 0.0}}
        search.record_end(Row(planned.combination.values, planned.folder, Outcome(0, 1.0, None, result)))
    assert (search.best() or "").startswith(f"{LR}={min(map(rate, runs)):g} ")


def test_a_study_goes_on_in_another_process(tmp_path: Path) -> None:
    plan = plan_of(f"{LR}=interval(0.01,10)", "--trials", "6", folder=tmp_path)
    first = Search(tmp_path / "s", plan)
    done, failed, stopped, running = first.more(4)
    assert end(first, done, 0.5)
    assert end(first, failed, None, exit_code=1)
    assert not end(first, stopped, None, exit_code=130), "it is to be resumed"

    second = Search(tmp_path / "s", plan)
    assert second.num_left == 2
    assert [planned.folder for planned in second.earlier()] == [
        planned.folder for planned in (done, failed, stopped, running)
    ]
    assert not end(second, stopped, None, exit_code=130)
    assert end(second, stopped, 0.7)
    assert end(second, running, 0.6)
    asked = second.more(9)
    assert len(asked) == 2
    assert not {planned.folder for planned in asked} & {done.folder, failed.folder, stopped.folder}
    states = [trial.state.name for trial in second._study.trials]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "RUNNING", "RUNNING"]


def test_a_point_that_comes_again_is_one_run(tmp_path: Path) -> None:
    search = Search(tmp_path / "s", plan_of(f"{LR}=0.1,0.2", "--trials", "8", folder=tmp_path))
    seen = search.more(8)
    assert sorted(map(rate, seen)) == [0.1, 0.2]
    assert search.num_left == 0
    assert all(end(search, planned, rate(planned)) for planned in seen)
    assert {trial.state.name for trial in search._study.trials} == {"COMPLETE"}


@pytest.mark.parametrize("num_at_once", [1, 2, 8])
def test_points_that_come_again_are_told_too(tmp_path: Path, num_at_once: int) -> None:
    """Also by the next process, where the last one was killed before it told them."""
    plan = plan_of(f"{LR}=0.1,0.2", "--trials", "8", folder=tmp_path)
    seen = []
    while (search := Search(tmp_path / "s", plan)).num_left:
        search.earlier()
        runs = search.more(num_at_once)
        seen += runs
        assert all(end(search, planned, rate(planned)) for planned in runs)
    search.earlier()
    assert sorted(map(rate, seen)) == [0.1, 0.2]
    trials = search._study.trials
    assert [trial.value for trial in trials] == [float(trial.params[LR]) for trial in trials]
    assert len(trials) == 8


def test_a_point_that_comes_again_fails_again(tmp_path: Path) -> None:
    search = Search(tmp_path / "s", plan_of(f"{LR}=0.1,0.2", "--trials", "6", folder=tmp_path))
    while search.num_left:
        for planned in search.more(1):
            assert end(search, planned, None, exit_code=1)
    assert {trial.state.name for trial in search._study.trials} == {"FAIL"}


def test_a_search_survives_being_killed_while_it_asks(tmp_path: Path) -> None:
    """Whatever it had written of a trial, even half a line of the journal."""
    argv = (f"{LR}=interval(0.01,10)", "DATA.BATCH_SIZE=interval(8,64)", "--trials", "3")
    plan = plan_of(*argv, folder=tmp_path)
    journal = tmp_path / "s" / STUDY
    (run,) = Search(tmp_path / "s", plan).more(1)
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) >= 5
    for kept in range(len(lines) + 1):
        for half in (b"", b'{"op_code": 5, "wor'):
            journal.write_bytes(b"".join(lines[:kept]) + half)
            search = Search(tmp_path / "s", plan)
            earlier = search.earlier()
            assert [one.folder for one in earlier] in ([], [run.folder])
            more = search.more(9)
            assert len(earlier) + len(more) in (2, 3)
            assert all(end(search, planned, 0.5) for planned in [*earlier, *more])
            assert {trial.state.name for trial in search._study.trials} <= {"COMPLETE", "FAIL"}
    for damage in (b"damaged\n", b'{"a": 1}\n', b"[1]\n"):
        journal.write_bytes(damage + whole)
        with pytest.raises(ConfigError, match="is damaged"):
            Search(tmp_path / "s", plan)


def test_a_point_that_is_no_configuration_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [f"DATA.AUTOBATCH.{name}_BATCH_SIZE=interval(1,100)" for name in ("MIN", "MAX")]
    plan = plan_of(*sizes, "--trials", "12", folder=tmp_path)
    search = Search(tmp_path / "s", plan)
    runs = search.more(99)
    assert search.num_left == 0
    states = [trial.state.name for trial in search._study.trials]
    assert states.count("RUNNING") == len(runs) > 0
    assert states.count("FAIL") == 12 - len(runs) > 0
    assert "is left out: DATA.AUTOBATCH.MIN_BATCH_SIZE=" in caplog.text
    assert [run.folder for run in Search(tmp_path / "s", plan).earlier()] == [run.folder for run in runs]


def test_the_order_of_the_arguments_and_the_name_of_the_folder_do_not_count(tmp_path: Path) -> None:
    both = (f"{LR}=interval(0.01,10)", "DATA.BATCH_SIZE=interval(8,64)")
    Search(tmp_path / "s", plan_of(*both, "--trials", "2", folder=tmp_path)).more(2)
    plan = plan_of(*both[::-1], "EXPERIMENT.SEED=0", "--trials", "2", folder=tmp_path)
    assert Search(tmp_path / "s", plan).num_left == 0
    (tmp_path / "s").rename(tmp_path / "renamed")
    assert Search(tmp_path / "renamed", plan).num_left == 0


@pytest.mark.parametrize(
    "other", [f"{LR}=interval(0.01,9)", "DATA.BATCH_SIZE=8,16", f"{LR}=interval(0.01,10) --metric loss"]
)
def test_another_search_needs_another_name(tmp_path: Path, other: str) -> None:
    Search(tmp_path / "s", plan_of(f"{LR}=interval(0.01,10)", "--trials", "6", folder=tmp_path))
    Search(tmp_path / "s", plan_of(f"{LR}=interval(0.01,10)", "--trials", "9", folder=tmp_path))
    with pytest.raises(ConfigError, match="give this one another name"):
        Search(tmp_path / "s", plan_of(*other.split(), "--trials", "6", folder=tmp_path))


def test_the_default_metric_may_be_named_later(tmp_path: Path) -> None:
    argv = (f"{LR}=interval(0.01,10)", "--trials", "6")
    search = Search(tmp_path / "s", plan_of(*argv, folder=tmp_path))
    named = plan_of(*argv, "--metric", "top1/a", folder=tmp_path)
    with pytest.raises(ConfigError, match="give this one another name"):
        Search(tmp_path / "s", named)  # nobody knows yet
    [planned] = search.more(1)
    assert end(search, planned, 0.5)
    assert Search(tmp_path / "s", named).best() == search.best()
    assert Search(tmp_path / "s", plan_of(*argv, folder=tmp_path)).best() == search.best()
    with pytest.raises(ConfigError, match="give this one another name"):
        Search(tmp_path / "s", plan_of(*argv, "--metric", "loss", folder=tmp_path))


def test_a_study_of_the_other_direction_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that knows better which metrics are errors must not go on as before."""
    plan = plan_of(f"{LR}=interval(0.01,10)", "--trials", "6", "--metric", "loss", folder=tmp_path)
    with monkeypatch.context() as earlier_version:
        earlier_version.setattr("linnaeus.commands.sweep.search.is_smaller_better", lambda _: False)
        Search(tmp_path / "s", plan)
        Search(tmp_path / "s", plan)
    with pytest.raises(ConfigError, match="the opposite direction"):
        Search(tmp_path / "s", plan)


def test_another_configuration_needs_another_name(tmp_path: Path) -> None:
    """What the file says counts, not only what is typed."""
    file = tmp_path / "a.yaml"
    file.write_text("TRAIN: {EPOCHS: 3}")
    argv = (f"{LR}=interval(0.01,10)", "--cfg", str(file), "--trials", "6")
    search = Search(tmp_path / "s", plan_of(*argv, folder=tmp_path))
    (planned,) = search.more(1)
    prepare(planned.folder, planned.config)
    assert end(search, planned, 0.5)
    Search(tmp_path / "s", plan_of(*argv, folder=tmp_path)).earlier()
    file.write_text("TRAIN: {EPOCHS: 30}")
    for changed in (argv, (*argv, "TRAIN.EPOCHS=7")):
        with pytest.raises(ConfigError, match="give this search another name"):
            Search(tmp_path / "s", plan_of(*changed, folder=tmp_path)).earlier()
    Search(tmp_path / "s", plan_of(*argv, "TRAIN.EPOCHS=3", folder=tmp_path)).earlier()


def test_a_metric_that_no_run_has_ends_the_search(tmp_path: Path) -> None:
    argv = (f"{LR}=interval(0.01,10)", "--trials", "6", "--metric", "top1/b")
    search = Search(tmp_path / "s", plan_of(*argv, folder=tmp_path))
    (planned,) = search.more(1)
    validated(planned, 0.5)
    with pytest.raises(ConfigError, match="no run has 'top1/b'; did you mean top1/a"):
        search.prunes(running(planned))
    with pytest.raises(ConfigError, match="no run has 'top1/b'"):
        end(search, planned, 0.5)


@pytest.mark.parametrize("first", ["grid", "search"])
def test_a_grid_and_a_search_have_folders_of_their_own(tmp_path: Path, first: str) -> None:
    argv = [f"{LR}=0.1,0.2", f"EXPERIMENT.OUTPUT_DIR={tmp_path}", "EXPERIMENT.NAME=s"]
    a_search = ["--search", "optuna", "--trials", "2"]
    (tmp_path / "s").mkdir()
    for name in ("sweep.json", STUDY)[: 1 if first == "grid" else 2]:
        (tmp_path / "s" / name).touch()
    same, other = ([], a_search) if first == "grid" else (a_search, [])
    read([*argv, *same])
    with pytest.raises(ConfigError, match=f"is the folder of a {first}; give this sweep another name"):
        read([*argv, *other])


def validated(planned: PlannedRun, *values: float) -> None:
    planned.folder.mkdir(parents=True, exist_ok=True)
    lines = [{"split": "val", "epoch": n, "top1/a": value} for n, value in enumerate(values, start=1)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (planned.folder / "metrics.jsonl").write_text('{"split": "train", "epoch": 0}\n' + text + '{"unfinish')


def running(planned: PlannedRun) -> Row:
    return Row(planned.combination.values, planned.folder, job=Job("running", "process 1"))


@pytest.mark.parametrize("prunes", [True, False])
def test_a_run_that_is_worse_than_the_median_is_pruned(tmp_path: Path, prunes: bool) -> None:
    argv = (f"{LR}=interval(0.01,10)", "--trials", "9", "TRAIN.EPOCHS=8", *([] if prunes else ["--no-prune"]))
    search = Search(tmp_path / "s", plan_of(*argv, folder=tmp_path))
    for planned in search.more(6):
        validated(planned, 0.5, 0.6, 0.7, 0.8)
        assert not search.prunes(running(planned))
        assert end(search, planned, 0.8)
    good, bad = search.more(2)
    validated(good, 0.5, 0.6, 0.7, 0.9)
    assert not search.prunes(running(good))
    looked_at = running(bad)
    validated(bad, 0.1)
    assert not search.prunes(looked_at), "the first epochs of eight say little"
    validated(bad, 0.1, 0.1, 0.1)
    assert search.prunes(looked_at) == prunes
    assert not search.prunes(looked_at), "nothing has changed"
    assert not search.prunes(running(bad)), "once is enough"
    row = Row(bad.combination.values, bad.folder, Outcome(130, 1.0))
    assert search.record_end(row) == prunes, "else it was interrupted, and is to be resumed"
    assert row.status == ("pruned" if prunes else "interrupted")


@pytest.mark.parametrize(("num_epochs", "is_pruned"), [(6, True), (5, False), (4, False)])
def test_a_run_is_not_pruned_near_its_end(tmp_path: Path, num_epochs: int, is_pruned: bool) -> None:
    """It has 2, 1 and 0 epochs left."""
    argv = (f"{LR}=interval(0.01,10)", "--trials", "9", f"TRAIN.EPOCHS={num_epochs}")
    search = Search(tmp_path / "s", plan_of(*argv, folder=tmp_path))
    for planned in search.more(6):
        validated(planned, 0.5, 0.6, 0.7, 0.8)
        assert end(search, planned, 0.8), "its validations are reported when it has ended"
    (bad,) = search.more(1)
    validated(bad, 0.1, 0.1, 0.1, 0.1)
    assert search.prunes(running(bad)) == is_pruned


def test_validations_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(tmp_path / "s", plan_of(f"{LR}=interval(0.01,10)", "--trials", "1", folder=tmp_path))
    (planned,) = search.more(1)
    row, reports = running(planned), []
    report = Search._report
    monkeypatch.setattr(Search, "_report", lambda *args: reports.append(args) or report(*args))
    for values in ([0.1], [0.1], [0.1, 0.2]):
        if len(values) != len(row.history.points.get("top1/a", [])):
            validated(planned, *values)
        search.prunes(row)
    assert len(reports) == 2


def test_a_combination_of_a_search_is_a_run_like_that_of_a_grid() -> None:
    space = read_space([f"{LR}=interval(0.01,1)", "model=resnet18,vit_tiny", "TRAIN.EPOCHS=3"])
    planned = plan_run(space.combination({LR: "0.25", "model": "vit_tiny"}))
    assert planned.combination.title == f"{LR}=0.25 model=vit_tiny"
    assert (planned.config.OPTIMIZER.LR, planned.config.TRAIN.EPOCHS) == (0.25, 3)
    assert "vit" in planned.config.MODEL.NAME


def test_without_optuna_the_extra_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    outcome = run("sweep", f"{LR}=interval(0.01,1)", "--search", "optuna", "--trials", "2")
    assert outcome.code == 2
    assert "pip install 'linnaeus[sweep]'" in outcome.err


def test_the_picture_has_a_panel_for_each_key(tmp_path: Path) -> None:
    space = read_space([f"{LR}=interval(1e-3,1)", "model=a,b"])
    result = {"metrics": {"loss": 1.0, "top1/a": 0.25}, "headline": "top1/a"}
    good = Row({LR: "0.01", "model": "b"}, tmp_path / "good", Outcome(0, 1.0, None, result))
    bad = Row({LR: "0.5", "model": "a"}, tmp_path / "bad", Outcome(130, 1.0), pruned=True)
    path = tmp_path / "picture.svg"
    save_search_plot(Comparison([good, bad]), space.axes, path, smaller_is_better=False)
    text = path.read_text()
    assert text.count("<title>OPTIMIZER.LR=0.01 model=b: top1/a 0.25</title>") == 3
    assert "LR=0.5" not in text, "it has no value"
    assert "2 runs of a search, 1 finished, 1 pruned" in text
    assert "best so far" in text


TINY = (
    "DATA.DATASET._target_=tests.commands.sweep.test_sweep.Sleepy",
    "MODEL._target_=tests.test_run.Perceptron", "MODEL.width=4", "DATA.BATCH_SIZE=32", "TRAIN.EPOCHS=2",
    "EXPERIMENT.DEVICE=cpu", "EXPERIMENT.NAME=tiny",
)  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_ends_a_search_and_the_same_command_goes_on(run_in_child: Run, tmp_path: Path) -> None:
    argv = ("sweep", *TINY, f"{LR}=interval(1e-4,1)", "--search", "optuna", "--trials", "2", "TRAIN.EPOCHS=6")
    child = Child(tmp_path, *argv)
    child.wait_for(lambda: any(tmp_path.glob("runs/tiny/*/checkpoints/last.pt")))
    assert child.end(signal.SIGINT) == 130
    first = json.loads((tmp_path / "runs/tiny/sweep.json").read_text())["runs"]
    assert [entry["status"] for entry in first] == ["interrupted"]
    outcome = run_in_child(*argv)
    assert outcome.code == 0, outcome.out + outcome.err
    both = json.loads((tmp_path / "runs/tiny/sweep.json").read_text())["runs"]
    assert both[0]["values"] == first[0]["values"]
    assert [entry["status"] for entry in both] == ["finished"] * 2
    assert (tmp_path / both[0]["folder"] / "logs/output.txt").read_text().count("resumed after") == 1


@pytest.mark.slow
def test_a_whole_search_and_more_trials_later(run_in_child: Run, tmp_path: Path) -> None:
    argv = ("sweep", *TINY, f"{LR}=interval(1e-4,1)", "--search", "optuna", "--jobs", "2", "--trials")
    outcome = run_in_child(*argv, "3")
    assert outcome.code == 0, outcome.out + outcome.err
    folder = tmp_path / "runs/tiny"
    assert (folder / STUDY).exists()
    entries = json.loads((folder / "sweep.json").read_text())["runs"]
    assert [entry["status"] for entry in entries] == ["finished"] * 3
    best = max(entry["metrics"]["top1/class"] for entry in entries)
    assert f"with {best:.4f}" in outcome.out
    more = run_in_child(*argv, "4")
    assert more.code == 0, more.out + more.err
    assert more.out.count("has ended well before") == 3
    assert more.out.count("started; output in") == 1
    assert len(json.loads((folder / "sweep.json").read_text())["runs"]) == 4
    status = run_in_child("sweep", "--status", "runs/tiny")
    assert status.out.count("finished") == 4
