"""Whole runs through the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from tests.helpers.runs import SMALL, Run, assert_same_bits, weights

AUTOBATCH = ("DATA.AUTOBATCH.ENABLED", "True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=24")


def write_images(root: Path, folders: list[str], count: int) -> list[Path]:
    """Real JPEG files, one colour per folder, with noise on it."""
    generator = np.random.default_rng(0)
    paths = []
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        for index in range(count):
            colour = generator.integers(0, 40, (40, 48, 3)) + 200 * np.eye(3)[number % 3]
            path = root / folder / f"{index}.jpg"
            Image.fromarray(colour.astype(np.uint8)).save(path)
            paths.append(path)
    return paths


def metrics_of(folder: Path, split: str) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]


def test_files_of_a_run(run: Run, tmp_path: Path) -> None:
    outcome = run(*SMALL, *AUTOBATCH)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "runs" / "small"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.yaml", "model.json", "autobatch.json", "metrics.jsonl", "result.json", "checkpoints", "logs",
    }  # fmt: skip
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last.pt", "previous.pt", "best.pt"}

    found = json.loads((folder / "autobatch.json").read_text())
    assert found.keys() == {"train", "val", "environment"}
    train = found["train"]
    assert (train["batch_size"], train["limited_by"], train["certified"]) == (24, "max_batch_size", True)
    assert found["val"]["limited_by"] == "dataset"
    assert found["val"]["batch_size"] == 31
    assert all(trial["status"] == "fits" for trial in train["trials"])
    assert 0 < train["trials"][0]["peak_bytes"] <= train["budget_bytes"] <= train["total_bytes"]

    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["DATA"]["BATCH_SIZE"], config["DATA"]["BATCH_SIZE_VAL"]) == (24, 31)
    assert len(metrics_of(folder, "val")) == 2
    assert [record["step"] for record in metrics_of(folder, "train")] == [4, 8]
    result = json.loads((folder / "result.json").read_text())
    last = metrics_of(folder, "val")[-1]
    assert result["metrics"] == {name: last[name] for name in result["metrics"]}
    assert (result["headline"], result["effective_batch"], result["world_size"]) == ("top1/rank2", 24, 1)
    assert result["training_s"] * result["images_per_s"] == pytest.approx(2 * 96, rel=0.05)
    for text in ("batch sizes: training 24, validation 31", "top1/", "images/s", str(folder)):
        assert text in outcome.out


def test_autobatch_trains_as_with_the_size_set_by_hand(run: Run, tmp_path: Path) -> None:
    digits = (
        "MODEL.NAME=test_resnet", "TRAIN.EPOCHS=1", "TRAIN.EMA.ENABLED=True", "MODEL.DROP_RATE=0.1",
        "DATA.AUGMENT.ROTATION=10", "EXPERIMENT.DEVICE=cpu", "DATA.IMG_SIZE=16",
        "DATA.DATASET.VAL_FRACTION=0.7",
    )  # fmt: skip
    assert run(*digits, *AUTOBATCH, "EXPERIMENT.NAME=found").code == 0
    found = json.loads((tmp_path / "runs/found/autobatch.json").read_text())
    sizes = [
        f"DATA.BATCH_SIZE={found['train']['batch_size']}",
        f"DATA.BATCH_SIZE_VAL={found['val']['batch_size']}",
    ]
    assert run(*digits, *sizes, "EXPERIMENT.NAME=by_hand").code == 0
    for name in ("last.pt", "best.pt"):
        assert_same_bits(weights(tmp_path / "runs/found", name), weights(tmp_path / "runs/by_hand", name))
    assert [r["loss"] for r in metrics_of(tmp_path / "runs/found", "val")] == [
        r["loss"] for r in metrics_of(tmp_path / "runs/by_hand", "val")
    ]


def test_saved_configuration_repeats_the_run(run: Run, tmp_path: Path) -> None:
    assert run(*SMALL, *AUTOBATCH).code == 0
    saved = tmp_path / "runs/small/config.yaml"
    again = run("--cfg", str(saved), "DATA.AUTOBATCH.ENABLED=False", "EXPERIMENT.NAME=again")
    assert again.code == 0, again.err
    assert_same_bits(weights(tmp_path / "runs/small"), weights(tmp_path / "runs/again"))


def test_a_run_of_the_same_name_is_kept(run: Run, tmp_path: Path) -> None:
    assert run(*SMALL, "TRAIN.EPOCHS=1").code == 0
    first = (tmp_path / "runs/small/metrics.jsonl").read_text()
    assert run(*SMALL, "TRAIN.EPOCHS=1").code == 0
    assert (tmp_path / "runs/small.1/metrics.jsonl").read_text() == first


@pytest.mark.slow
def test_folders_of_jpeg_files(run: Run, tmp_path: Path) -> None:
    write_images(tmp_path / "images", ["warm/red", "cold/green", "cold/blue"], 12)
    outcome = run(
        *SMALL, "DATA.DATASET.NAME=imagefolder", "DATA.DATASET.ROOT", str(tmp_path / "images"),
        "DATA.NUM_WORKERS=2", "TRAIN.EPOCHS=6", "OPTIMIZER.LR=0.01", "DATA.BATCH_SIZE=8", *AUTOBATCH[:2],
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    last = metrics_of(tmp_path / "runs/small", "val")[-1]
    top1 = [value for name, value in last.items() if name.startswith("top1/")]
    assert len(top1) == 2
    assert "consistent" in last


def test_manifest_with_unknown_labels(run: Run, tmp_path: Path) -> None:
    paths = write_images(tmp_path / "images", ["a", "b", "c"], 10)
    coarse = {"a": "ab", "b": "ab", "c": "c"}
    for split, chosen in (("train", slice(0, 8)), ("val", slice(8, 10))):
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "group", "kind"])
            for number, folder in enumerate("abc"):
                for index, path in enumerate(paths[number * 10 : number * 10 + 10][chosen]):
                    writer.writerow([path, coarse[folder], "" if index == 0 else folder])
    outcome = run(
        *SMALL, "DATA.DATASET.NAME=manifest", "DATA.DATASET.ROOT", str(tmp_path), "DATA.BATCH_SIZE=8"
    )
    assert outcome.code == 0, outcome.err
    last = metrics_of(tmp_path / "runs/small", "val")[-1]
    assert {"top1/group", "top1/kind"} <= last.keys()


class Points(Dataset[tuple[torch.Tensor, int]]):
    """A user's dataset: points in the plane, labelled by their quadrant."""

    classes = ("I", "II", "III", "IV")

    def __init__(self, split: str, length: int = 64) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.points = torch.randn(length, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x, y = (self.points[index] > 0).long().tolist()
        return self.points[index], 2 * x + y


class Perceptron(nn.Sequential):
    """A user's model: takes what the framework offers by name."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, num_classes))


class Forecast(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A user's dataset without classes."""

    def __init__(self, split: str) -> None:
        self.x = torch.linspace(-1, 1, 64)[:, None]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], 3 * self.x[index]


def test_own_dataset_and_model(run: Run, tmp_path: Path) -> None:
    outcome = run(
        "DATA.DATASET._target_=tests.test_run.Points", "DATA.DATASET.length=200", "EXPERIMENT.DEVICE=cpu",
        "MODEL._target_=tests.test_run.Perceptron", "MODEL.width=32", "TRAIN.EPOCHS=20", "OPTIMIZER.LR=0.05",
        "EXPERIMENT.NAME=own", *AUTOBATCH,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert metrics_of(tmp_path / "runs/own", "val")[-1]["top1/class"] > 0.9


def test_own_everything(run: Run, tmp_path: Path) -> None:
    outcome = run(
        "DATA.DATASET._target_=tests.test_run.Forecast", "EXPERIMENT.NAME=own", "EXPERIMENT.DEVICE=cpu",
        "MODEL._target_=torch.nn.Linear", "MODEL.in_features=1", "MODEL.out_features=1",
        "LOSS._target_=torch.nn.MSELoss", "OPTIMIZER._target_=torch.optim.SGD", "OPTIMIZER.lr=0.1",
        "TRAIN.CLIP_GRAD_NORM=None", "TRAIN.EPOCHS=40", *AUTOBATCH,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    first, *_, last = metrics_of(tmp_path / "runs/own", "val")
    assert last["loss"] < first["loss"] / 10


def test_grey_photographs_with_the_preset(run: Run, tmp_path: Path) -> None:
    """A flat folder of grey images needs nothing but its path and the number of channels."""
    for name in ("cats", "dogs"):
        (tmp_path / "grey" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (40, 30), 10 * number).save(tmp_path / "grey" / name / f"{number}.png")
    outcome = run(
        "data=imagefolder", "DATA.DATASET.ROOT=grey", "DATA.DATASET.CHANNELS", "1", "DATA.IMG_SIZE=32",
        "MODEL.NAME=test_resnet", "DATA.BATCH_SIZE=4", "TRAIN.EPOCHS=1", "EXPERIMENT.DEVICE=cpu",
        "LOSS._target_=torch.nn.CrossEntropyLoss", "LOSS.weight=[1,3]",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "workers" not in outcome.out + outcome.err


@pytest.mark.slow
def test_a_loss_of_torch_with_class_weights(run: Run, tmp_path: Path) -> None:
    outcome = run(
        *SMALL, "DATA.DATASET.NUM_CLASSES=[3]", "LOSS._target_=torch.nn.CrossEntropyLoss",
        "LOSS.weight=[1.0,2,0.5]", "TRAIN.ACCUMULATION_STEPS=2", *AUTOBATCH,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    again = run(*SMALL, "LOSS._target_=torch.nn.CrossEntropyLoss", "TRAIN.AUTO_RESUME=True")
    assert again.code == 2
    assert "one taxonomic rank, but there are 2" in again.err
    assert "did you mean LOSS.weight" in run(*SMALL, "LOSS._target_=torch.nn.NLLLoss", "LOSS.WEIGHT=[1]").err


@pytest.mark.parametrize(
    "options",
    [
        ["TRAIN.AMP=bf16", "TRAIN.CHANNELS_LAST=True"],
        ["TRAIN.GRADIENT_CHECKPOINTING=True", "TRAIN.ACCUMULATION_STEPS=4"],
        ["TRAIN.EMA.ENABLED=True", "OPTIMIZER.NAME=sgd", "SCHEDULE.NAME=linear"],
        pytest.param(
            [
                "TRAIN.CLIP_GRAD_NORM=None",
                "OPTIMIZER.NAME=lamb",
                "SCHEDULE.NAME=constant",
                "TRAIN.DETERMINISTIC=True",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                "MODEL.NAME=test_vit",
                "MODEL.DROP_PATH_RATE=0.1",
                "LOSS.LABEL_SMOOTHING=0.1",
                "LOSS.RANK_WEIGHTS=[1,2]",
            ],
            marks=pytest.mark.slow,
        ),
        ["DATA.DATASET.CHANNELS=1", "DATA.IMG_SIZE=[32,48]", "DATA.NUM_WORKERS=1"],
    ],
)
def test_switches(run: Run, options: list[str]) -> None:
    outcome = run(*SMALL, "TRAIN.EPOCHS=1", *options, *AUTOBATCH)
    assert outcome.code == 0, outcome.err


BAD = [
    (["DATA.BATCHSIZE", "3"], 2, ["DATA.BATCHSIZE", "DATA.BATCH_SIZE"]),
    (["DATA.BATCH_SIZE"], 2, ["DATA.BATCH_SIZE"]),
    (["DATA.BATCH_SIZE", "many"], 2, ["DATA.BATCH_SIZE", "many"]),
    (["+DATA.FOO=1"], 2, ["DATA.FOO"]),
    (["--cfg", "nowhere.yaml"], 2, ["nowhere.yaml"]),
    (["--cfg", "broken.yaml"], 2, ["broken.yaml"]),
    (["MODEL.NAME", "resnet5O"], 2, ["MODEL.NAME", "resnet5O", "resnet50"]),
    (["OPTIMIZER.NAME", "momentun"], 2, ["OPTIMIZER.NAME", "momentum"]),
    (["EXPERIMENT.OUTPUT_DIR", "/proc/nowhere"], 2, ["EXPERIMENT.OUTPUT_DIR", "/proc/nowhere"]),
    (["EXPERIMENT.OUTPUT_DIR", "broken.yaml"], 2, ["EXPERIMENT.OUTPUT_DIR", "broken.yaml"]),
    (["EXPERIMENT.DEVICE", "cuda:99"], 2, ["EXPERIMENT.DEVICE", "cuda:99"]),
    (["EXPERIMENT.DEVICE", "gpu"], 2, ["EXPERIMENT.DEVICE", "gpu"]),
    (
        ["DATA.AUTOBATCH.MIN_BATCH_SIZE=9", "DATA.AUTOBATCH.MAX_BATCH_SIZE=8"],
        2,
        ["DATA.AUTOBATCH.MIN_BATCH_SIZE", "9", "DATA.AUTOBATCH.MAX_BATCH_SIZE", "8"],
    ),
    (["DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=0"], 2, ["DATA.AUTOBATCH.TARGET_MEMORY_FRACTION"]),
    (["DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=1.5"], 2, ["DATA.AUTOBATCH.TARGET_MEMORY_FRACTION", "1.5"]),
    (["DATA.DATASET.NAME=imagefolder", "DATA.DATASET.ROOT=empty"], 1, ["empty"]),
    (["DATA.DATASET.NAME=imagefolder", "DATA.DATASET.ROOT=missing"], 1, ["missing"]),
    (["DATA.DATASET.NAME=imagefolder", "DATA.DATASET.ROOT=images"], 1, ["images/b/broken.jpg"]),
    (["MODEL._target_=tests.test_run.Nothing"], 2, ["MODEL", "tests.test_run.Nothing"]),
    (["MODEL.WEIGHTS=nowhere.pt"], 2, ["MODEL.WEIGHTS", "nowhere.pt"]),
    (["LOSS.RANK_WEIGHTS=[1]"], 2, ["LOSS.RANK_WEIGHTS"]),
    (["OPTIMIZER.LR=1e9", "OPTIMIZER.NAME=sgd", "TRAIN.CLIP_GRAD_NORM=None"], 1, ["loss", "OPTIMIZER.LR"]),
]


@pytest.mark.parametrize(("argv", "code", "texts"), BAD, ids=[" ".join(argv) for argv, *_ in BAD])
def test_mistakes(run: Run, tmp_path: Path, argv: list[str], code: int, texts: list[str]) -> None:
    (tmp_path / "broken.yaml").write_text("DATA: [1,\n")
    (tmp_path / "empty").mkdir()
    write_images(tmp_path / "images", ["a", "b"], 4)
    (tmp_path / "images/b/broken.jpg").write_bytes((tmp_path / "images/b/0.jpg").read_bytes()[:300])
    outcome = run(*SMALL, *argv)
    assert outcome.code == code
    for text in texts:
        assert text in outcome.err
    assert "Traceback" not in outcome.err + outcome.out


def test_nothing_fits(run: Run) -> None:
    outcome = run(*SMALL, *AUTOBATCH, "DATA.AUTOBATCH.MEMORY_LIMIT_GB=0.05")
    assert outcome.code == 3
    told = (
        "no batch size fits",
        "Tried: ",
        "Budget 0.04 GiB",
        "80% of 0.05 GiB (DATA.AUTOBATCH.MEMORY_LIMIT_GB)",
    )
    for text in (*told, "What helps: raise DATA.AUTOBATCH.MEMORY_LIMIT_GB above "):
        assert text in outcome.err
    assert "raise DATA.AUTOBATCH.TARGET_MEMORY_FRACTION" not in outcome.err, "1.0 is not enough either"
    assert "Traceback" not in outcome.err


def test_damaged_images_can_be_left_out(run: Run, tmp_path: Path) -> None:
    write_images(tmp_path / "images", ["a", "b"], 8)
    (tmp_path / "images/b/broken.jpg").write_bytes(b"no image")
    root = ("DATA.DATASET.NAME=imagefolder", f"DATA.DATASET.ROOT={tmp_path / 'images'}", "DATA.BATCH_SIZE=4")
    outcome = run(*SMALL, *root, "DATA.ON_BAD_IMAGE", "skip", "TRAIN.EPOCHS=1")
    assert outcome.code == 0, outcome.err
    assert "broken.jpg" in outcome.out


def test_print_config_and_help(run: Run) -> None:
    printed = run(*SMALL, "--print-config")
    assert printed.code == 0
    assert yaml.safe_load(printed.out)["DATA"]["BATCH_SIZE"] == 16
    shown = run("--help")
    assert shown.code == 0
    assert "DATA" in shown.out


def test_a_model_with_too_few_outputs_is_refused(run: Run) -> None:
    outcome = run(
        "DATA.DATASET._target_=tests.test_run.Points", "MODEL._target_=torch.nn.Linear",
        "MODEL.in_features=2", "MODEL.out_features=3", "EXPERIMENT.DEVICE=cpu",
    )  # fmt: skip
    assert outcome.code == 2
    assert "[batch, 4]" in outcome.err
    assert "Traceback" not in outcome.err
