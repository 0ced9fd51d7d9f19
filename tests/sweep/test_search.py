"""Searches: the space, the study that workers share, and pruning."""

import json
from pathlib import Path

import pytest

from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.run_folder import Claim
from linnaeus.sweep.folder import Sweep
from linnaeus.sweep.search import Study
from linnaeus.sweep.space import Axis, read_space
from tests.helpers.run_files import figures, planned_sweep
from tests.sweep.test_worker import TINY

optuna = pytest.importorskip("optuna")

LR = "OPTIMIZER.LR"
RATES = f"{LR}=interval(0.01,10)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LR}=interval(0.1,0.9)", Axis(LR, 0.1, 0.9)),
        (f"{LR}=interval(1e-4,1e-1)", Axis(LR, 1e-4, 1e-1, is_log=True)),
        (f"{LR}=tag(linear,interval(1e-4,1e-1))", Axis(LR, 1e-4, 1e-1)),
        (f"{LR}=range(0.1,0.6,0.2)", Axis(LR, choices=("0.1", "0.3", "0.5"))),
        ("DATA.BATCH_SIZE=interval(8,64)", Axis("DATA.BATCH_SIZE", 8, 64, is_whole=True)),
        ("MODEL.width=int(interval(8,64))", Axis("MODEL.width", 8, 64, is_whole=True)),
        ("model=resnet18,vit_tiny", Axis("model", choices=("resnet18", "vit_tiny"))),
    ],
)
def test_the_values_of_a_key(text, expected):
    space = read_space([text, "TRAIN.EPOCHS=2"], is_search=True)
    assert (space.axes, space.problems) == ([expected], [])


@pytest.fixture
def open_study(tmp_path, monkeypatch):
    """The study of a command line, opened anew as by another worker."""
    monkeypatch.chdir(tmp_path)

    def open_it(*argv, trials=3):
        search = ("--search", "optuna", "--trials", str(trials))
        planned_sweep(*search, *argv, "EXPERIMENT.NAME=s", "TRAIN.EPOCHS=20")
        return Study(Sweep.read(Path("runs/s")))

    return open_it


def end(run, value, code=0, headline="top1/a"):
    """Let the run of a trial end; None for one without a result. Its last validation is as bad as can be."""
    claim = Claim(run.folder)
    claim.begin()
    if value is not None:
        best = {"loss": 1 - value, "top1/a": value}
        last = {"loss": 1.0, "top1/a": 0.0}
        result = {"metrics": last, "best": best, "headline": headline}
        (run.folder / "result.json").write_text(json.dumps(result))
    claim.end(code, pruned=code == 143)
    claim.release()


def states(study):
    return [trial.state.name for trial in study.trials()]


@pytest.mark.parametrize(("metric", "draws_near"), [("top1/a", True), ("loss", False)])
def test_a_search_draws_near_to_the_best(open_study, metric, draws_near):
    """Of a bowl; the control minimises the loss, which is highest at the best rate."""
    space = f"{LR}=tag(linear,interval(0.01,10))"
    study = open_study(space, "--metric", metric, trials=24)
    distances = []
    while (asked := study.ask()) is not None:
        distance = abs(float(asked[1].values[LR]) - 0.3) / 10
        distances.append(distance)
        end(asked[1], distance if metric == "loss" else 1 - distance)
        study.tell_ended()
    assert len(distances) == 24
    assert (sum(distances[-8:]) < sum(distances[:8])) == draws_near


def test_two_workers_share_a_study_and_ask_for_no_trial_too_many(open_study):
    one, other = open_study(RATES, trials=4), open_study(RATES, trials=4)
    runs = [asked for study in (one, other) * 3 if (asked := study.ask()) is not None]
    assert [number for number, _ in runs] == [0, 1, 2, 3]
    assert len({run.values[LR] for _, run in runs}) == 4, "another seed for each trial"
    assert [*other.open_trials()] == runs, "those of a dead worker too"
    ends = [(0.5, 0), (None, 1), (None, 143), (None, 130)]
    for (_, run), (value, code) in zip(runs, ends, strict=True):
        end(run, value, code)
    other.sweep.repeat_failed()
    assert [number for number, _ in other.open_trials()] == [3], "it was interrupted and goes on"
    assert states(one) == ["COMPLETE", "FAIL", "PRUNED", "RUNNING"]
    assert f"{runs[0][1].title} with 0.5" in str(one.best())
    assert open_study(RATES, trials=5).ask() is not None, "more trials are asked for"
    assert one.ask() is None


def test_equal_points_are_trained_once(open_study):
    study = open_study(f"{LR}=0.1,0.2", trials=6)
    runs = [asked for _ in range(6) if (asked := study.ask()) is not None]
    for folder in {run.folder for _, run in runs}:
        end(next(run for _, run in runs if run.folder == folder), 0.5)
    assert [*study.open_trials()] == []
    assert states(study) == ["COMPLETE"] * 6


def test_a_trial_that_was_half_asked_has_failed(open_study):
    study = open_study(RATES)
    study.study.ask()
    assert study.ask() is not None
    assert states(study) == ["FAIL", "RUNNING"]


@pytest.mark.parametrize(
    ("options", "headline", "best"),
    [((), "top1/a", 0.9), ((), "loss", 0.1), (("--metric", "loss"), "top1/a", 0.1)],
)
def test_the_best_epoch_of_the_best_run_wins(open_study, options, headline, best):
    """Runs without classes have the loss as headline, and less of it is better."""
    study = open_study(RATES, *options)
    runs = [asked for _ in range(3) if (asked := study.ask()) is not None]
    for (_, run), value in zip(runs, (0.1, 0.9, 0.5), strict=True):
        end(run, value, headline=headline)
    study.tell_ended()
    assert study.best() == f"{runs[1][1].title} with {best:.4f}"


@pytest.mark.parametrize("headline", ["top1/a", "loss"])
@pytest.mark.parametrize("prunes", [True, False])
def test_the_worst_of_several_is_pruned(open_study, prunes, headline):
    """After a quarter of the epochs, and where two are left."""
    study = open_study(RATES, *([] if prunes else ["--no-prune"]), trials=7)
    ended = []
    for number in range(7):
        asked = study.ask()
        value = 0.5 if number < 6 else 0.1
        for epoch in range(1, 20):
            values = {"loss": 1 - value, "top1/a": 0.5 if headline == "loss" else value}
            if study.report(asked[0], values, headline, epoch, 20):
                ended.append((number, epoch))
                break
        else:
            end(asked[1], value)
            study.tell_ended()
    assert ended == ([(6, 6)] if prunes else [])


def test_a_metric_that_no_run_has_ends_the_search(open_study):
    study = open_study(RATES, "--metric", "top5/a")
    asked = study.ask()
    with pytest.raises(ConfigError, match=r"--metric.*top5/a.*top1/a"):
        study.report(asked[0], {"loss": 0.5, "top1/a": 0.1}, "top1/a", 1, 20)


def test_a_search_does_not_mix_two_configurations(open_study, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("TRAIN: {AMP: bf16}")
    study = open_study(RATES, "--cfg", "my.yaml")
    study.check_configuration()
    file.write_text("TRAIN: {AMP: 'off'}")
    with pytest.raises(ConfigError, match=r"EXPERIMENT\.NAME"):
        study.check_configuration()
    with pytest.raises(ConfigError, match=r"EXPERIMENT\.NAME"):
        open_study(f"{LR}=interval(0.1,10)", "--cfg", "my.yaml")


def test_optuna_is_asked_for_where_it_is_missing(tmp_path, run, monkeypatch):
    monkeypatch.setattr("linnaeus.cli.sweep.find_spec", lambda name: None)
    refused = run("sweep", "--search", "optuna", "--trials", "2", RATES)
    assert (refused.code, "linnaeus[sweep]" in refused.err) == (2, True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.e2e
def test_a_whole_search(run_in_child, tmp_path):
    search = ("--search", "optuna", "--jobs", "2", "--trials", "3")
    outcome = run_in_child("sweep", *TINY, "TRAIN.EPOCHS=2", RATES, *search).ok()
    entries = figures(tmp_path / "runs/tiny")
    assert [entry["status"] for entry in entries] == ["finished"] * 3
    best = max(entry["best top1/class"] for entry in entries)
    assert f" {best:.4f}" in outcome.out.splitlines()[-1]
    study = Study(Sweep.read(tmp_path / "runs/tiny"))
    assert states(study) == ["COMPLETE"] * 3
    assert [len(trial.intermediate_values) for trial in study.trials()] == [2] * 3
