from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data
from linnaeus.errors import ConfigError, DataError

WriteImage = Callable[..., Path]

ROWS = """image,kingdom,species
img/0.jpg,Animalia,cat
img/1.jpg,Animalia,"lynx, wild"
img/2.jpg,Plantae,
img/3.jpg,,oak
img/4.jpg,Plantae,oak
img/5.jpg,Animalia,cat
"""


@pytest.fixture
def folder(tmp_path: Path, write_image: WriteImage) -> Path:
    for i in range(6):
        write_image(tmp_path / "img" / f"{i}.jpg", seed=i)
    (tmp_path / "train.csv").write_text(ROWS)
    return tmp_path


def build(root: Path | None, on_bad_image: str = "raise", **dataset: Any) -> DataBundle:
    dataset.setdefault("VAL_FRACTION", 0.34)
    node = DatasetConfig(NAME="manifest", ROOT=None if root is None else str(root), **dataset)
    return build_data(DataConfig(DATASET=node, IMG_SIZE=8, ON_BAD_IMAGE=on_bad_image), seed=0)


def fails(
    text: str | bytes, message: str, folder: Path, error: type[Exception] = DataError, **keys: Any
) -> str:
    (folder / "train.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(error, match=message) as caught:
        build(folder, **keys)
    if error is DataError:
        assert str(folder / "train.csv") in str(caught.value)


def labels(bundle: DataBundle) -> dict[str, list[int]]:
    found = {}
    for dataset in (bundle.train, bundle.val):
        for i in range(len(dataset)):  # type: ignore[arg-type]
            found[os.fsdecode(dataset.paths[i])] = dataset[i][1].tolist()  # type: ignore[attr-defined]
    return found


def test_columns_are_ranks_and_empty_cells_unknown(folder: Path) -> None:
    bundle = build(folder)
    assert bundle.taxonomy is not None
    assert bundle.taxonomy.names == ("kingdom", "species")
    assert bundle.taxonomy.levels[1].classes == ("cat", "lynx, wild", "oak")
    assert bundle.taxonomy.parents == ((0, 0, 1),)
    assert labels(bundle) == {
        "img/0.jpg": [0, 0],
        "img/1.jpg": [0, 1],
        "img/2.jpg": [1, -1],
        "img/3.jpg": [-1, 2],
        "img/4.jpg": [1, 2],
        "img/5.jpg": [0, 0],
    }
    assert bundle.train[0][0].shape == (3, 8, 8)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\n\n").encode() + b"\n\n",
        lambda text: text.replace(",", " , ").replace(' , "lynx ,  wild"', ',"lynx, wild"').encode(),
        lambda text: text.rstrip("\n").encode(),
    ],
    ids=["byte-order mark", "Windows line ends", "blank lines", "spaces", "no last line end"],
)
def test_variants_of_the_file_mean_the_same(folder: Path, change: Any) -> None:
    expected = labels(build(folder))
    (folder / "train.csv").write_bytes(change(ROWS))
    bundle = build(folder)
    assert bundle.taxonomy is not None
    assert bundle.taxonomy.levels[1].classes == ("cat", "lynx, wild", "oak")
    assert labels(bundle) == expected


def test_ranks_choose_and_order_the_columns(folder: Path) -> None:
    taxonomy = build(folder, RANKS=["species"]).taxonomy
    assert taxonomy is not None
    assert taxonomy.names == ("species",)
    (folder / "train.csv").write_text(
        "a,path,b\nx,img/0.jpg,q\ny,img/1.jpg,p\nx,img/2.jpg,q\ny,img/3.jpg,p\n"
    )
    taxonomy = build(folder, RANKS=["b", "a"], IMAGE_COLUMN="path").taxonomy
    assert taxonomy is not None
    assert taxonomy.names == ("b", "a")


def test_paths_start_from_root_or_from_the_manifest(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert build(None, TRAIN=str(folder / "train.csv")).train[0][0].shape == (3, 8, 8)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "list.csv"
    elsewhere.write_text(ROWS)
    assert build(folder, TRAIN=str(elsewhere)).train[0][0].shape == (3, 8, 8)
    with pytest.raises(DataError, match=r"list\.csv, line 2: there is no image .*DATA\.DATASET\.ROOT"):
        build(None, TRAIN=str(elsewhere))
    elsewhere.write_text(ROWS.replace("img/", f"{folder}/img/"))
    assert build(None, TRAIN=str(elsewhere)).train[0][0].shape == (3, 8, 8)


def test_validation_manifest_is_encoded_with_training_classes(folder: Path) -> None:
    (folder / "val.csv").write_text("species,image,kingdom\noak,img/0.jpg,Plantae\n,img/1.jpg,Animalia\n")
    bundle = build(folder)
    assert len(bundle.train) == 6  # type: ignore[arg-type]
    assert [bundle.val[i][1].tolist() for i in range(2)] == [[1, 2], [0, -1]]
    (folder / "val.csv").write_text("image,kingdom,species\nimg/0.jpg,Plantae,oak\nimg/1.jpg,Plantae,elm\n")
    with pytest.raises(DataError, match=r"val\.csv: 1 class of validation .*Plantae/elm \(first in line 3\)"):
        build(folder)
    (folder / "val.csv").write_text("image,kingdom\nimg/0.jpg,Plantae\n")
    with pytest.raises(DataError, match=r"val\.csv, line 1: no column 'species'"):
        build(folder)
    (folder / "val.csv").rename(folder / "check.csv")
    with pytest.raises(DataError, match=r"check\.csv, line 1"):
        build(folder, VAL="check.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"image,species\n", "no row"),
        (b"image\nimg/0.jpg\n", "no column with labels"),
        (b"file,species\nimg/0.jpg,cat\n", r"line 1: no column 'image' \(DATA.DATASET.IMAGE_COLUMN\)"),
        (b"image;species\nimg/0.jpg;cat\n", "line 1: no column 'image'.*'image;species'"),
        (b"image,a,a\nimg/0.jpg,x,y\n", "line 1: column a occurs more than once"),
        (b"image,a\nimg/0.jpg,x\nimg/1.jpg\n", "line 3: 1 cells, but the header has 2"),
        (b"image,a\nimg/0.jpg,x\n\nimg/1.jpg,y,z\n", "line 4: 3 cells, but the header has 2"),
        (b"image,a\nimg/0.jpg,x\n,y\n", "line 3: no image path"),
        (b'image,a\nimg/0.jpg,"x\n', "broken CSV"),
        (b"image,a\nimg/0.jpg,f\xe9e\n", "not UTF-8"),
        (b"image,a\nimg/0.jpg,x\nimg/1.jpg,x\n", "rank 'a' has one class, 'x'"),
        (b"image,a\nimg/0.jpg,\nimg/1.jpg,\n", "rank 'a' has no class at all"),
        (b"image,a\nnope.jpg,x\nneither.jpg,y\n", "line 2: there is no image"),
    ],
)
def test_malformed_files_are_refused_with_name_and_line(folder: Path, text: bytes, message: str) -> None:
    fails(text, message, folder)


def test_a_misspelled_rank_gets_a_hint(folder: Path) -> None:
    fails(
        ROWS, r"no column 'specie' \(DATA.DATASET.RANKS\); did you mean 'species'", folder, RANKS=["specie"]
    )
    fails(ROWS, "is the image column", folder, ConfigError, RANKS=["image"])


def test_columns_from_fine_to_coarse_are_refused(folder: Path) -> None:
    text = "image,species,kingdom\nimg/0.jpg,cat,A\nimg/1.jpg,dog,A\nimg/2.jpg,oak,P\n"
    fails(text, "'kingdom' stands after 'species', but it groups .*DATA.DATASET.RANKS", folder)


def test_names_under_several_parents_are_reported(folder: Path) -> None:
    rows = ["A,x", "A,y", "B,x", "B,z", "A,x", "B,x"]
    (folder / "train.csv").write_text(
        "image,a,b\n" + "".join(f"img/{i}.jpg,{r}\n" for i, r in enumerate(rows))
    )
    bundle = build(folder)
    assert bundle.taxonomy is not None
    assert bundle.taxonomy.levels[1].classes == ("A/x", "y", "B/x", "z")
    assert any("column 'b'" in line and line.endswith(": x") for line in bundle.report)


def test_an_index_column_without_a_name_is_no_rank(folder: Path) -> None:
    lines = ROWS.splitlines()
    (folder / "train.csv").write_text(
        "\n".join(["," + lines[0], *(f"{i},{r}" for i, r in enumerate(lines[1:]))])
    )
    bundle = build(folder)
    assert bundle.taxonomy is not None
    assert bundle.taxonomy.names == ("kingdom", "species")
    assert any("without a name" in line for line in bundle.report)


def test_a_missing_manifest_or_none_at_all(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.TRAIN"):
        build(None)
    with pytest.raises(DataError, match=r"cannot read manifest .*nowhere\.csv"):
        build(folder, TRAIN="nowhere.csv")
    with pytest.raises(DataError, match=r"cannot read manifest .*nowhere\.csv"):
        build(folder, VAL="nowhere.csv")
    with pytest.raises(DataError, match="cannot read manifest"):
        build(folder, TRAIN="img")


def test_missing_and_damaged_images(folder: Path) -> None:
    (folder / "img" / "0.jpg").unlink()
    (folder / "img" / "1.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read image .*0\.jpg: there is no such file"):
        labels(build(folder))
    bundle = build(folder, on_bad_image="skip")
    assert set(labels(bundle)) == {f"img/{i}.jpg" for i in (2, 3, 4, 5)}
    report = " ".join(bundle.report)
    assert "img/0.jpg (there is no such file)" in report
    assert "img/1.jpg (not an image" in report
