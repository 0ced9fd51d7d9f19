"""Data of an evaluation: labels are those of the run, whatever classes, order and levels the data has."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from linnaeus.config.schema import AugmentConfig, DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.data.split_file import save_split
from linnaeus.data.taxonomy import LabelIndex, index_labels
from linnaeus.data.transforms import Preprocessing
from linnaeus.inference.evaluation_data import (
    EvaluationRequest,
    build_evaluation_data,
)
from linnaeus.runtime.errors import ConfigError, DataError
from tests.helpers.datasets import write_image

PREPROCESSING = Preprocessing(3, (8, 8), 1.0, (0.5,) * 3, (0.5,) * 3)
NESTED = index_labels(
    ["family", "species"], [("cats", "lion"), ("cats", "lynx"), ("dogs", "fox"), ("dogs", "wolf")]
)
FLAT = index_labels(["species"], [("fox",), ("lion",), ("lynx",), ("wolf",)])


def files(root, *paths):
    """Empty files, as these tests read no image."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def build(index, *, own=False, skip=False, **dataset):
    config = DataConfig(DATASET=DatasetConfig(**dataset))
    return build_evaluation_data(EvaluationRequest(config, index, PREPROCESSING, 0, own, skip))


def labels(data):
    targets = data.bundle.val
    found = targets.targets.tolist()
    return found


def test_a_manifest_with_images_that_are_not_there_is_refused(tmp_path):
    files(tmp_path, "1.png", "2.png")
    manifest = tmp_path / "val.csv"
    manifest.write_text("image,species\n1.png,fox\n2.png,wolf\n")
    options = {"NAME": "manifest", "TRAIN": str(manifest), "VAL": str(manifest)}
    assert labels(build(FLAT, **options)) == [[0], [3]]
    (tmp_path / "2.png").unlink()
    with pytest.raises(DataError, match=r"2\.png"):
        build(FLAT, **options)


def refuse_to_run():
    raise AssertionError("an evaluation needs no training transform")


def test_an_evaluation_calls_no_training_transform():
    augment = AugmentConfig(TRAIN=[{"_target_": f"{__name__}.refuse_to_run"}])
    config = DataConfig(DATASET=DatasetConfig(), AUGMENT=augment)
    with pytest.raises(ConfigError, match=r"DATA\.AUGMENT\.TRAIN\.0.*refuse_to_run"):
        build_data(config, seed=0)
    index = LabelIndex.of(build_data(DataConfig(), seed=0).taxonomy)
    preprocessing = Preprocessing(1, (32, 32), 1.0, (0.5,), (0.5,))
    assert labels(build_evaluation_data(EvaluationRequest(config, index, preprocessing, 0, True)))


def test_default_names_of_levels_may_be_those_of_an_older_version():
    options = {"NAME": "synthetic", "NUM_CLASSES": [2, 4], "NUM_SAMPLES_VAL": 4}
    dataset = DatasetConfig(**options, LEVELS=["rank1", "rank2"])
    taxonomy = build_data(DataConfig(DATASET=dataset, IMG_SIZE=8), seed=0).taxonomy
    index = LabelIndex.of(taxonomy)
    assert labels(build(index, own=True, **options)) == [[0, 0], [0, 1], [1, 2], [1, 3]]
    with pytest.raises(DataError):
        build(index, **options)


@pytest.mark.parametrize(
    ("index", "paths", "expected"),
    [
        (NESTED, ["dogs/wolf/1.png", "cats/lynx/1.png"], [[0, 1], [1, 3]]),
        (NESTED, ["wolf/1.png", "fox/1.png"], [[1, 2], [1, 3]]),
        (FLAT, ["dogs/wolf/1.png", "cats/lynx/1.png"], [[2], [3]]),
        (FLAT, ["canids/dogs/wolf/1.png"], [[3]]),
    ],
)
def test_folders_are_matched_from_the_finest_level(tmp_path, index, paths, expected):
    """Coarse levels that are not there follow from the class below them."""
    data = build(index, NAME="imagefolder", ROOT=str(files(tmp_path, *paths)))
    assert labels(data) == expected
    assert data.bundle.index is index
    assert data.part in data.bundle.report[0]


@pytest.mark.parametrize(
    ("paths", "own", "expected"),
    [
        (["train/cats/lion/1.png", "val/dogs/fox/1.png", "test/dogs/wolf/1.png"], False, [[1, 2]]),
        (["train/cats/lion/1.png", "test/dogs/wolf/1.png"], False, [[1, 3]]),
        (["test/dogs/wolf/1.png"], False, [[1, 3]]),
        (["val/dogs/fox/1.png"], True, [[1, 2]]),
        (["train/cats/lion/1.png"], False, [[0, 0]]),
    ],
)
def test_the_split_that_is_evaluated(tmp_path, paths, own, expected):
    data = build(NESTED, own=own, NAME="imagefolder", ROOT=str(files(tmp_path, *paths)))
    assert labels(data) == expected


def test_what_is_not_read_is_noted(tmp_path):
    (tmp_path / "val.csv").write_text("image,species\n1.png,fox\n1.png,nan\n")
    files(tmp_path, "1.png")
    data = build(FLAT, NAME="manifest", VAL=str(tmp_path / "val.csv"))
    assert any("1 'nan'" in line for line in data.bundle.report)
    root = files(tmp_path / "images", "train/fox/1.png", "val/fox/1.png", "more/fox/1.png")
    files(root, "val/fox/notes.txt")
    report = build(FLAT, NAME="imagefolder", ROOT=str(root)).bundle.report
    assert any("more" in line for line in report)
    assert any(".txt 1" in line for line in report)


@pytest.mark.parametrize("bad", ["raise", "skip"])
def test_images_of_the_runs_split_that_are_gone(tmp_path, bad):
    """They are an error at the start, or left out; where all are gone, the dataset is read instead."""
    for i in range(8):
        write_image(
            tmp_path / "images" / f"{('fox', 'lion', 'lynx', 'wolf')[i % 4]}/{i}.png", seed=i
        )
    config = DataConfig(
        DATASET=DatasetConfig(NAME="imagefolder", ROOT=str(tmp_path / "images"), VAL_FRACTION=0.5),
        ON_BAD_IMAGE=bad,
    )
    bundle = build_data(config, seed=0)
    held_out = bundle.val.files
    save_split(bundle, tmp_path / "split.csv")
    request = EvaluationRequest(
        config, bundle.index, PREPROCESSING, 0, True, split_file=tmp_path / "split.csv"
    )
    assert len(labels(build_evaluation_data(request))) == len(held_out) == 4
    Path(held_out[0]).unlink()
    if bad == "skip":
        assert len(labels(build_evaluation_data(request))) == 3
    else:
        with pytest.raises(DataError, match="1 of 4 images not found"):
            build_evaluation_data(request)


def write_table(folder, header, rows, name="test.csv"):
    files(folder, "1.png")
    (folder / name).write_text("\n".join([header, *(f"1.png,{row}" for row in rows)]))
    return str(folder / name)


@pytest.mark.parametrize(
    ("header", "rows", "levels", "expected"),
    [
        ("image,species,family", ["wolf,dogs", ",cats", "lynx,"], None, [[1, 3], [0, -1], [-1, 1]]),
        ("image,species", ["wolf", ""], None, [[1, 3], [-1, -1]]),
        ("image,family", ["dogs"], None, [[1, -1]]),
        ("image,species", ["wolf"], ["family", "species"], [[1, 3]]),
        ("image,species", ["wolf"], ["order", "family", "species"], [[1, 3]]),
        ("image,a,b", ["dogs,fox"], ["a", "b"], [[1, 2]]),
    ],
)
def test_columns_are_matched_by_name(tmp_path, header, rows, levels, expected):
    """An empty cell is unknown; a column that is not there follows from the one below it."""
    path = write_table(tmp_path, header, rows)
    assert labels(build(NESTED, NAME="manifest", VAL=path, LEVELS=levels)) == expected


def test_unknown_classes_are_left_out_when_asked(tmp_path):
    rows = ["dogs,wolf", "dogs,jackal", "bears,panda", "dogs,jackal"]
    path = write_table(tmp_path, "image,family,species", rows)
    data = build(NESTED, skip=True, NAME="manifest", VAL=path)
    assert (labels(data), data.num_left_out) == ([[1, 3]], 3)
    path = write_table(tmp_path, "image,family,species", rows[1:3])
    with pytest.raises(DataError, match="jackal"):
        build(NESTED, skip=True, NAME="manifest", VAL=path)


class Named(Dataset[Any]):
    """A user's dataset: sample i has the class i."""

    def __init__(self, split, classes):
        assert split == "val", "the training split is not needed"
        self.taxonomy = classes

    def __len__(self):
        return len(next(iter(self.taxonomy.values())))

    def __getitem__(self, index):
        return 0.0, index


def user_data(index, classes):
    config = DataConfig(DATASET={"_target_": f"{__name__}.Named", "classes": classes})
    return build_evaluation_data(EvaluationRequest(config, index, None, 0, False))


def test_a_users_dataset_needs_the_classes_of_the_run_in_their_order():
    classes = ["fox", "lion", "lynx", "wolf"]
    dataset = user_data(FLAT, {"species": classes}).bundle.val
    assert [dataset[i][1].tolist() for i in range(len(dataset))] == [[0], [1], [2], [3]]
    for index, other in (
        (FLAT, {"species": ["wolf", "fox"]}),
        (FLAT, {"species": classes[::-1]}),
        (FLAT, {"genus": classes}),
        (NESTED, {"species": classes}),
        (None, {"species": classes}),
    ):
        with pytest.raises(DataError, match="Named"):
            user_data(index, other)
