"""`linnaeus evaluate`: the figures that training has logged, other data, files, and what is refused."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from linnaeus.cli.evaluate.options import read
from linnaeus.cli.evaluate.samples import write_samples
from linnaeus.main import cli
from tests.helpers.datasets import write_image
from tests.helpers.forks import ROOT, python
from tests.helpers.runs import TORCHRUN
from tests.helpers.small_runs import lines_of
from tests.helpers.trained import ONE_LEVEL, spec_of

FOLDERS = ("cats/lion", "cats/lynx", "dogs/[fox] :cat: $a$ <b>", "dogs/wolf")
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

EVALUATE = ("evaluate", "runs/tiny", "--trust-code")


def write_images(folder, classes, num_images, seed=0):
    """Write so many images into a folder for each class."""
    for position, name in enumerate(classes):
        for number in range(num_images):
            write_image(folder / name / f"{number}.png", 1000 * seed + 100 * position + number)
    return folder


def content_of(path):
    content = json.loads(path.read_text())
    return content


def only(run_folder, pattern):
    """The one file of an evaluation with such a name."""
    [path] = (run_folder / "evaluations").glob(pattern)
    return path


def logged(run_folder):
    last = lines_of(run_folder, "val")[-1]
    return {
        name: value
        for name, value in last.items()
        if name not in ("step", "epoch", "split", "time") and not name.startswith("raw/")
    }


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


def test_a_checkpoint_alone_gives_the_logged_figures(run, birds, tmp_path):
    (birds / "config.yaml").unlink()
    outcome = run(*EVALUATE, "--checkpoint", "last", "--output", str(tmp_path / "found"))
    assert outcome.code == 0, outcome.err
    assert content_of(tmp_path / "found.json")["metrics"] == logged(birds)


def test_own_validation_data_gives_the_logged_figures_to_the_last_digit(run, birds):
    """With the average of the weights, in bfloat16; of other weights it says otherwise."""
    evaluate = [*EVALUATE, "--checkpoint", "last"]
    outcome = run(*evaluate)
    assert outcome.code == 0, outcome.err
    assert FOLDERS[2].removeprefix("dogs/") in outcome.out
    found = content_of(birds / "evaluations/last.json")
    assert found["metrics"] == logged(birds)
    assert found["logged"] == found["metrics"]
    assert "same metrics as in training" in outcome.out
    assert found["metrics"]["top1/level2"] == pytest.approx(found["levels"]["level2"]["top1"])
    assert (found["data"]["part"], found["data"]["samples"]) == ("validation split", 7)

    content = torch.load(birds / "checkpoints/last.pt", weights_only=True)
    content["state"]["ema"]["module"]["heads.1.bias"][3] += 5
    torch.save(content, birds / "checkpoints/last.pt")
    assert run(*evaluate, "TRAIN.AMP=off", "DATA.BATCH_SIZE_VAL=3").code == 0
    changed = content_of(birds / "evaluations/last.json")
    assert changed["logged"] == found["metrics"]
    unequal = {
        name for name, value in changed["metrics"].items() if found["metrics"][name] != value
    }
    assert {"top1/level2", "loss"} & unequal
    assert "top1/level1" not in unequal


RANKS = """
import sys
from linnaeus.main import cli
train, other = ["train", *sys.argv[1:]], []
own = ["evaluate", "runs/tiny", "--trust-code", "--checkpoint", "last"]
for argv in (train, own, [*own, "--output", "other", "DATA.BATCH_SIZE_VAL=2"]):
    assert cli(argv) == 0
"""


@pytest.mark.e2e
@pytest.mark.distributed
def test_two_ranks_give_the_logged_figures(tmp_path):
    """Both start once, train and evaluate; another batch size gives the same counts and another mean loss."""
    write_images(tmp_path / "birds", FOLDERS, 6)
    (tmp_path / "ranks.py").write_text(RANKS)
    argv = [*TORCHRUN, "--nproc_per_node=2", tmp_path / "ranks.py", *BIRDS]
    outcome = python(*argv, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 0, outcome.err
    found = content_of(tmp_path / "runs/tiny/evaluations/last.json")
    assert found["metrics"] == logged(tmp_path / "runs/tiny")
    assert found["logged"] == found["metrics"]
    assert found["settings"]["processes"] == 2
    other = content_of(tmp_path / "other.json")
    assert other["logged"] == found["logged"]
    assert other["classes"] == found["classes"]
    samples = [row["samples"] for row in found["classes"] if row["level"] == "level2"]
    assert sum(samples) == found["data"]["samples"]


def test_other_data_needs_no_training_data(run, birds, tmp_path):
    """Fewer classes, in another folder, without the coarse level; labels are those of the run."""
    shutil.rmtree(tmp_path / "birds")
    write_images(tmp_path / "new/val", ("wolf", "lynx"), 3, seed=1)
    outcome = run(*EVALUATE, "DATA.DATASET.ROOT=new")
    assert outcome.code == 0, outcome.err
    found = content_of(only(birds, "best_*val_*.json"))
    assert found["logged"] is None
    samples = {row["class"]: row["samples"] for row in found["classes"]}
    fox = FOLDERS[2].removeprefix("dogs/")
    assert samples == {"cats": 3, "dogs": 3, "lion": 0, "lynx": 3, fox: 0, "wolf": 3}
    assert found["levels"]["level2"]["classes_with_samples"] == 2
    with only(birds, "best_val_*_classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["recall"] for row in rows if row["samples"] == "0"] == ["", ""]


def test_unknown_classes_are_an_error_or_left_out(run, birds, tmp_path):
    rows = [
        "image,level1,level2",
        *(f"birds/{name}/0.png,{name.replace('/', ',')}" for name in FOLDERS),
    ]
    rows += [
        f"birds/cats/lion/{number}.png,cats,{name}"
        for number, name in enumerate(("puma", "puma", ""))
    ]
    (tmp_path / "test.csv").write_text("\n".join(rows))
    command = [
        *EVALUATE,
        "DATA.DATASET.NAME=manifest",
        f"DATA.DATASET.VAL={tmp_path}/test.csv",
    ]
    outcome = run(*command)
    assert outcome.code == 1
    assert all(word in outcome.err for word in ("cats/puma", "lion/0.png", "--unknown"))
    assert run(*command, "--unknown", "skip").code == 0
    found = content_of(only(birds, "best_test_*.json"))
    assert (found["data"]["samples"], found["data"]["left_out"]) == (5, 2)
    unlabelled = {name: level["unlabelled"] for name, level in found["levels"].items()}
    assert unlabelled == {"level1": 0, "level2": 1}


@pytest.mark.e2e
def test_no_evaluation_replaces_one_of_other_inputs(run, birds, tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        write_images(tmp_path / name / "test" / "val", FOLDERS, 1, seed)
    folder = birds / "evaluations"
    for root, size, expected in (
        ("a/test", 8, 1),
        ("b/test", 8, 2),
        ("a/test", 8, 2),
        ("a/test", 9, 3),
        ("birds", 9, 4),
        ("birds", 8, 5),
        ("birds", 8, 5),
    ):
        argv = (f"DATA.DATASET.ROOT={root}", f"DATA.IMG_SIZE={size}")
        assert run(*EVALUATE, *argv).code == 0
        assert len(list(folder.glob("*.json"))) == expected
    assert (folder / "best.json").exists()
    assert run(*EVALUATE, "--output", "mine/own").code == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        "own.json",
        "own_classes.csv",
        "own.png",
    }


def test_another_preprocessing_is_an_evaluation_of_its_own(run, birds):
    keys = (
        "DATA.IMG_SIZE=12",
        "DATA.AUGMENT.RESIZE=letterbox",
        "DATA.AUGMENT.INTERPOLATION=bicubic",
    )
    outcome = run(*EVALUATE, *keys)
    assert outcome.code == 0, outcome.err
    found = content_of(only(birds, "best_*.json"))["data"]
    names = ("resize", "interpolation", "crop_fraction", "image_size")
    assert [found[name] for name in names] == ["letterbox", "bicubic", 1.0, [12, 12]]
    outcome = run(*EVALUATE, "DATA.IMG_SIZE=2")  # smaller than the kernel
    assert (outcome.code, "DATA.IMG_SIZE: " in outcome.err) == (2, True)


def test_a_size_that_is_too_large_names_the_keys(run, birds, tmp_path):
    """The model takes 30 samples."""
    write_images(tmp_path / "many", FOLDERS, 8)
    evaluate = [*EVALUATE, "DATA.DATASET.ROOT=many", "DATA.DATASET.VAL=."]
    outcome = run(*evaluate, "DATA.BATCH_SIZE_VAL=31", "--output", "large")
    assert outcome.code == 3
    assert "DATA.BATCH_SIZE_VAL" in outcome.err
    assert "DATA.AUTOBATCH.ENABLED_VAL" in outcome.err
    assert not (tmp_path / "large.json").exists()


@pytest.mark.e2e
def test_a_size_that_autobatch_finds_evaluates_as_the_same_size_set_by_hand(run, birds, tmp_path):
    write_images(tmp_path / "many", FOLDERS, 10)
    evaluate = [*EVALUATE, "DATA.DATASET.ROOT=many", "DATA.DATASET.VAL=.", "--output"]
    outcome = run(*evaluate, "found", "DATA.AUTOBATCH.ENABLED_VAL=True")
    assert outcome.code == 0, outcome.err
    found = content_of(tmp_path / "found.json")
    assert found["settings"]["batch_size_val"] == 30
    assert run(*evaluate, "set", "DATA.BATCH_SIZE_VAL=30").code == 0
    by_hand = content_of(tmp_path / "set.json")
    for name in ("metrics", "levels", "classes", "settings"):
        assert by_hand[name] == found[name]


def test_a_run_without_classes_has_a_loss(run, tmp_path):
    nodes = {
        "DATA.DATASET": "tests.cli.tiny.Pairs",
        "LOSS": "torch.nn.MSELoss",
        "MODEL": "torch.nn.Linear",
    }
    targets = [f"{node}._target_={name}" for node, name in nodes.items()]
    assert run(*TINY, *targets, "MODEL.in_features=3", "MODEL.out_features=3").code == 0
    outcome = run(*EVALUATE, "--checkpoint", "last")
    assert outcome.code == 0, outcome.err
    found = content_of(tmp_path / "runs/tiny/evaluations/last.json")
    assert found["metrics"] == logged(tmp_path / "runs/tiny")
    assert (found["logged"], found["levels"], found["classes"]) == (found["metrics"], {}, [])


@pytest.mark.parametrize(
    ("own", "typed", "kept"),
    [
        ("NAME: imagefolder", ["DATA.DATASET.NAME=imagefolder", "DATA.DATASET.ROOT=new"], True),
        ("NAME: imagefolder", ["DATA.DATASET.NAME=manifest"], False),
        (
            "_target_: own.Birds",
            ["DATA.DATASET._target_=own.Birds", "DATA.DATASET.year=2026"],
            True,
        ),
        ("_target_: own.Birds", ["DATA.DATASET._target_=own.Other"], False),
    ],
)
def test_a_dataset_of_another_kind_begins_with_the_defaults(
    tmp_path, monkeypatch, own, typed, kept
):
    argument = "TRAIN: mine.csv" if own.startswith("NAME") else "region: north"
    (tmp_path / "runs/tiny/checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/tiny/config.yaml").write_text(f"DATA: {{DATASET: {{{own}, {argument}}}}}\n")
    assert (argument in read(["runs/tiny", *typed, "--print-config"])) == kept


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_samples_are_listed_the_worst_first(run, birds, tmp_path, ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    outcome = run(*EVALUATE, "--checkpoint", "last", "--samples", f"new/s.{ending}")
    assert outcome.code == 0, outcome.err
    read_table = pd.read_csv if ending == "csv" else pd.read_parquet
    found, table = content_of(birds / "evaluations/last.json"), read_table(f"new/s.{ending}")
    assert len(table) == found["data"]["samples"] == table["path"].nunique()
    for level in ("level1", "level2"):
        is_right = table[level] == table[f"{level}_predicted"]
        assert is_right.mean() == pytest.approx(found["metrics"][f"top1/{level}"])
        assert table[f"{level}_probability"].between(0, 1).all()
    assert [Path(path).parent.name for path in table["path"]] == [*table["level2"]]
    assert table["loss"].is_monotonic_decreasing
    losses = [level["cross_entropy"] for level in found["levels"].values()]
    assert table["loss"].mean() == pytest.approx(sum(losses) / 2)
    assert (tmp_path / "new/worst.png").stat().st_size > 1000


def test_samples_are_for_image_files(run, tmp_path):
    points = ("DATA.DATASET._target_=tests.cli.tiny.Points", "MODEL.width=4")
    assert run(*TINY, *points, "MODEL._target_=tests.cli.tiny.Perceptron").code == 0
    outcome = run(*EVALUATE, "--samples", "s.csv")
    assert (outcome.code, "--samples" in outcome.err) == (2, True)
    assert not (tmp_path / "s.csv").exists()


def test_a_worst_sample_is_drawn_as_the_model_reads_it(tmp_path):
    """A photograph that is to be turned is higher than wide."""
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (90, 30), "blue").save(tmp_path / "a.jpg", exif=turned)
    row = {"path": str(tmp_path / "a.jpg"), "class": "cat"}
    table = pd.DataFrame([row | {"class_predicted": "dog", "class_probability": 0.9}])
    sheet = write_samples(table, ONE_LEVEL, spec_of().preprocessing, tmp_path / "samples.csv")
    pixels = np.asarray(Image.open(sheet)).astype(int)
    rows, columns = np.where((pixels[..., 2] > 200) & (pixels[..., 0] < 60))
    assert np.ptp(rows) > 2 * np.ptp(columns) > 0
