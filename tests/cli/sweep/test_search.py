"""Searches: the space, the study in its file, and pruning."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linnaeus.cli.compare.runs import Row
from linnaeus.cli.sweep.folder import prepare
from linnaeus.cli.sweep.grid import Combination
from linnaeus.cli.sweep.options import Options, PlannedRun, read
from linnaeus.cli.sweep.search import Search, SearchPlan
from linnaeus.cli.sweep.source import UnknownMetricError
from linnaeus.cli.sweep.space import Axis, read_space
from linnaeus.config.load import load_config
from linnaeus.errors import ConfigError
from linnaeus.files import STUDY
from linnaeus.launchers.interface import Job
from linnaeus.launchers.outcome import Outcome

optuna = pytest.importorskip("optuna")

LR = "OPTIMIZER.LR"
RATES = f"{LR}=interval(0.01,10)"
AXES = [
    (LR, "interval(0.1,0.9)", Axis(LR, 0.1, 0.9)),
    (LR, "interval(1e-4,1e-1)", Axis(LR, 1e-4, 1e-1, is_log=True)),
    (LR, "tag(linear,interval(1e-4,1e-1))", Axis(LR, 1e-4, 1e-1)),
    (LR, "range(0.1,0.6,0.2)", Axis(LR, 0.1, 0.5, step=0.2)),
    (LR, "0.1,0.2", Axis(LR, choices=("0.1", "0.2"))),
    ("DATA.BATCH_SIZE", "interval(8,64)", Axis("DATA.BATCH_SIZE", 8, 64, is_whole=True)),
    ("MODEL.width", "int(interval(8,64))", Axis("MODEL.width", 8, 64, is_whole=True)),
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


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_config([]).config


@pytest.fixture
def plan_of(tmp_path: Path, plain: Any) -> Callable[..., SearchPlan]:
    """Plans of searches whose runs need not be read: a configuration for each point takes long."""

    def plan_quickly(point: Combination) -> PlannedRun:
        low, high = (point.values.get(f"DATA.AUTOBATCH.{name}_BATCH_SIZE") for name in ("MIN", "MAX"))
        if low is not None and high is not None and int(low) > int(high):
            raise ConfigError(f"DATA.AUTOBATCH.MIN_BATCH_SIZE={low}")
        epochs = next((int(token.partition("=")[2]) for token in point.argv if "EPOCHS" in token), 30)
        experiment = dataclasses.replace(plain.EXPERIMENT, NAME=point.name, OUTPUT_DIR=str(tmp_path / "s"))
        train = dataclasses.replace(plain.TRAIN, EPOCHS=epochs)
        return PlannedRun(point, dataclasses.replace(plain, EXPERIMENT=experiment, TRAIN=train))

    def plan(*argv: str, num_trials: int, warmup_epochs: int = 2, **more: Any) -> SearchPlan:
        (tmp_path / "s").mkdir(exist_ok=True)
        defaults = {"plan": plan_quickly, "seed": 0, "metric": None, "prune": True}
        return SearchPlan(
            read_space(argv), num_trials, warmup_epochs=warmup_epochs, **{**defaults, **more}
        )  # fmt: skip

    return plan


def test_the_plan_of_a_command_line(tmp_path: Path) -> None:
    argv = (RATES, "TRAIN.EPOCHS=8", "EXPERIMENT.SEED=3", "--trials", "6", "--no-prune", "--metric", "loss")
    found = read(["--search", "optuna", *argv, f"EXPERIMENT.OUTPUT_DIR={tmp_path}", "EXPERIMENT.NAME=s"])
    assert isinstance(found, tuple)
    options = found[0]
    assert isinstance(options, Options)
    plan = options.plan
    assert plan is not None
    assert (plan.num_trials, plan.seed, plan.metric, plan.prune, plan.warmup_epochs) == (
        6,
        3,
        "loss",
        False,
        2,
    )
    planned = plan.plan(plan.space.combination({LR: "0.25"}))
    assert planned.combination.title == f"{LR}=0.25"
    assert planned.folder == tmp_path / "s" / f"{LR}=0.25"
    assert (planned.config.OPTIMIZER.LR, planned.config.TRAIN.EPOCHS) == (0.25, 8)


def row_of(planned: PlannedRun, exit_code: int = 0, **metrics: float) -> Row:
    """A run that has ended, without a result where there are no metrics."""
    result = {"metrics": metrics} if metrics else None
    return Row(planned.combination.values, planned.folder, Outcome(exit_code, 1.0, None, result))


def end(search: Search, planned: PlannedRun, value: float | None, exit_code: int = 0) -> bool:
    """Let a run end; None for one without a result."""
    metrics = {} if value is None else {"loss": 1.0, "top1/a": value}
    return search.record_end(row_of(planned, exit_code, **metrics))


def rate(planned: PlannedRun) -> float:
    return float(planned.combination.values[LR])


def states(search: Search) -> list[str]:
    return [trial.state.name for trial in search._study.trials]


@pytest.mark.parametrize(("metric", "draws_near"), [("top1/a", True), ("error", False)])
def test_a_search_draws_near_to_the_best(
    tmp_path: Path, plan_of: Callable[..., SearchPlan], metric: str, draws_near: bool
) -> None:
    """Of a bowl, over several seeds; the control searches for its smallest value."""
    first, last = 0.0, 0.0
    space = f"{LR}=tag(linear,interval(0.01,10))"
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        search = Search(tmp_path / str(seed), plan_of(space, num_trials=20, metric=metric, seed=seed))
        distances = []
        while search.num_left:
            for planned in search.more(1):
                distances.append(abs(rate(planned) - 0.3))
                assert search.record_end(row_of(planned, **{metric: 1 - distances[-1] ** 2}))
        assert len(distances) == 20
        first, last = first + sum(distances[:10]), last + sum(distances[-10:])
    assert (last < first) == draws_near


@pytest.mark.parametrize(("metric", "values", "best"), [("gain", (-0.5, -0.25), 1), (None, (-0.5, -0.25), 0)])
def test_the_best_value_keeps_its_sign(
    tmp_path: Path, plan_of: Callable[..., SearchPlan], metric: str | None, values: list[float], best: int
) -> None:
    """Also in the next process, and for the logarithm of a density, a loss that may be negative."""
    plan, seen = plan_of(RATES, num_trials=2, metric=metric), []
    assert Search(tmp_path / "s", plan).best() is None
    for value in values:
        search = Search(tmp_path / "s", plan)
        seen += search.more(1)
        assert search.record_end(row_of(seen[-1], **{metric or "loss": value}))
    text = str(Search(tmp_path / "s", plan).best())
    assert text.startswith(seen[best].combination.title)
    assert text.endswith(f" {values[best]:.4f}")


def test_a_study_goes_on_in_another_process(tmp_path: Path, plan_of: Callable[..., SearchPlan]) -> None:
    plan = plan_of(RATES, num_trials=6)
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
    assert states(second) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "RUNNING", "RUNNING"]


@pytest.mark.parametrize("num_at_once", [1, 8])
def test_a_point_that_comes_again_is_one_run_and_told_too(
    tmp_path: Path, plan_of: Callable[..., SearchPlan], num_at_once: int
) -> None:
    """Also by the next process, where the last one was killed before it told the study."""
    plan, seen = plan_of(f"{LR}=0.1,0.2", num_trials=8), []
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


def test_a_search_survives_being_killed_while_it_asks(
    tmp_path: Path, plan_of: Callable[..., SearchPlan]
) -> None:
    """Whatever it had written of a trial, even half a line of the journal."""
    plan = plan_of(RATES, "DATA.BATCH_SIZE=interval(8,64)", num_trials=3)
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
            assert {*states(search)} <= {"COMPLETE", "FAIL"}
    for damage in (b"damaged\n", b'{"a": 1}\n', b"[1]\n"):
        journal.write_bytes(damage + whole)
        with pytest.raises(ConfigError, match=STUDY):
            Search(tmp_path / "s", plan)


def test_a_point_that_is_no_configuration_is_left_out(
    tmp_path: Path, plan_of: Callable[..., SearchPlan], caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [f"DATA.AUTOBATCH.{name}_BATCH_SIZE=interval(1,100)" for name in ("MIN", "MAX")]
    plan = plan_of(*sizes, num_trials=12)
    search = Search(tmp_path / "s", plan)
    runs = search.more(99)
    assert search.num_left == 0
    assert states(search).count("RUNNING") == len(runs) > 0
    assert states(search).count("FAIL") == 12 - len(runs) > 0
    assert len(caplog.records) == 12 - len(runs)
    assert "DATA.AUTOBATCH.MIN_BATCH_SIZE=" in caplog.text
    assert [run.folder for run in Search(tmp_path / "s", plan).earlier()] == [run.folder for run in runs]


def test_another_search_needs_another_name(tmp_path: Path, plan_of: Callable[..., SearchPlan]) -> None:
    """The order of the arguments, more trials and the name of the folder do not count."""
    sizes = "DATA.BATCH_SIZE=interval(8,64)"
    Search(tmp_path / "s", plan_of(RATES, sizes, num_trials=2)).more(2)
    assert Search(tmp_path / "s", plan_of(sizes, RATES, num_trials=3)).num_left == 1
    for argv, metric in (
        ((RATES,), None), ((f"{LR}=interval(0.01,9)", sizes), None), ((RATES, sizes), "loss"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=STUDY):
            Search(tmp_path / "s", plan_of(*argv, num_trials=2, metric=metric))
    (tmp_path / "s").rename(tmp_path / "renamed")
    assert Search(tmp_path / "renamed", plan_of(RATES, sizes, num_trials=2)).num_left == 0


def test_another_configuration_needs_another_name(tmp_path: Path, plan_of: Callable[..., SearchPlan]) -> None:
    plan = plan_of(RATES, "TRAIN.EPOCHS=3", num_trials=6)
    search = Search(tmp_path / "s", plan)
    (planned,) = search.more(1)
    prepare(planned.folder, planned.config)
    assert end(search, planned, 0.5)
    assert Search(tmp_path / "s", plan).earlier(), "the control"
    with pytest.raises(ConfigError, match=r"EXPERIMENT\.NAME"):
        Search(tmp_path / "s", plan_of(RATES, "TRAIN.EPOCHS=30", num_trials=6)).earlier()


def test_a_metric_that_no_run_has_ends_the_search(tmp_path: Path, plan_of: Callable[..., SearchPlan]) -> None:
    search = Search(tmp_path / "s", plan_of(RATES, num_trials=6, metric="top1/b"))
    (planned,) = search.more(1)
    validated(planned, 0.5)
    with pytest.raises(UnknownMetricError, match=r"'top1/b'.*top1/a"):
        search.prunes(running(planned))
    with pytest.raises(UnknownMetricError, match="'top1/b'"):
        end(search, planned, 0.5)


def validated(planned: PlannedRun, *values: float) -> None:
    planned.folder.mkdir(parents=True, exist_ok=True)
    lines = [{"split": "val", "epoch": n, "top1/a": value} for n, value in enumerate(values, start=1)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (planned.folder / "metrics.jsonl").write_text('{"split": "train", "epoch": 0}\n' + text + '{"unfinish')


def running(planned: PlannedRun) -> Row:
    return Row(planned.combination.values, planned.folder, job=Job("running", "process 1"))


@pytest.mark.parametrize("prunes", [True, False])
def test_a_run_that_is_worse_than_the_median_is_pruned(
    tmp_path: Path, plan_of: Callable[..., SearchPlan], prunes: bool
) -> None:
    search = Search(tmp_path / "s", plan_of(RATES, "TRAIN.EPOCHS=8", num_trials=9, prune=prunes))
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


def test_a_run_is_not_pruned_near_its_end(tmp_path: Path, plan_of: Callable[..., SearchPlan]) -> None:
    """After four epochs it has 2, 1 and 0 left."""
    pruned = []
    for num_epochs in (6, 5, 4):
        folder = tmp_path / str(num_epochs)
        folder.mkdir()
        plan = plan_of(RATES, f"TRAIN.EPOCHS={num_epochs}", num_trials=9, warmup_epochs=1)
        search = Search(folder, plan)
        for planned in search.more(6):
            validated(planned, 0.5, 0.6, 0.7, 0.8)
            assert end(search, planned, 0.8), "its validations are reported when it has ended"
        (bad,) = search.more(1)
        validated(bad, 0.1, 0.1, 0.1, 0.1)
        pruned.append(search.prunes(running(bad)))
    assert pruned == [True, False, False]


def test_without_optuna_the_extra_is_named(
    tmp_path: Path, plan_of: Callable[..., SearchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"linnaeus\[sweep\]"):
        Search(tmp_path / "s", plan_of(RATES, num_trials=2))
