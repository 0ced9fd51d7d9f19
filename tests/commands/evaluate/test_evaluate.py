"""`linnaeus evaluate`: the figures that training has logged, other data, files, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from linnaeus.commands.evaluate.results import Logged
from tests.commands.evaluate.conftest import DIGITS, TINY, write_images
from tests.helpers.forks import ROOT, python
from tests.helpers.runs import TORCHRUN, Run

FOLDERS = ("cats/lion", "cats/lynx", "dogs/fox", "dogs/wolf")
FILES = (*TINY, "DATA.DATASET.NAME=imagefolder", "DATA.IMG_SIZE=8")


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def logged(run_folder: Path) -> dict[str, float]:
    """The figures of the last validation."""
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    *_, last = (line for line in lines if line["split"] == "val")
    return {name: value for name, value in last.items() if name not in ("step", "epoch", "split", "time")}


def test_own_validation_data_gives_the_logged_figures_to_the_last_digit(run: Run, tmp_path: Path) -> None:
    """With the average of the weights, in bfloat16; and of other weights the same command says otherwise."""
    options = ["TRAIN.EMA.ENABLED=True", "TRAIN.EMA.DECAY=0.8", "TRAIN.AMP=bf16"]
    assert run(*DIGITS, *options).code == 0
    evaluate = ["evaluate", "runs/tiny", "--checkpoint", "last"]
    outcome = run(*evaluate)
    assert outcome.code == 0, outcome.err
    assert "same figures as in training, to the last digit" in outcome.out
    path = tmp_path / "runs/tiny/evaluations/last.json"
    found = content_of(path)
    assert found["metrics"] == logged(tmp_path / "runs/tiny")
    assert found["logged"] == {
        "metrics": found["metrics"], "same": True, "unequal": [], "other_settings": [],
    }  # fmt: skip
    assert found["metrics"]["top1/digit"] == pytest.approx(found["levels"]["digit"]["top1"])

    checkpoint = tmp_path / "runs/tiny/checkpoints/last.pt"
    content = torch.load(checkpoint, weights_only=True)
    content["state"]["ema"]["module"]["heads.1.bias"][3] += 5
    torch.save(content, checkpoint)
    outcome = run(*evaluate)
    assert "figures differ from training, although data, sizes and device are the run's" in outcome.out
    changed = content_of(path)["logged"]
    assert not changed["same"]
    assert "top1/digit" in changed["unequal"]
    assert "top1/shape" not in changed["unequal"]


def test_a_figure_that_only_one_of_both_has_is_a_difference() -> None:
    """Figures that are not a number on both sides are not."""
    nan = float("nan")
    same = Logged.of({"loss": 1.5, "top1/a": nan}, {"loss": 1.5, "top1/a": nan}, [])
    assert same.sentence({}) == "same figures as in training, to the last digit"
    metrics = {"loss": 1.5, "top1/a": 0.5}
    other = Logged.of({"loss": 1.5, "consistent": 1.0}, metrics, ["TRAIN.AMP off (bf16 in the run)"])
    assert other.unequal == ["consistent", "top1/a"]
    assert other.sentence(metrics) == (
        "figures differ from training with TRAIN.AMP off (bf16 in the run): "
        "consistent absent (1 in training), top1/a 0.5 (absent in training)"
    )


def test_outputs_that_are_not_finite_are_no_figures(run: Run, tmp_path: Path) -> None:
    assert run(*DIGITS).code == 0
    checkpoint = tmp_path / "runs/tiny/checkpoints/last.pt"
    content = torch.load(checkpoint, weights_only=True)
    content["state"]["model"]["heads.1.bias"][3] = float("nan")
    torch.save(content, checkpoint)
    outcome = run("evaluate", "runs/tiny", "--checkpoint", "last")
    assert outcome.code == 1
    assert "outputs for rank 'digit' are not finite, for " in outcome.err
    assert not list((tmp_path / "runs/tiny/evaluations").iterdir())


@pytest.mark.slow
def test_without_an_average_and_with_other_settings(run: Run, tmp_path: Path) -> None:
    assert run(*DIGITS).code == 0
    evaluate = ["evaluate", "runs/tiny/checkpoints/last.pt"]
    assert "same figures as in training, to the last digit" in run(*evaluate).out
    outcome = run(*evaluate, "DATA.BATCH_SIZE_VAL=70", "TRAIN.AMP=bf16")
    with_settings = "with DATA.BATCH_SIZE_VAL 70 (61 in the run), TRAIN.AMP bf16"
    assert f"figures differ from training {with_settings}" in outcome.out


RANKS = """
import sys
from linnaeus.main import cli
train, own, other = ["train", *sys.argv[1:]], ["evaluate", "runs/tiny", "--checkpoint", "last"], []
for argv in (train, own, [*own, "--output", "other", "DATA.BATCH_SIZE_VAL=29"]):
    assert cli(argv) == 0
"""


@pytest.mark.distributed
def test_two_ranks_give_the_logged_figures(tmp_path: Path) -> None:
    """Both start once, train and evaluate; another batch size gives the same counts and another mean loss."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    argv = [*TORCHRUN, "--nproc_per_node=2", script, *DIGITS, "TRAIN.EMA.ENABLED=True"]
    outcome = python(*argv, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 0, outcome.err
    found = content_of(tmp_path / "runs/tiny/evaluations/last.json")
    assert found["metrics"] == logged(tmp_path / "runs/tiny")
    assert (found["logged"]["same"], found["logged"]["other_settings"]) == (True, [])
    assert found["settings"]["processes"] == 2
    other = content_of(tmp_path / "other.json")
    assert other["logged"]["other_settings"] == ["DATA.BATCH_SIZE_VAL 29 (61 in the run)"]
    assert other["classes"] == found["classes"]
    assert (
        sum(row["samples"] for row in found["classes"] if row["level"] == "digit") == found["data"]["samples"]
    )


@pytest.fixture
def birds(run: Run, tmp_path: Path) -> Path:
    """A run on folders of two ranks, which has held samples out."""
    write_images(tmp_path / "birds", FOLDERS, 6)
    outcome = run(*FILES, "DATA.DATASET.ROOT=birds", "DATA.DATASET.VAL_FRACTION=0.3", "DATA.BATCH_SIZE=4")
    assert outcome.code == 0, outcome.err
    return tmp_path / "runs/tiny"


def test_held_out_samples_are_found_again(run: Run, birds: Path, tmp_path: Path) -> None:
    outcome = run("evaluate", "runs/tiny", "--checkpoint", "last")
    assert outcome.code == 0, outcome.err
    assert "same figures as in training" in outcome.out
    found = content_of(birds / "evaluations/last.json")
    assert found["metrics"] == logged(birds)
    assert (found["data"]["part"], found["data"]["samples"]) == ("samples held out of training", 7)
    (tmp_path / "birds/dogs/dingo").mkdir()
    shutil.copy(tmp_path / "birds/dogs/fox/0.png", tmp_path / "birds/dogs/dingo")
    outcome = run("evaluate", "runs/tiny")
    assert outcome.code == 1
    assert "its classes are not those of the run any more (level2 dingo new)" in outcome.err


def test_other_data_needs_no_training_data(run: Run, birds: Path, tmp_path: Path) -> None:
    """Fewer classes, in another folder, without the coarse rank; labels are those of the run."""
    shutil.rmtree(tmp_path / "birds")
    write_images(tmp_path / "new/val", ("wolf", "lynx"), 3, seed=1)
    outcome = run("evaluate", "runs/tiny", "DATA.DATASET.ROOT=new", "--plot", "p.html")
    assert outcome.code == 0, outcome.err
    assert "no level1 there" in outcome.out
    assert "figures" not in outcome.out
    found = content_of(birds / "evaluations/best_new_val.json")
    samples = {row["class"]: row["samples"] for row in found["classes"]}
    assert samples == {"cats": 3, "dogs": 3, "lion": 0, "lynx": 3, "fox": 0, "wolf": 3}
    assert found["levels"]["level2"]["classes_with_samples"] == 2
    with (birds / "evaluations/best_new_val_classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["recall"] for row in rows if row["samples"] == "0"] == ["", ""]
    assert "taken for" in (tmp_path / "p.html").read_text()


def test_a_dataset_of_ones_own_takes_nothing_over_from_the_folders_of_the_run(run: Run, birds: Path) -> None:
    target = "DATA.DATASET._target_=tests.commands.evaluate.tiny.Wolves"
    outcome = run("evaluate", "runs/tiny", target, "DATA.DATASET.num_samples=6", "--output", "wolves")
    assert outcome.code == 0, outcome.err
    found = content_of(birds.parents[1] / "wolves.json")
    assert (found["data"]["source"], found["data"]["samples"]) == ("tests.commands.evaluate.tiny.Wolves", 6)
    assert {row["class"]: row["samples"] for row in found["classes"] if row["samples"]} == {
        "dogs": 6, "fox": 3, "wolf": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("own", "typed", "kept"),
    [
        ("NAME: imagefolder", ["DATA.DATASET.ROOT=new"], True),
        ("NAME: imagefolder", ["DATA.DATASET.NAME=imagefolder"], True),
        ("NAME: imagefolder", ["DATA.DATASET.NAME=manifest"], False),
        ("NAME: imagefolder", ["DATA.DATASET={_target_: own.Other}"], False),
        ("_target_: own.Birds", ["DATA.DATASET._target_=own.Birds", "DATA.DATASET.year=2026"], True),
        ("_target_: own.Birds", ["DATA.DATASET._target_=own.Other"], False),
        ("_target_: own.Birds", ["DATA.DATASET.NAME=manifest"], False),
    ],
)
def test_a_dataset_of_another_kind_begins_with_the_defaults(
    run: Run, tmp_path: Path, own: str, typed: list[str], kept: bool
) -> None:
    argument = "TRAIN: mine.csv" if own.startswith("NAME") else "region: north"
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/config.yaml").write_text(f"DATA: {{DATASET: {{{own}, {argument}}}}}\n")
    outcome = run("evaluate", "runs/tiny", *typed, "--print-config")
    assert outcome.code == 0, outcome.err
    assert (argument in outcome.out) == kept


def test_a_run_with_a_balanced_sampler_needs_no_training_labels(run: Run, tmp_path: Path) -> None:
    """A class that the data does not have has no samples to draw, which is nothing to an evaluation."""
    write_images(tmp_path / "birds", FOLDERS, 6)
    assert run(*FILES, "DATA.DATASET.ROOT=birds", "DATA.SAMPLER=balanced", "DATA.BATCH_SIZE=4").code == 0
    target = "DATA.DATASET._target_=tests.commands.evaluate.tiny.Wolves"
    outcome = run("evaluate", "runs/tiny", target)
    assert outcome.code == 0, outcome.err


def test_unknown_classes_are_an_error_or_left_out(run: Run, birds: Path, tmp_path: Path) -> None:
    rows = ["image,level1,level2", *(f"birds/{name}/0.png,{name.replace('/', ',')}" for name in FOLDERS)]
    rows += [
        "birds/cats/lion/1.png,cats,puma",
        "birds/cats/lion/2.png,cats,puma",
        "birds/cats/lion/3.png,cats,",
    ]
    (tmp_path / "test.csv").write_text("\n".join(rows))
    command = ["evaluate", "runs/tiny", "DATA.DATASET.NAME=manifest", f"DATA.DATASET.VAL={tmp_path}/test.csv"]
    outcome = run(*command)
    assert outcome.code == 1
    expected = "the run does not know 1 class with 2 samples: cats/puma (first in line 6); --unknown skip"
    assert expected in outcome.err
    assert run(*command, "--unknown", "skip").code == 0
    found = content_of(birds / "evaluations/best_test.json")
    assert (found["data"]["samples"], found["data"]["left_out"]) == (5, 2)
    unlabelled = {name: level["unlabelled"] for name, level in found["levels"].items()}
    assert unlabelled == {"level1": 0, "level2": 1}


@pytest.mark.slow
def test_no_evaluation_replaces_one_of_other_data(run: Run, birds: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_images(tmp_path / name / "test" / "val", FOLDERS, 1, seed)
    folder = birds / "evaluations"
    for root, expected in (("a/test", 1), ("b/test", 2), ("a/test", 2)):
        assert run("evaluate", "runs/tiny", f"DATA.DATASET.ROOT={root}").code == 0
        assert len(list(folder.glob("*.json"))) == expected
    assert run("evaluate", "runs/tiny", "--output", "mine/own").code == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        "own.json", "own_classes.csv", "own.png",
    }  # fmt: skip
    outcome = run("evaluate", "runs/tiny", "--output", "mine/own", "DATA.DATASET.ROOT=a/test")
    assert outcome.code == 2
    assert "own.json holds an evaluation of other data" in outcome.err


def test_a_lone_checkpoint_holds_what_it_needs(run: Run, birds: Path, tmp_path: Path) -> None:
    shutil.copy(birds / "checkpoints/last.pt", tmp_path / "model.pt")
    expected = logged(birds)
    shutil.rmtree(birds)
    outcome = run("evaluate", "model.pt", "DATA.BATCH_SIZE_VAL=61", "TRAIN.AMP=off")
    assert outcome.code == 0, outcome.err
    assert content_of(tmp_path / "evaluations/model.json")["metrics"] == expected


@pytest.mark.slow
def test_autobatch_finds_the_size_where_it_is_asked_to(run: Run, tmp_path: Path) -> None:
    """It evaluates as the same size set by hand; without, a run with AutoBatch keeps the size it found."""
    assert run(*DIGITS).code == 0
    bounds = ["DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL=21"]
    outcome = run("evaluate", "runs/tiny", "--output", "found", "DATA.AUTOBATCH.ENABLED_VAL=True", *bounds)
    assert outcome.code == 0, outcome.err
    found = content_of(tmp_path / "found.json")
    assert found["settings"]["batch_size_val"] == 21
    assert run("evaluate", "runs/tiny", "--output", "set", "DATA.BATCH_SIZE_VAL=21").code == 0
    by_hand = content_of(tmp_path / "set.json")
    for name in ("metrics", "levels", "classes", "settings"):
        assert by_hand[name] == found[name]


def test_another_image_size_is_an_evaluation_of_its_own(run: Run, birds: Path) -> None:
    outcome = run("evaluate", "runs/tiny", "DATA.IMG_SIZE=12")
    assert outcome.code == 0, outcome.err
    found = content_of(birds / "evaluations/best_12x12.json")
    assert found["data"]["image_size"] == [12, 12]
    assert "image size (12, 12) ((8, 8) in the run)" in found["logged"]["other_settings"]
    outcome = run("evaluate", "runs/tiny", "DATA.IMG_SIZE=2")
    assert outcome.code == 2
    assert "DATA.IMG_SIZE: this model takes no images of 2x2 pixels" in outcome.err


def test_running_out_of_memory_names_the_keys(run: Run, tmp_path: Path) -> None:
    hungry = [*FILES, "MODEL._target_=tests.commands.evaluate.tiny.HungryNet", "DATA.DATASET.ROOT=birds"]
    write_images(tmp_path / "birds", FOLDERS, 10)
    assert run(*hungry, "DATA.BATCH_SIZE=8", "DATA.BATCH_SIZE_VAL=8").code == 0
    evaluate = ["evaluate", "runs/tiny", "DATA.DATASET.VAL=."]
    outcome = run(*evaluate, "DATA.BATCH_SIZE_VAL=40")
    assert outcome.code == 3
    assert "out of memory in the evaluation, with batches of 40" in outcome.err
    assert "DATA.BATCH_SIZE_VAL below 40, DATA.AUTOBATCH.ENABLED_VAL True" in outcome.err
    assert not list((tmp_path / "runs/tiny/evaluations").iterdir())
    outcome = run(*evaluate, "DATA.AUTOBATCH.ENABLED_VAL=True")
    assert outcome.code == 0, outcome.err
    [path] = (tmp_path / "runs/tiny/evaluations").glob("*.json")
    assert content_of(path)["settings"]["batch_size_val"] == 30
    outcome = run(*evaluate, "DATA.IMG_SIZE=40")
    assert outcome.code == 3
    assert "DATA.IMG_SIZE: out of memory with a single image of 40x40 pixels" in outcome.err


def test_a_run_without_classes_has_a_loss(run: Run, tmp_path: Path) -> None:
    nodes = {"DATA.DATASET": "tests.commands.evaluate.tiny.Pairs", "LOSS": "torch.nn.MSELoss"}
    targets = [f"{node}._target_={name}" for node, name in nodes.items()]
    model = ["MODEL._target_=torch.nn.Linear", "MODEL.in_features=3", "MODEL.out_features=3"]
    assert run(*TINY, *model, *targets, "DATA.BATCH_SIZE=4").code == 0
    outcome = run("evaluate", "runs/tiny", "--checkpoint", "last")
    assert outcome.code == 0, outcome.err
    assert "same figures as in training" in outcome.out
    found = content_of(tmp_path / "runs/tiny/evaluations/last.json")
    assert found["metrics"] == logged(tmp_path / "runs/tiny")
    assert (found["levels"], found["classes"]) == ({}, [])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "RUN: name the folder of a run first"),
        (["DATA.BATCH_SIZE_VAL=3"], "RUN: name the folder of a run first"),
        (["runs/tin"], "there is no run runs/tin; did you mean runs/tiny?"),
        (["runs/tiny", "TRAIN.EPOCHS=3"], "TRAIN.EPOCHS: belongs to the trained run and cannot be changed"),
        (["runs/tiny", "MODEL.NAME=vit"], "MODEL.NAME: belongs to the trained run and cannot be changed"),
        (["runs/tiny", "DATA.BATCH_SIZE=3"], "is for training; an evaluation takes DATA.BATCH_SIZE_VAL"),
        (["runs/tiny", "DATA.AUTOBATCH.MAX_BATCH_SIZE=3"], "takes DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL"),
        (["runs/tiny", "data=imagefolder"], "data: files and presets have no effect"),
        (["runs/tiny", "--cfg", "x.yaml"], "--cfg: files and presets have no effect"),
        (["runs/tiny", "DATA.DATASET.ROOOT=x"], "did you mean DATA.DATASET.ROOT"),
        (["runs/tiny", "--unknown", "drop"], "'drop' is none of error, skip"),
        (["runs/tiny", "--plots", "x.png"], "--plots: no such option"),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Run, tmp_path: Path, argv: list[str], message: str) -> None:
    folder = tmp_path / "runs/tiny"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("TRAIN: {EPOCHS: 2}\n")
    outcome = run("evaluate", *argv)
    assert outcome.code == 2
    assert message in outcome.err


def test_the_help_names_every_key_that_can_be_set(run: Run) -> None:
    shown = " ".join(run("evaluate", "--help").out.split())
    for name in ("DATA.AUGMENT.CROP_FRACTION", "DATA.ON_BAD_IMAGE", "DATA.PIN_MEMORY", "143 terminated"):
        assert name in shown
