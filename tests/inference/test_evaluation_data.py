"""Data of an evaluation: labels are those of the run, whatever classes, order and levels the data has."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.data.split_file import save_split
from linnaeus.data.taxonomy import LabelIndex, index_labels
from linnaeus.data.transforms import Preprocessing
from linnaeus.inference.evaluation_data import EvaluationRequest, build_evaluation_data
from linnaeus.runtime.errors import DataError
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


def build(index, *, own=False, **dataset):
    config = DataConfig(DATASET=DatasetConfig(**dataset))
    return build_evaluation_data(EvaluationRequest(config, index, PREPROCESSING, 0, own))


def labels(data):
    return data.bundle.val.targets.tolist()


def test_default_level_names_may_be_those_of_an_older_version():
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
        (NESTED, ["wolf/1.png"], [[1, 3]]),
        (FLAT, ["canids/dogs/wolf/1.png"], [[3]]),
        # the split: validation before test, and a folder of training alone as it is
        (NESTED, ["train/cats/lion/1.png", "val/dogs/fox/1.png", "test/dogs/wolf/1.png"], [[1, 2]]),
        (NESTED, ["train/cats/lion/1.png", "test/dogs/wolf/1.png"], [[1, 3]]),
        (NESTED, ["train/cats/lion/1.png"], [[0, 0]]),
    ],
)
def test_folders_are_matched_from_the_finest_level(tmp_path, index, paths, expected):
    """Coarse levels that are not there follow from the class below them."""
    data = build(index, NAME="imagefolder", ROOT=str(files(tmp_path, *paths)))
    assert labels(data) == expected
    assert data.bundle.index is index
    assert data.part in data.bundle.report[0]


def test_what_is_not_read_is_noted(tmp_path):
    (tmp_path / "val.csv").write_text("image,species\n1.png,fox\n1.png,nan\n")
    root = files(tmp_path, "1.png", "train/fox/1.png", "val/fox/1.png", "more/fox/1.png")
    files(root, "val/fox/notes.txt")
    of_table = build(FLAT, NAME="manifest", VAL=str(tmp_path / "val.csv")).bundle.report
    of_folders = build(FLAT, NAME="imagefolder", ROOT=str(root)).bundle.report
    for report, words in ((of_table, "1 'nan'"), (of_folders, "more"), (of_folders, ".txt 1")):
        assert any(words in line for line in report)


def test_images_of_the_runs_split_that_are_gone(tmp_path):
    """They are an error at the start, or left out."""
    for i, name in enumerate(("fox", "lion", "lynx", "wolf") * 2):
        write_image(tmp_path / "images" / name / f"{i}.png", seed=i)
    dataset = DatasetConfig(NAME="imagefolder", ROOT=str(tmp_path / "images"), VAL_FRACTION=0.5)
    config = DataConfig(DATASET=dataset)
    bundle = build_data(config, seed=0)
    save_split(bundle, tmp_path / "split.csv")
    request = EvaluationRequest(
        config, bundle.index, PREPROCESSING, 0, True, split_file=tmp_path / "split.csv"
    )
    assert len(labels(build_evaluation_data(request))) == len(bundle.val.files) == 4
    Path(bundle.val.files[0]).unlink()
    with pytest.raises(DataError, match="1 of 4 images not found"):
        build_evaluation_data(request)
    request = replace(request, config=replace(config, ON_BAD_IMAGE="skip"))
    assert len(labels(build_evaluation_data(request))) == 3


@pytest.mark.parametrize(
    ("header", "rows", "levels", "expected"),
    [
        ("species,family", ["wolf,dogs", ",cats", "lynx,"], None, [[1, 3], [0, -1], [-1, 1]]),
        ("species", [""], None, [[-1, -1]]),
        ("family", ["dogs"], None, [[1, -1]]),
        ("species", ["wolf"], ["order", "family", "species"], [[1, 3]]),
        ("a,b", ["dogs,fox"], ["a", "b"], [[1, 2]]),
    ],
)
def test_columns_are_matched_by_name(tmp_path, header, rows, levels, expected):
    """An empty cell is unknown; a column that is not there follows from the one below it."""
    lines = [f"image,{header}", *(f"1.png,{row}" for row in rows)]
    table = files(tmp_path, "1.png") / "test.csv"
    table.write_text("\n".join(lines))
    assert labels(build(NESTED, NAME="manifest", VAL=str(table), LEVELS=levels)) == expected


class Named(Dataset):
    """A user's dataset: sample i has the class i."""

    def __init__(self, split, classes):
        assert split == "val", "the training split is not needed"
        self.taxonomy = {"species": classes}

    def __len__(self):
        return len(self.taxonomy["species"])

    def __getitem__(self, index):
        return 0.0, index


def user_data(index, classes):
    config = DataConfig(DATASET={"_target_": f"{__name__}.Named", "classes": classes})
    return build_evaluation_data(EvaluationRequest(config, index, None, 0, False)).bundle.val


def test_a_users_dataset_has_the_classes_of_the_run():
    classes = ["fox", "lion", "lynx", "wolf"]
    dataset = user_data(FLAT, classes)
    assert [dataset[i][1].tolist() for i in range(len(dataset))] == [[0], [1], [2], [3]]
    for index, others in ((FLAT, classes[::-1]), (None, classes)):
        with pytest.raises(DataError, match="Named"):
            user_data(index, others)
