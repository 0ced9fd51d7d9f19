"""`linnaeus evaluate`: the figures that training has logged, other data, files, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.evaluate.conftest import DIGITS, TINY, write_images
from tests.conftest import TORCHRUN, Run
from tests.forks import ROOT, python

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
    assert "as logged: every figure" in outcome.out
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
    assert "other figures than logged, although data, sizes and device are the run's" in outcome.out
    changed = content_of(path)["logged"]
    assert not changed["same"]
    assert "top1/digit" in changed["unequal"]
    assert "top1/shape" not in changed["unequal"]


def test_without_an_average_and_with_other_settings(run: Run, tmp_path: Path) -> None:
    assert run(*DIGITS).code == 0
    evaluate = ["evaluate", "runs/tiny/checkpoints/last.pt"]
    assert "as logged: every figure" in run(*evaluate).out
    outcome = run(*evaluate, "DATA.BATCH_SIZE_VAL=70", "TRAIN.AMP=bf16")
    assert (
        "other figures than logged with DATA.BATCH_SIZE_VAL 70 (61 in the run), TRAIN.AMP bf16" in outcome.out
    )


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
    assert "as logged" in outcome.out
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
    assert "logged" not in outcome.out
    found = content_of(birds / "evaluations/best_new_val.json")
    samples = {row["class"]: row["samples"] for row in found["classes"]}
    assert samples == {"cats": 3, "dogs": 3, "lion": 0, "lynx": 3, "fox": 0, "wolf": 3}
    assert found["levels"]["level2"]["classes_with_samples"] == 2
    with (birds / "evaluations/best_new_val_classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["recall"] for row in rows if row["samples"] == "0"] == ["", ""]
    assert "taken for" in (tmp_path / "p.html").read_text()


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
    unknown = {name: level["unknown"] for name, level in found["levels"].items()}
    assert unknown == {"level1": 0, "level2": 1}


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


def test_a_run_without_classes_has_a_loss(run: Run, tmp_path: Path) -> None:
    nodes = {"DATA.DATASET": "tests.commands.evaluate.tiny.Pairs", "LOSS": "torch.nn.MSELoss"}
    targets = [f"{node}._target_={name}" for node, name in nodes.items()]
    model = ["MODEL._target_=torch.nn.Linear", "MODEL.in_features=3", "MODEL.out_features=3"]
    assert run(*TINY, *model, *targets, "DATA.BATCH_SIZE=4").code == 0
    outcome = run("evaluate", "runs/tiny", "--checkpoint", "last")
    assert outcome.code == 0, outcome.err
    assert "as logged" in outcome.out
    found = content_of(tmp_path / "runs/tiny/evaluations/last.json")
    assert found["metrics"] == logged(tmp_path / "runs/tiny")
    assert (found["levels"], found["classes"]) == ({}, [])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "RUN: name the folder of a run first"),
        (["DATA.BATCH_SIZE_VAL=3"], "RUN: name the folder of a run first"),
        (["runs/tin"], "there is no run runs/tin; did you mean runs/tiny?"),
        (["runs/tiny", "TRAIN.EPOCHS=3"], "TRAIN.EPOCHS: is that of the run and has no effect"),
        (["runs/tiny", "MODEL.NAME=vit"], "MODEL.NAME: is that of the run and has no effect"),
        (["runs/tiny", "DATA.BATCH_SIZE=3"], "DATA.BATCH_SIZE: is that of the run|is for training"),
        (["runs/tiny", "DATA.AUTOBATCH.MAX_BATCH_SIZE=3"], "takes DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL"),
        (["runs/tiny", "data=imagefolder"], "data: files and presets have no effect"),
        (["runs/tiny", "--cfg", "x.yaml"], "--cfg: files and presets have no effect"),
        (["runs/tiny", "DATA.DATASET.ROOOT=x"], "did you mean DATA.DATASET.ROOT"),
        (["runs/tiny", "--unknown", "drop"], "'drop' is not one of error, skip"),
        (["runs/tiny", "--plots", "x.png"], "--plots: no such option"),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Run, tmp_path: Path, argv: list[str], message: str) -> None:
    folder = tmp_path / "runs/tiny"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("TRAIN: {EPOCHS: 2}\n")
    outcome = run("evaluate", *argv)
    assert outcome.code == 2
    assert any(part in outcome.err for part in message.split("|")), outcome.err
