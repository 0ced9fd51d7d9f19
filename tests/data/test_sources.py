"""Datasets of Hugging Face, WebDataset and Parquet, on files that these tests write."""

import io
import json
import tarfile
from importlib.util import find_spec

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.runtime.errors import ConfigError, DataError
from tests.helpers.datasets import write_image
from tests.helpers.layouts import build

CLASSES = ("cat", "dog", "oak")
KINGDOMS = ("Animalia", "Animalia", "Plantae")
NUMBERS = {"train": range(12), "validation": range(100, 106)}


def png(number):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def lineage(number):
    return {"kingdom": KINGDOMS[number % 3], "name": CLASSES[number % 3]}


def hugging(numbers, **columns):
    """A dataset of Hugging Face with these images and columns of classes; other cells replace these."""
    datasets = pytest.importorskip("datasets")
    rows = {
        "photo": [{"bytes": png(i), "path": None} for i in numbers],
        "label": [i % 3 for i in numbers],
        "lineage": [lineage(i) for i in numbers],
        "weight": [0.5 for _ in numbers],
    }
    text = datasets.Value("string")
    kinds = {
        "photo": datasets.Image(),
        "label": datasets.ClassLabel(names=[*CLASSES]),
        "lineage": {"kingdom": text, "name": text},
        "weight": datasets.Value("float32"),
    }
    return datasets.Dataset.from_dict(rows | columns, features=datasets.Features(kinds))


def saved(folder):
    datasets = pytest.importorskip("datasets")
    splits = {name: hugging(numbers) for name, numbers in NUMBERS.items()}
    datasets.DatasetDict(splits).save_to_disk(folder, num_shards={"train": 3, "validation": 1})


def in_parquet(folder):
    for name, numbers in NUMBERS.items():
        hugging(numbers).to_parquet(folder / f"{name}.parquet", batch_size=5)


def write_tar(file, samples, mode="w"):
    """A tar file with these members: names and contents."""
    with tarfile.open(file, mode) as tar:
        for name, content in samples:
            content = content if isinstance(content, bytes) else content.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def members(numbers, stem="{}"):
    """The image and the label of each sample."""
    return [
        (stem.format(i) + ending, content)
        for i in numbers
        for ending, content in ((".png", png(i)), (".cls", CLASSES[i % 3]))
    ]


def in_tars(folder):
    """Two shards for training, and one for validation."""
    parts = {"train-000": range(7), "train-001": range(7, 12), "val-000": range(100, 106)}
    for name, numbers in parts.items():
        labels = [(f"./images/{i}.json", json.dumps({"lineage": lineage(i)})) for i in numbers]
        write_tar(folder / f"{name}.tar", members(numbers, "./images/{}") + labels)


def found(bundle):
    """The first pixel and the class names of each sample of validation, whose images are not augmented."""
    names = [level.classes for level in bundle.taxonomy.levels]
    samples = [bundle.val[i] for i in range(len(bundle.val))]
    return {
        int(image[0, 0, 0]): tuple(x[i] for x, i in zip(names, label.tolist(), strict=True))
        for image, label in samples
    }


def targets(bundle):
    return torch.cat([bundle.train.targets, bundle.val.targets])


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache of its own, so that nothing is written into the user's home folder."""
    if find_spec("datasets") is not None:
        folder = str(tmp_path_factory.mktemp("cache"))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)


@pytest.mark.parametrize(
    ("name", "write"),
    [("huggingface", saved), ("huggingface", in_parquet), ("webdataset", in_tars)],
)
def test_splits_images_and_labels_are_found(name, write, tmp_path):
    write(tmp_path)
    bundle = build(tmp_path, name)
    assert [len(bundle.train), len(bundle.val), bundle.test] == [12, 6, None]
    assert found(bundle) == {i: (CLASSES[i % 3],) for i in NUMBERS["validation"]}
    assert torch.bincount(bundle.train.targets[:, 0]).tolist() == [4, 4, 4]
    bundle = build(tmp_path, name, LEVELS=["lineage.kingdom", "lineage.name"])
    assert found(bundle) == {i: (KINGDOMS[i % 3], CLASSES[i % 3]) for i in NUMBERS["validation"]}


@pytest.mark.e2e
def test_workers_read_any_order_alike(tmp_path):
    in_tars(tmp_path)
    data = build(tmp_path, "webdataset").val
    order = [3, 0, 5, 3, 1]
    loader = DataLoader(data, sampler=order, num_workers=1, multiprocessing_context="spawn")
    assert [int(image[0, 0, 0, 0]) for image, _ in loader] == [100 + i for i in order]


@pytest.mark.parametrize("options", [{"VAL": "tst"}, {"IMAGE_COLUMN": "label"}])
def test_a_wrong_name_is_a_mistake_of_its_key(options, tmp_path):
    saved(tmp_path)
    with pytest.raises(ConfigError, match=rf"DATA\.DATASET\.{min(options)}:"):
        build(tmp_path, "huggingface", **options)


def test_rows_without_a_label_are_unknown(tmp_path):
    hugging(range(12), label=[0, -1, 1] * 4).save_to_disk(tmp_path)
    assert (targets(build(tmp_path, "huggingface")) == -1).sum() == 4


def test_one_split_is_divided_and_named_splits_are_used(tmp_path):
    hugging(range(12)).save_to_disk(tmp_path / "one")
    bundle = build(tmp_path / "one", "huggingface", VAL_FRACTION=0.25)
    assert [len(bundle.train), len(bundle.val)] == [9, 3]
    saved(tmp_path / "two")
    bundle = build(tmp_path / "two", "huggingface", TRAIN="validation", VAL="train")
    assert [len(bundle.train), len(bundle.val)] == [6, 12]


def test_tar_files_are_named_by_patterns(tmp_path):
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.ROOT: no tar files"):
        build(tmp_path, "webdataset")
    in_tars(tmp_path)
    bundle = build(tmp_path, "webdataset", TRAIN="val-*.tar", VAL="train-001.tar")
    assert [len(bundle.train), len(bundle.val)] == [6, 5]
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.TRAIN"):
        build(tmp_path, "webdataset", TRAIN="none-*.tar")


def test_a_manifest_may_be_parquet(tmp_path):
    """Whole numbers beside an empty cell, which are floats there, are whole."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    for i in range(12):
        write_image(tmp_path / f"{i}.png", seed=i)
    rows = [(f"{i}.png", i % 3 if i else None, KINGDOMS[i % 3]) for i in range(12)]
    table = pandas.DataFrame(rows, columns=["path", "number", "kingdom"])
    table.to_parquet(tmp_path / "train.parquet")
    bundle = build(tmp_path, "manifest", LEVELS=["kingdom", "number"])
    assert bundle.taxonomy.levels[1].classes == ("0", "1", "2")
    assert (targets(bundle) == -1).sum(dim=0).tolist() == [0, 1]


def test_image_paths_in_parquet_start_where_the_run_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("images", "table"):
        (tmp_path / folder).mkdir()
    photos = [f"images/{i}.png" for i in range(12)]
    for i, photo in enumerate(photos):
        (tmp_path / photo).write_bytes(png(i))
    hugging(range(12), photo=photos).to_parquet("table/train.parquet")
    bundle = build("table", "huggingface")
    assert len(bundle.val) == len(found(bundle)) == 2
    assert all(classes == (CLASSES[i % 3],) for i, classes in found(bundle).items())


def test_parquet_with_images_is_no_manifest(tmp_path):
    in_parquet(tmp_path)
    with pytest.raises(DataError, match="huggingface"):
        build(tmp_path, "manifest", IMAGE_COLUMN="photo")


def test_a_column_of_lists_gives_several_labels(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = datasets.List(datasets.ClassLabel(names=[*CLASSES]))
    tags = [[i % 3, (i + 1) % 3] if i else [] for i in range(12)]
    data = hugging(range(12)).add_column("tags", tags).cast_column("tags", names)
    data.save_to_disk(tmp_path)
    bundle = build(tmp_path, "huggingface", LABEL_SEPARATOR=",", LEVELS=["tags"])
    assert bundle.taxonomy.levels[0].classes == CLASSES
    assert sorted(targets(bundle).sum(dim=1).tolist())[1:] == [2] * 11


def test_a_dataset_needs_a_column_of_images(tmp_path):
    hugging(range(2)).remove_columns("photo").save_to_disk(tmp_path)
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.NAME"):
        build(tmp_path, "huggingface")


@pytest.mark.parametrize(
    ("split", "ending"), [("train", "tar"), ("train", "tar.gz"), ("val", "tgz")]
)
def test_a_compressed_shard_beside_others_is_refused(split, ending, tmp_path):
    write_tar(tmp_path / "train-0000.tar", members(range(12)))
    write_tar(tmp_path / f"{split}-0001.{ending}", members(range(12, 18)), "w:gz")
    with pytest.raises(DataError, match=rf"{split}-0001\.{ending}.*gunzip"):
        build(tmp_path, "webdataset")
    write_tar(tmp_path / f"{split}-0001.tar", members(range(12, 18)))
    bundle = build(tmp_path, "webdataset")
    assert len(bundle.train) + len(bundle.val) == 18


@pytest.mark.parametrize("size", [0, 4096 + 100, -3000])
def test_an_incomplete_tar_file_is_no_compressed_one(size, tmp_path):
    write_tar(tmp_path / "train.tar", members(range(12)))
    content = (tmp_path / "train.tar").read_bytes().rstrip(b"\0")
    (tmp_path / "train.tar").write_bytes(content[:size])
    with pytest.raises(DataError, match=r"train\.tar.*copy") as caught:
        build(tmp_path, "webdataset")
    assert "gunzip" not in str(caught.value)


def test_copied_keys_and_samples_without_image_are_counted(tmp_path):
    write_tar(tmp_path / "train-0.tar", [*members(range(12)), ("20.cls", "cat"), ("21.cls", "dog")])
    for first, is_told in ((12, False), (8, True)):
        write_tar(tmp_path / "train-1.tar", members(range(first, first + 6)))
        report = " ".join(build(tmp_path, "webdataset").report)
        assert ("4 sample keys" in report, "sample key" in report) == (is_told, is_told)
        assert "2 samples without" in report


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [("2.jpg", png(2), "'2'"), ("2.cls", "cat", "'2'"), ("12.json", "{broken", r"12\.json")],
)
def test_a_key_that_comes_twice_and_broken_labels_are_refused(name, content, named, tmp_path):
    write_tar(tmp_path / "train.tar", [*members(range(12)), (name, content)])
    with pytest.raises(DataError, match=rf"train\.tar.*{named}"):
        build(tmp_path, "webdataset")


def test_tar_files_without_image_name_their_endings(tmp_path):
    write_tar(tmp_path / "train.tar", members(range(3), "im.v1.{}"))
    with pytest.raises(DataError, match=r"v1\.0\.png.*DATA\.DATASET\.IMAGE_COLUMN.*first dot"):
        build(tmp_path, "webdataset")


@pytest.mark.parametrize("image", [None, {"bytes": b"", "path": "4.png"}])
def test_a_row_without_an_image_is_a_damaged_image(image, tmp_path):
    photos = [{"bytes": png(i), "path": f"{i}.png"} for i in range(12)]
    photos[4] = image
    hugging(range(12), photo=photos).save_to_disk(tmp_path)
    bundle = build(tmp_path, "huggingface")
    with pytest.raises(DataError, match=r"\.arrow:4@"):
        [split[i] for split in (bundle.train, bundle.val) for i in range(len(split))]
    node = DatasetConfig(NAME="huggingface", ROOT=str(tmp_path))
    bundle = build_data(DataConfig(DATASET=node, ON_BAD_IMAGE="skip"), seed=0)
    assert len(bundle.train) + len(bundle.val) == 11


@pytest.mark.parametrize("root", ["./none", "a/b"])
def test_a_root_that_is_nowhere_is_said_to_be_no_folder(root, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.ROOT.*no such folder or file.*hub"):
        build(root, "huggingface")
