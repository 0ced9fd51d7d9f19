"""Datasets of Hugging Face, WebDataset and Parquet, on files that these tests write."""

from __future__ import annotations

import io
import json
import tarfile
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from linnaeus.cli import check_data
from linnaeus.cli.parser import Options
from linnaeus.config.schema import Config, DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.runtime.errors import ConfigError, DataError
from tests.helpers.datasets import write_image

CLASSES = ("cat", "dog", "oak")
KINGDOMS = ("Animalia", "Animalia", "Plantae")
NUMBERS = {"train": range(12), "validation": range(100, 106)}


def png(number):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def hugging(numbers, *, nested=False, label=lambda i: i % 3):
    """A dataset of Hugging Face with these images and a column of classes."""
    datasets = pytest.importorskip("datasets")
    rows = {
        "photo": [{"bytes": png(i), "path": None} for i in numbers],
        "label": [label(i) for i in numbers],
        "weight": [0.5 for _ in numbers],
    }
    kinds = {
        "photo": datasets.Image(),
        "label": datasets.ClassLabel(names=[*CLASSES]),
        "weight": datasets.Value("float32"),
    }
    if nested:
        rows["label"] = [{"kingdom": KINGDOMS[i % 3], "name": CLASSES[i % 3]} for i in numbers]
        kinds["label"] = {"kingdom": datasets.Value("string"), "name": datasets.Value("string")}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def saved(folder, **options):
    datasets = pytest.importorskip("datasets")
    splits = {name: hugging(numbers, **options) for name, numbers in NUMBERS.items()}
    datasets.DatasetDict(splits).save_to_disk(folder, num_shards={"train": 3, "validation": 1})


def in_parquet(folder, **options):
    for name, numbers in NUMBERS.items():
        hugging(numbers, **options).to_parquet(folder / f"{name}.parquet", batch_size=5)


def in_tars(folder, ending="tar", mode="w", members=None):
    """Two shards for training, and one for validation."""
    parts = {"train-000": range(7), "train-001": range(7, 12), "val-000": range(100, 106)}
    for name, numbers in parts.items():
        with tarfile.open(folder / f"{name}.{ending}", mode) as tar:
            for i in numbers:
                labels = {"kingdom": KINGDOMS[i % 3], "name": CLASSES[i % 3]}
                files = {"png": png(i), "cls": CLASSES[i % 3], "json": json.dumps(labels)}
                for kind in members or files:
                    content = files[kind]
                    content = content if isinstance(content, bytes) else content.encode()
                    member = tarfile.TarInfo(f"./images/{i:03}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def build(name, folder, **dataset):
    config = DatasetConfig(NAME=name, ROOT=str(folder), **dataset)
    return build_data(DataConfig(DATASET=config, IMG_SIZE=8), seed=0)


def found(bundle):
    """The first pixel and the class names of each sample of validation, whose images are not augmented."""
    names = [level.classes for level in bundle.taxonomy.levels]
    samples = [bundle.val[i] for i in range(len(bundle.val))]
    return {
        int(image[0, 0, 0]): tuple(x[i] for x, i in zip(names, label.tolist(), strict=True))
        for image, label in samples
    }


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
def test_splits_images_and_classes_are_found(name, write, tmp_path):
    write(tmp_path)
    bundle = build(name, tmp_path)
    assert [len(bundle.train), len(bundle.val), bundle.test] == [12, 6, None]
    assert found(bundle) == {i: (CLASSES[i % 3],) for i in NUMBERS["validation"]}
    assert torch.bincount(bundle.train.targets[:, 0]).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("name", "write", "levels"),
    [
        ("huggingface", partial(saved, nested=True), ["label.kingdom", "label.name"]),
        ("huggingface", partial(in_parquet, nested=True), ["label.kingdom", "label.name"]),
        ("webdataset", in_tars, ["kingdom", "name"]),
    ],
)
def test_several_columns_are_levels(name, write, levels, tmp_path):
    write(tmp_path)
    bundle = build(name, tmp_path, LEVELS=levels)
    assert bundle.taxonomy.names == tuple(levels)
    assert found(bundle) == {i: (KINGDOMS[i % 3], CLASSES[i % 3]) for i in NUMBERS["validation"]}


@pytest.mark.e2e
@pytest.mark.parametrize(("name", "write"), [("huggingface", saved), ("webdataset", in_tars)])
def test_workers_read_any_order_alike(name, write, tmp_path):
    write(tmp_path)
    data = build(name, tmp_path).val
    order = [3, 0, 5, 3, 1]
    loader = DataLoader(data, sampler=order, num_workers=1, multiprocessing_context="spawn")
    assert [int(image[0, 0, 0, 0]) for image, _ in loader] == [100 + i for i in order]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"VAL": "tst"}, "DATA.DATASET.VAL"),
        ({"LEVELS": ["label1"]}, "DATA.DATASET.LEVELS"),
        ({"IMAGE_COLUMN": "img"}, "DATA.DATASET.IMAGE_COLUMN"),
        ({"IMAGE_COLUMN": "label"}, "DATA.DATASET.IMAGE_COLUMN"),
    ],
)
def test_a_wrong_name_is_a_mistake_of_its_key(options, key, tmp_path):
    saved(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build("huggingface", tmp_path, **options)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [key]


def test_rows_without_a_label_are_unknown_or_refused(tmp_path):
    saved(tmp_path / "some", label=lambda i: i % 3 if i % 5 else -1)
    bundle = build("huggingface", tmp_path / "some")
    assert (bundle.train.targets == -1).sum() == 3
    saved(tmp_path / "none", label=lambda i: -1)
    with pytest.raises(DataError, match="label"):
        build("huggingface", tmp_path / "none")


def test_one_split_is_divided_and_named_splits_are_used(tmp_path):
    hugging(range(12)).save_to_disk(tmp_path / "one")
    bundle = build("huggingface", tmp_path / "one", VAL_FRACTION=0.25)
    assert [len(bundle.train), len(bundle.val)] == [9, 3]
    saved(tmp_path / "two")
    bundle = build("huggingface", tmp_path / "two", TRAIN="validation", VAL="train")
    assert [len(bundle.train), len(bundle.val)] == [6, 12]


def test_a_missing_dataset_names_its_key(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.ROOT"):
        build("huggingface", tmp_path / "none")


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_compressed_tar_files_are_refused(ending, tmp_path):
    in_tars(tmp_path, ending=ending, mode="w:gz")
    with pytest.raises((ConfigError, DataError), match="gunzip"):
        build("webdataset", tmp_path)


def test_samples_of_tar_files_without_an_image(tmp_path):
    in_tars(tmp_path, members=["cls"])
    with pytest.raises(DataError, match="no image"):
        build("webdataset", tmp_path)


def test_tar_files_are_named_by_patterns(tmp_path):
    in_tars(tmp_path)
    bundle = build("webdataset", tmp_path, TRAIN="val-*.tar", VAL="train-001.tar")
    assert [len(bundle.train), len(bundle.val)] == [6, 5]
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.TRAIN"):
        build("webdataset", tmp_path, TRAIN="none-*.tar")


def test_a_manifest_may_be_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rows = [(f"{i}.png", KINGDOMS[i % 3], CLASSES[i % 3], 3 + i % 3) for i in range(12)]
    for i in range(12):
        write_image(tmp_path / f"{i}.png", seed=i)
    table = pandas.DataFrame(rows, columns=["path", "kingdom", "name", "size"])
    table.loc[0, "name"] = None
    table.to_parquet(tmp_path / "train.parquet")
    bundle = build("manifest", tmp_path, LEVELS=["kingdom", "name"], VAL_FRACTION=0.25)
    assert bundle.taxonomy.names == ("kingdom", "name")
    targets = torch.cat([bundle.train.targets, bundle.val.targets])
    assert (targets[:, 1] == -1).sum() == 1


@pytest.mark.parametrize("name", ["manifest", "huggingface"])
def test_whole_numbers_beside_an_empty_cell_are_whole(name, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    if name == "huggingface":
        datasets = pytest.importorskip("datasets")
        photos = [{"bytes": png(i), "path": None} for i in range(12)]
        kinds = {"photo": datasets.Image(), "label": datasets.Value("float64")}
        rows = {"photo": photos, "label": [None, *(float(i % 3) for i in range(1, 12))]}
        data = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
        data.to_parquet(tmp_path / "train.parquet")
    else:
        for i in range(12):
            write_image(tmp_path / f"{i}.png", seed=i)
        rows = [(f"{i}.png", i % 3 if i else None) for i in range(12)]
        table = pandas.DataFrame(rows, columns=["path", "label"])
        table.to_parquet(tmp_path / "train.parquet")
    bundle = build(name, tmp_path, LEVELS=["label"])
    assert bundle.taxonomy.levels[0].classes == ("0", "1", "2")


def test_image_paths_in_parquet_start_where_the_run_does(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    photos = [f"images/{i}.png" for i in range(12)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for i in range(12):
        (tmp_path / "images" / f"{i}.png").write_bytes(png(i))
    kinds = {"photo": datasets.Image(), "label": datasets.ClassLabel(names=[*CLASSES])}
    rows = {"photo": photos, "label": [i % 3 for i in range(12)]}
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    (tmp_path / "table").mkdir()
    data.to_parquet("table/train.parquet")
    assert pandas.read_parquet("table/train.parquet").photo[0]["path"] == photos[0]
    bundle = build("huggingface", "table")
    assert len(bundle.val) == len(found(bundle)) == 2
    assert all(classes == (CLASSES[i % 3],) for i, classes in found(bundle).items())


def test_parquet_with_images_is_no_manifest(tmp_path):
    in_parquet(tmp_path)
    with pytest.raises(DataError, match="huggingface"):
        build("manifest", tmp_path, IMAGE_COLUMN="photo")


def test_a_column_of_lists_gives_several_labels(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = datasets.List(datasets.ClassLabel(names=[*CLASSES]))
    columns = {"photo": datasets.Image(), "tags": names}
    rows = {
        "photo": [{"bytes": png(i), "path": None} for i in range(12)],
        "tags": [[i % 3, (i + 1) % 3] if i else [] for i in range(12)],
    }
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(columns))
    data.save_to_disk(tmp_path / "tags")
    bundle = build("huggingface", tmp_path / "tags", LABEL_SEPARATOR=",", LEVELS=["tags"])
    assert bundle.taxonomy.levels[0].classes == CLASSES
    targets = torch.cat([bundle.train.targets, bundle.val.targets])
    assert sorted(targets.sum(dim=1).tolist())[1:] == [2] * 11


def test_a_dataset_needs_a_column_of_images(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"image": ["1.png", "2.png"], "label": ["a", "b"]})
    data.save_to_disk(tmp_path / "texts")
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.NAME"):
        build("huggingface", tmp_path / "texts")


def write_tar(file, samples, mode="w"):
    """A tar file with the members of each sample: the part of its name and its content."""
    with tarfile.open(file, mode) as tar:
        for name, content in samples:
            content = content if isinstance(content, bytes) else content.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def members(number, stem="{}", first=0):
    return [
        (stem.format(i) + ending, content)
        for i in range(first, first + number)
        for ending, content in ((".png", png(i)), (".cls", CLASSES[i % 3]))
    ]


@pytest.mark.parametrize("ending", ["tar.gz", "tgz"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_compressed_shard_beside_others_is_refused(split, ending, tmp_path):
    write_tar(tmp_path / "train-0000.tar", members(12))
    write_tar(tmp_path / f"{split}-0001.{ending}", members(6, first=12), "w:gz")
    with pytest.raises(DataError, match=rf"{split}-0001\.{ending}.*gunzip"):
        build("webdataset", tmp_path)
    write_tar(tmp_path / f"{split}-0001.tar", members(6, first=12))
    bundle = build("webdataset", tmp_path)
    assert len(bundle.train) + len(bundle.val) == 18


@pytest.mark.parametrize("size", [0, 300, 4096 + 100, -3000])
def test_an_incomplete_tar_file_is_no_compressed_one(size, tmp_path):
    write_tar(tmp_path / "train.tar", members(12))
    content = (tmp_path / "train.tar").read_bytes().rstrip(b"\0")
    (tmp_path / "train.tar").write_bytes(content[:size])
    with pytest.raises(DataError, match=r"train\.tar.*copy") as caught:
        build("webdataset", tmp_path)
    assert "gunzip" not in str(caught.value)


def test_a_folder_without_tar_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.ROOT: no tar files"):
        build("webdataset", tmp_path)


def test_sample_keys_of_two_tar_files_are_counted(tmp_path):
    write_tar(tmp_path / "train-0.tar", members(12))
    write_tar(tmp_path / "train-1.tar", members(6, first=12))
    assert "sample key" not in " ".join(build("webdataset", tmp_path).report)
    write_tar(tmp_path / "train-1.tar", members(6, first=8))
    (line,) = (line for line in build("webdataset", tmp_path).report if "sample key" in line)
    assert "4 sample keys" in line


@pytest.mark.parametrize(
    "more",
    [members(3), [("2.jpg", png(2))], [("2.cls", "cat")]],
    ids=["samples", "image", "labels"],
)
def test_a_sample_key_that_comes_twice_is_refused(more, tmp_path):
    write_tar(tmp_path / "train.tar", members(12) + more)
    with pytest.raises(DataError, match=r"train\.tar.*'[02]'"):
        build("webdataset", tmp_path)


def test_members_of_a_sample_need_not_be_adjacent(tmp_path):
    write_tar(tmp_path / "train.tar", members(60)[::2] + members(60)[1::2] + [("README", "text")])
    bundle = build("webdataset", tmp_path, IMAGE_COLUMN="png")
    assert [len(bundle.train) + len(bundle.val), len(bundle.report)] == [60, 2]


def test_samples_of_tar_files_without_image_are_counted(tmp_path):
    write_tar(tmp_path / "train.tar", [*members(12), ("20.cls", "cat"), ("21.cls", "dog")])
    bundle = build("webdataset", tmp_path)
    assert [line for line in bundle.report if "2 samples" in line]


@pytest.mark.parametrize("content", ["{broken", b"\xff\xfe"])
def test_a_broken_label_file_of_a_tar_file_is_named(content, tmp_path):
    write_tar(tmp_path / "train.tar", [*members(12), ("12.json", content)])
    with pytest.raises(DataError, match=r"train\.tar.*12\.json") as caught:
        build("webdataset", tmp_path)
    assert "compress" not in str(caught.value)


def test_tar_files_without_image_name_their_endings(tmp_path):
    write_tar(tmp_path / "train.tar", members(3, "im.v1.{}"))
    with pytest.raises(DataError, match=r"v1\.0\.png.*DATA\.DATASET\.IMAGE_COLUMN.*first dot"):
        build("webdataset", tmp_path)


def test_nested_json_labels_of_tar_files_are_levels(tmp_path):
    labels = [{"label": {"family": KINGDOMS[i], "species": CLASSES[i]}} for i in range(3)]
    for split in ("train", "val"):
        samples = [
            m for i in range(12) for m in ((f"{i}.png", png(i)), (f"{i}.json", labels[i % 3]))
        ]
        texts = [(name, json.dumps(x) if isinstance(x, dict) else x) for name, x in samples]
        write_tar(tmp_path / f"{split}.tar", texts)
    bundle = build("webdataset", tmp_path, LEVELS=["label.family", "label.species"])
    assert found(bundle) == {i: (KINGDOMS[i % 3], CLASSES[i % 3]) for i in range(12)}


def missing_image(folder, image, *, in_parquet):
    """A dataset whose fifth row has no image."""
    datasets = pytest.importorskip("datasets")
    photos = [{"bytes": png(i), "path": f"{i}.png"} for i in range(12)]
    photos[4] = image
    kinds = {"photo": datasets.Image(), "label": datasets.ClassLabel(names=[*CLASSES])}
    rows = {"photo": photos, "label": [i % 3 for i in range(12)]}
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    data.to_parquet(folder / "train.parquet") if in_parquet else data.save_to_disk(folder)


@pytest.mark.parametrize("in_parquet", [False, True])
@pytest.mark.parametrize(
    "image", [None, {"bytes": b"", "path": None}, {"bytes": b"", "path": "4.png"}]
)
def test_a_row_without_an_image_is_a_damaged_image(image, in_parquet, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "known"))
    (tmp_path / "data").mkdir()
    missing_image(tmp_path / "data", image, in_parquet=in_parquet)
    bundle = build("huggingface", tmp_path / "data")
    assert len(bundle.train) + len(bundle.val) == 12
    with pytest.raises(DataError, match=r"\.arrow:4@"):
        [split[i] for split in (bundle.train, bundle.val) for i in range(len(split))]
    node = DatasetConfig(NAME="huggingface", ROOT=str(tmp_path / "data"))
    with pytest.raises(DataError, match=r"(?s)1 image cannot.*\.arrow:4@"):
        check_data.run(Options(), Config(DATA=DataConfig(DATASET=node, IMG_SIZE=8)))
    skipping = DataConfig(DATASET=node, IMG_SIZE=8, ON_BAD_IMAGE="skip")
    bundle = build_data(skipping, seed=0)
    samples = [split[i] for split in (bundle.train, bundle.val) for i in range(len(split))]
    assert len(samples) == 11


def test_the_log_names_only_columns_that_are_used(tmp_path):
    hugging(range(12)).add_column("caption", ["x"] * 12).save_to_disk(tmp_path / "one")
    report = build("huggingface", tmp_path / "one", LEVELS=["label"]).report
    assert [line for line in report if "caption" in line] == [
        line for line in report if "not read" in line
    ]


@pytest.mark.parametrize("root", ["/none/x", "./none", "~/none", "a/b/c", "birds.parquet", "a/b"])
def test_a_root_that_is_nowhere_is_said_to_be_no_folder(root, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.ROOT.*no such folder or file.*hub"):
        build("huggingface", root)
