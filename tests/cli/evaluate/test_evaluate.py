"""`linnaeus evaluate`: the figures that training has logged, other data, files, and what is refused."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from linnaeus.cli.evaluate.options import read
from linnaeus.main import cli
from tests.helpers.children import python
from tests.helpers.datasets import write_image
from tests.helpers.run_files import names
from tests.helpers.runs import TORCHRUN
from tests.helpers.small_runs import lines_of

FOX = "[fox] :cat: $a$ <b>"
FOLDERS = ("cats/lion", "cats/lynx", f"dogs/{FOX}", "dogs/wolf")
TINY = (
    "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=tiny",
    "TRAIN.EPOCHS=1",
    "DATA.BATCH_SIZE=4",
    "DATA.BATCH_SIZE_VAL=5",
    "OPTIMIZER.LR=0.01",
)
BIRDS = (
    *TINY,
    "MODEL._target_=tests.cli.tiny.TinyNet",
    "DATA.DATASET.NAME=imagefolder",
    "DATA.IMG_SIZE=8",
    "DATA.AUGMENT.CROP_SCALE=[1,1]",
    "DATA.AUGMENT.HFLIP=0",
    "DATA.DATASET.ROOT=birds",
    "DATA.DATASET.VAL_FRACTION=0.3",
    "TRAIN.EMA.ENABLED=True",
    "TRAIN.EMA.DECAY=0.8",
    "TRAIN.EMA.VALIDATE_RAW=True",
    "TRAIN.AMP=bf16",
)


def write_images(folder, classes, num_images, seed=0):
    """Write so many images into a folder for each class."""
    for position, name in enumerate(classes):
        for number in range(num_images):
            write_image(folder / name / f"{number}.png", 1000 * seed + 100 * position + number)


def content_of(path):
    return json.loads(path.read_text())


def only(run_folder, pattern):
    """The one file of an evaluation with such a name."""
    [path] = (run_folder / "evaluations").glob(pattern)
    return path


def logged(run_folder):
    """The last metrics that training has logged, without those of the raw weights."""
    last = lines_of(run_folder, "val")[-1]
    metrics = last.keys() - {"step", "epoch", "split", "time"}
    return {name: last[name] for name in metrics if not name.startswith("raw/")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder in which a run on folders of two levels was trained, which has held samples out."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_images(folder / "birds", FOLDERS, 6)
        assert cli(BIRDS) == 0
    return folder


@pytest.fixture
def birds(trained, run, tmp_path):
    """The run in a copy of that folder, where the test is."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs/tiny"


@pytest.fixture
def evaluate(run):
    """Evaluates the run; gives the outcome."""

    def evaluate(*argv, code=0):
        outcome = run("evaluate", "runs/tiny", "--trust-code", *argv)
        assert outcome.code == code, outcome.err
        return outcome

    return evaluate


def test_own_validation_data_gives_the_logged_figures_exactly(birds, evaluate):
    """With the average of the weights, in bfloat16, and a checkpoint alone; other weights give others."""
    outcome = evaluate("--checkpoint", "last")
    assert FOX in outcome.out
    found = content_of(birds / "evaluations/last.json")
    assert found["metrics"] == found["logged"] == logged(birds)
    assert (found["data"]["part"], found["data"]["samples"]) == ("validation split", 7)

    content = torch.load(birds / "checkpoints/last.pt", weights_only=True)
    content["state"]["ema"]["module"]["heads.1.bias"][3] += 5
    torch.save(content, birds / "checkpoints/last.pt")
    other = ("--checkpoint", "last", "TRAIN.AMP=off", "DATA.BATCH_SIZE_VAL=3")
    evaluate(*other)
    changed = content_of(birds / "evaluations/last.json")
    assert changed["logged"] == found["metrics"]
    assert changed["metrics"]["loss"] != found["metrics"]["loss"]
    assert changed["metrics"]["top1/level1"] == found["metrics"]["top1/level1"]
    (birds / "config.yaml").unlink()
    evaluate(*other, "--output", "alone")
    assert content_of(Path("alone.json"))["metrics"] == changed["metrics"]


RANKS = """
import sys
from linnaeus.main import cli
assert cli(["train", *sys.argv[1:]]) == 0
assert cli(["evaluate", "runs/tiny", "--trust-code", "--checkpoint", "last"]) == 0
"""


@pytest.mark.e2e
def test_two_ranks_give_the_logged_figures(tmp_path):
    """Both start once, train and evaluate."""
    write_images(tmp_path / "birds", FOLDERS, 6)
    (tmp_path / "ranks.py").write_text(RANKS)
    argv = [*TORCHRUN, "--nproc_per_node=2", tmp_path / "ranks.py", *BIRDS]
    python(*argv, cwd=tmp_path).ok()
    found = content_of(tmp_path / "runs/tiny/evaluations/last.json")
    assert found["metrics"] == found["logged"] == logged(tmp_path / "runs/tiny")
    assert found["settings"]["processes"] == 2
    samples = [row["samples"] for row in found["classes"] if row["level"] == "level2"]
    assert sum(samples) == found["data"]["samples"]


def test_other_data_needs_no_training_data(birds, evaluate, tmp_path):
    """Fewer classes, in another folder, without the coarse level; labels are those of the run."""
    shutil.rmtree(tmp_path / "birds")
    write_images(tmp_path / "new/val", ("wolf", "lynx"), 3, seed=1)
    evaluate("DATA.DATASET.ROOT=new")
    found = content_of(only(birds, "best_*val_*.json"))
    assert found["logged"] is None
    samples = {row["class"]: row["samples"] for row in found["classes"]}
    assert samples == {"cats": 3, "dogs": 3, "lion": 0, "lynx": 3, FOX: 0, "wolf": 3}
    assert found["levels"]["level2"]["classes_with_samples"] == 2
    table = pd.read_csv(only(birds, "best_val_*_classes.csv"))
    assert [*table["recall"].isna()] == [*(table["samples"] == 0)]


def test_unknown_classes_are_an_error_or_left_out(birds, evaluate, tmp_path):
    rows = [f"birds/{name}/0.png,{name.replace('/', ',')}" for name in FOLDERS]
    rows += [f"birds/cats/lion/{n}.png,cats,{name}" for n, name in enumerate(("puma", "puma", ""))]
    (tmp_path / "test.csv").write_text("image,level1,level2\n" + "\n".join(rows))
    manifest = ("DATA.DATASET.NAME=manifest", f"DATA.DATASET.VAL={tmp_path}/test.csv")
    outcome = evaluate(*manifest, code=1)
    assert all(word in outcome.err for word in ("cats/puma", "lion/0.png", "--unknown"))
    evaluate(*manifest, "--unknown", "skip")
    found = content_of(only(birds, "best_test_*.json"))
    assert (found["data"]["samples"], found["data"]["left_out"]) == (5, 2)
    assert [level["unlabelled"] for level in found["levels"].values()] == [0, 1]


@pytest.mark.e2e
def test_no_evaluation_replaces_one_of_other_inputs(birds, evaluate, tmp_path):
    resizing = ("DATA.AUGMENT.RESIZE=letterbox", "DATA.AUGMENT.INTERPOLATION=bicubic")
    evaluate("DATA.IMG_SIZE=12", *resizing)
    found = content_of(only(birds, "best_*.json"))["data"]
    look = ("resize", "interpolation", "crop_fraction", "image_size")
    assert [found[name] for name in look] == ["letterbox", "bicubic", 1.0, [12, 12]]
    for name, seed in (("a", 1), ("b", 2)):
        write_images(tmp_path / name / "test" / "val", FOLDERS, 1, seed)
    for root, expected in (("a/test", 2), ("b/test", 3), ("a/test", 3), ("birds", 4)):
        evaluate(f"DATA.DATASET.ROOT={root}")
        assert len(list(birds.glob("evaluations/*.json"))) == expected
    assert (birds / "evaluations/best.json").exists()
    evaluate("--output", "mine/own")
    assert names(tmp_path / "mine") == {"own.json", "own.png", "own_classes.csv"}
    outcome = evaluate("DATA.IMG_SIZE=2", code=2)  # smaller than the kernel
    assert "DATA.IMG_SIZE: " in outcome.err


MANY = ("DATA.DATASET.ROOT=many", "DATA.DATASET.VAL=.", "--output")


@pytest.mark.e2e
def test_a_found_size_gives_the_same_results_as_one_set_by_hand(birds, evaluate, tmp_path):
    """The model takes 30 samples; more of them name the keys."""
    write_images(tmp_path / "many", FOLDERS, 10)
    evaluate(*MANY, "found", "DATA.AUTOBATCH.ENABLED_VAL=True")
    found = content_of(tmp_path / "found.json")
    assert found["settings"]["batch_size_val"] == 30
    evaluate(*MANY, "set", "DATA.BATCH_SIZE_VAL=30")
    by_hand = content_of(tmp_path / "set.json")
    for name in ("metrics", "levels", "classes", "settings"):
        assert by_hand[name] == found[name]
    outcome = evaluate(*MANY, "large", "DATA.BATCH_SIZE_VAL=31", code=3)
    for key in ("DATA.BATCH_SIZE_VAL", "DATA.AUTOBATCH.ENABLED_VAL"):
        assert key in outcome.err
    assert not (tmp_path / "large.json").exists()


def test_a_run_without_classes_has_a_loss(run, evaluate, tmp_path):
    nodes = ("DATA.DATASET", "tests.cli.tiny.Pairs"), ("LOSS", "torch.nn.MSELoss")
    targets = [f"{node}._target_={name}" for node, name in (*nodes, ("MODEL", "torch.nn.Linear"))]
    run(*TINY, *targets, "MODEL.in_features=3", "MODEL.out_features=3").ok()
    evaluate("--checkpoint", "last")
    found = content_of(tmp_path / "runs/tiny/evaluations/last.json")
    assert found["metrics"] == found["logged"] == logged(tmp_path / "runs/tiny")
    assert (found["levels"], found["classes"]) == ({}, [])
    outcome = evaluate("--samples", "s.csv", code=2)  # it lists image files
    assert "--samples" in outcome.err
    assert not (tmp_path / "s.csv").exists()


@pytest.mark.parametrize(
    ("own", "typed", "is_kept"),
    [
        ("NAME: imagefolder", "NAME=manifest", False),
        ("_target_: own.Birds", "_target_=own.Birds", True),
    ],
)
def test_a_dataset_of_another_kind_begins_with_the_defaults(
    tmp_path, monkeypatch, own, typed, is_kept
):
    monkeypatch.chdir(tmp_path)
    Path("runs/tiny/checkpoints").mkdir(parents=True)
    Path("runs/tiny/config.yaml").write_text(f"DATA: {{DATASET: {{{own}, TRAIN: mine.csv}}}}\n")
    printed = read(["runs/tiny", f"DATA.DATASET.{typed}", "--print-config"])
    assert ("TRAIN: mine.csv" in printed) == is_kept


def test_samples_are_listed_the_worst_first(birds, evaluate, tmp_path):
    evaluate("--checkpoint", "last", "--samples", "new/s.csv")
    table = pd.read_csv("new/s.csv")
    found = content_of(birds / "evaluations/last.json")
    assert found["data"]["samples"] == table["path"].nunique()
    for level in ("level1", "level2"):
        is_right = table[level] == table[f"{level}_predicted"]
        assert is_right.mean() == pytest.approx(found["metrics"][f"top1/{level}"])
    assert [Path(path).parent.name for path in table["path"]] == [*table["level2"]]
    assert table["loss"].is_monotonic_decreasing
    assert (tmp_path / "new/worst.png").stat().st_size > 1000
