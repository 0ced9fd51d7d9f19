import re
from functools import partial
from pathlib import Path

import numpy as np
import torch

from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig
from linnaeus.data.batch import Batch, batch_size
from linnaeus.data.datasets import build_data
from linnaeus.data.image import load_image
from linnaeus.data.mixing import DeviceTransform, Mixing, mixed_epochs
from linnaeus.data.sampler import ClassSampler
from linnaeus.data.taxonomy import Level, Taxonomy, index_labels
from linnaeus.data.transforms import Preprocessing, build_transforms
from linnaeus.data.user_dataset import UserDataset
from linnaeus.inference.evaluation_data import (
    EvaluationRequest,
    build_evaluation_data,
)
from tests.helpers import datasets
from tests.helpers.children import ROOT
from tests.helpers.datasets import write_image
from tests.helpers.messages import error_and_code_of


def build(augment=None, **dataset):
    """The data of a node; keys in capitals are those of the built-in datasets."""
    skips = dataset.pop("skip", False)
    node = dataset if "_target_" in dataset else DatasetConfig(**dataset)
    bad = "skip" if skips else "raise"
    config = DataConfig(
        DATASET=node, IMG_SIZE=16, ON_BAD_IMAGE=bad, AUGMENT=augment or AugmentConfig()
    )
    return build_data(config, seed=0)


def touch(paths):
    for path in paths.split():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()


CLASSES = ("A/cat", "A/dog", "Plants/oak", "Plants/elm")


def folders(more="", classes=CLASSES, **dataset):
    """Class folders of four empty files below `images`, and more files."""
    touch(" ".join(f"images/{name}/{i}.jpg" for name in classes for i in range(4)))
    touch(more)
    return build(**{"NAME": "imagefolder", "ROOT": "images", **dataset})


FOLDERS = {
    "no root": lambda: folders(ROOT=None),
    "root is misspelled": lambda: folders(ROOT="image"),
    "root is a file": lambda: folders(ROOT="images/A/cat/0.jpg"),
    "root is empty": lambda: folders("empty/notes.txt", ROOT="empty"),
    "val is misspelled": lambda: folders(TRAIN=".", VAL="plants"),
    "val without train": lambda: folders(VAL="Plants"),
    "one class too deep": lambda: folders("images/A/cat/white/0.jpg"),
    "an image outside": lambda: folders("images/0.jpg"),
    "a class without image": lambda: folders("images/Plants/ash/notes.txt"),
    "one class below": lambda: folders(classes=CLASSES[:1]),
    "one class": lambda: folders(classes=("cat",)),
    "number of levels": lambda: folders(LEVELS=["species"]),
    "channels": lambda: load_image(write_image(Path("photo.png")), 4),
    "channels of an array": lambda: load_image(array(5, 8, 9), 4),
    "two axes of channels": lambda: load_image(array(4, 8, 4), 4),
    "policy of colors": lambda: build_transforms(AugmentConfig(POLICY="randaugment"), (8, 8), 4),
    "hue of grey": lambda: build_transforms(AugmentConfig(HUE=0.1), (8, 8), 1),
    "unknown classes of val": lambda: folders(
        "images/val/A/oak/0.jpg images/val/F/x/0.jpg", tuple(f"train/{n}" for n in CLASSES)
    ),
    "too few": lambda: [touch("few/a/0.jpg few/b/0.jpg"), build(NAME="imagefolder", ROOT="few")],
    "nothing but damage": lambda: folders(skip=True),
    "damaged image": lambda: folders().train[0],
}


def array(*shape):
    np.save("array.npy", np.zeros(shape, np.uint8))
    return Path("array.npy")


def manifest(text, **dataset):
    touch("img/0.jpg img/1.jpg")
    for name, content in {"train.csv": text, "val.csv": dataset.pop("val", None)}.items():
        if content is not None:
            Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return build(**{"NAME": "manifest", "ROOT": ".", **dataset})


ROWS = "image,kingdom,species\nimg/0.jpg,Animalia,cat\nimg/1.jpg,Plantae,oak\n"
TABLES = {
    "empty": "\n\n",
    "no row": "image,species\n",
    "no labels": "image\nimg/0.jpg\n",
    "no image column": "photo,a\nimg/0.jpg,x\n",
    "a column twice": "image,a,a\nimg/0.jpg,x,y\n",
    "too many cells": "image,a\nimg/0.jpg,x\n\nimg/1.jpg,y,z\n",
    "no path": "image,a\nimg/0.jpg,x\n,y\n",
    "broken": 'image,a\nimg/0.jpg,"x\n',
    "encoding": b"image,a\nimg/0.jpg,f\xe9e\n",
    "no class": "image,a\nimg/0.jpg,\nimg/1.jpg,\n",
    "values of a split": "image,a,split\nimg/0.jpg,x,0\nimg/1.jpg,y,1\n",
    "flags": "image,age,a,b\nimg/0.jpg,3,0,1\nimg/1.jpg,4,0,0\n",
    "images": f"image,a\n{'7 ' * 200},x\n",
    "fine to coarse": "image,b,a\nimg/0.jpg,cat,A\nimg/1.jpg,dog,A\nimg/1.jpg,oak,P\n",
}
MANIFESTS = {title: partial(manifest, text) for title, text in TABLES.items()} | {
    "no image": lambda: manifest("image,a\n0.jpg,x\n", val="image,a\n1.jpg,x\n"),
    "misspelled level": lambda: manifest(ROWS, LEVELS=["specie"]),
    "the image as a level": lambda: manifest(ROWS, LEVELS=["image"]),
    "unknown class of val": lambda: manifest(
        ROWS, val="image,kingdom,species\nimg/0.jpg,Plantae,oak\nimg/1.jpg,Plantae,elm\n"
    ),
    "val column": lambda: manifest(ROWS, val="image,kingdom\nimg/0.jpg,Plantae\n"),
    "none": lambda: build(NAME="manifest"),
}


def target(name, augment=None, **node):
    return build(augment, _target_=name if "." in name else f"{datasets.__name__}.{name}", **node)


def sample_of(value):
    return target("Samples", taxonomy={"coarse": 2, "fine": 3}, targets=value)


def synthetic(*num_classes, **options):
    return build(NAME="synthetic", NUM_CLASSES=list(num_classes), **options)


ALBA = [("Ficus", "alba"), ("Populus", "alba")]
MIXED = AugmentConfig(CUTMIX=0.5)
OWN = {
    "no attribute": lambda: target("Missing"),
    "no split": lambda: target("Strange"),
    "fails at once": lambda: target("failing_at_once"),
    "argument unknown": lambda: target("TorchvisionStyle", root="", extra=1),
    "no length": lambda: target("Stream"),
    "no sample": lambda: target("Samples", length=0),
    "no pair": lambda: target("single_items"),
    "one class": lambda: target("Samples", num_classes=1),
    "classes": lambda: target("Samples", classes="abc"),
    "taxonomy": lambda: target("Samples", taxonomy=5),
    "other classes of val": lambda: target("different_classes"),
    "collate_fn": lambda: target("wrong_collate"),
    "label too large": lambda: sample_of((1, 3)),
    "too few labels": lambda: sample_of((1,)),
    "level": lambda: sample_of({"genus": 1}),
    "number of targets": lambda: (
        UserDataset(
            datasets.Samples("train", [0, 1]),
            "Own",
            Taxonomy((Level("class", ("0", "1")),)),
            raw=False,
        ).targets
    ),
    "mixing without classes": lambda: target("Samples", MIXED),
    "mixing vectors": lambda: target("Samples", MIXED, num_classes=2, shape=[8]),
    "mixing other targets": lambda: DeviceTransform(mixing=Mixing([2, 3], MIXED)).choose(
        Batch(torch.rand(5, 3, 8, 8), torch.rand(5, 2))
    ),
    "no epoch to mix": lambda: mixed_epochs(AugmentConfig(MIXUP=0.1, MIX_OFF_EPOCHS=3), 3),
    "statistics": lambda: synthetic(2, augment=AugmentConfig(MEAN=[0.5] * 2)),
    "labels to balance": lambda: ClassSampler(torch.full((4, 2), -1), seed=0),
    "classes of synthetic": lambda: synthetic(10, 5),
    "levels of synthetic": lambda: synthetic(2, 4, LEVELS=["a"]),
    "unknown in part": lambda: synthetic(4, UNKNOWN_FRACTION=0.5),
    "no tensor in a batch": lambda: batch_size(Batch({"a": 1}, 3)),
    "a name under several parents": lambda: index_labels(
        ["genus", "species"], [*ALBA, (None, "alba")]
    ),
}

NESTED = index_labels(["family", "species"], [("cats", "lion"), ("dogs", "fox"), ("dogs", "wolf")])
FLAT = index_labels(["species"], [("fox",), ("lion",), ("wolf",)])
PREPROCESSING = Preprocessing(3, (8, 8), 1.0, (0.5,) * 3, (0.5,) * 3)


def evaluation(index, rows, *, own=False, **dataset):
    """Data of a manifest for the evaluation of a run; blanks stand between the rows."""
    touch("1.png")
    Path("test.csv").write_text(rows.replace(" ", "\n1.png,"))
    names = {"NAME": "manifest", "TRAIN": "test.csv", "VAL": "test.csv"}
    config = DataConfig(DATASET=DatasetConfig(**names | dataset))
    return build_evaluation_data(EvaluationRequest(config, index, PREPROCESSING, 0, own))


def users(index, classes):
    node = {"_target_": f"{datasets.__name__}.Samples", "classes": classes}
    return build_evaluation_data(EvaluationRequest(DataConfig(DATASET=node), index, None, 0, False))


def of_name(name, index, preprocessing):
    config = DataConfig(DATASET=DatasetConfig(NAME=name))
    return build_evaluation_data(EvaluationRequest(config, index, preprocessing, 0, True))


EVALUATIONS = {
    "no column with labels": lambda: evaluation(NESTED, "image,order dogs"),
    "unknown classes": lambda: evaluation(
        NESTED, "image,family,species dogs,wolf dogs,jackal bears,panda dogs,jackal"
    ),
    "other classes now": lambda: evaluation(
        NESTED, "image,family,species" + " cats,lion dogs,fox" * 5, own=True, VAL=None
    ),
    "a run on tensors": lambda: of_name("manifest", NESTED, None),
    "unknown classes of a dataset": lambda: users(FLAT, ["wolf", "dodo", "fox"]),
    "a run without classes": lambda: users(None, ["wolf", "fox"]),
    "built-in data": lambda: of_name("synthetic", FLAT, PREPROCESSING),
}

KINDS = {"folders": FOLDERS, "manifest": MANIFESTS, "own": OWN, "evaluation": EVALUATIONS}
MISTAKES = {
    f"{kind}: {title}": case for kind, cases in KINDS.items() for title, case in cases.items()
}
"""By a title: what raises an error."""


def test_messages(golden, tmp_path, monkeypatch):
    found = {}
    for number, (title, mistake) in enumerate(MISTAKES.items()):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        found[title] = re.sub(r"\.py, line \d+", ".py, line N", error_and_code_of(mistake))
    golden("data", found, root=ROOT, folder=tmp_path)
