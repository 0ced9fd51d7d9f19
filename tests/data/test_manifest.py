from __future__ import annotations

import os

import pytest

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.runtime.errors import ConfigError, DataError
from tests.helpers.datasets import write_image

ROWS = """image,kingdom,species
img/0.jpg,Animalia,cat
img/1.jpg,Animalia,"lynx, wild"
img/2.jpg,Plantae,
img/3.jpg,,oak
img/4.jpg,Plantae,oak
img/5.jpg,Animalia,cat
"""


@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        write_image(tmp_path / "img" / f"{i}.jpg", seed=i)
    (tmp_path / "train.csv").write_text(ROWS)
    return tmp_path


def build(root, on_bad_image="raise", **dataset):
    dataset.setdefault("VAL_FRACTION", 0.34)
    node = DatasetConfig(NAME="manifest", ROOT=None if root is None else str(root), **dataset)
    return build_data(DataConfig(DATASET=node, IMG_SIZE=8, ON_BAD_IMAGE=on_bad_image), seed=0)


def labels(bundle):
    found = {}
    for dataset in (bundle.train, bundle.val):
        for i in range(len(dataset)):
            found[os.fsdecode(dataset.listing.paths[i])] = dataset[i][1].tolist()
    return found


def test_columns_are_levels_and_empty_cells_unknown(folder):
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
        lambda text: (
            text.replace(",", " , ").replace(' , "lynx ,  wild"', ',"lynx, wild"').encode()
        ),
        lambda text: text.rstrip("\n").encode(),
    ],
    ids=["byte-order mark", "Windows line ends", "blank lines", "spaces", "no last line end"],
)
def test_variants_of_the_file_mean_the_same(folder, change):
    expected = labels(build(folder))
    (folder / "train.csv").write_bytes(change(ROWS))
    bundle = build(folder)
    assert bundle.taxonomy is not None
    assert bundle.taxonomy.levels[1].classes == ("cat", "lynx, wild", "oak")
    assert labels(bundle) == expected


def test_levels_choose_and_order_the_columns(folder):
    taxonomy = build(folder, LEVELS=["species"]).taxonomy
    assert taxonomy is not None
    assert taxonomy.names == ("species",)
    (folder / "train.csv").write_text(
        "a,path,b\nx,img/0.jpg,q\ny,img/1.jpg,p\nx,img/2.jpg,q\ny,img/3.jpg,p\n"
    )
    taxonomy = build(folder, LEVELS=["b", "a"], IMAGE_COLUMN="path").taxonomy
    assert taxonomy is not None
    assert taxonomy.names == ("b", "a")


def test_validation_manifest_is_encoded_with_training_classes(folder):
    (folder / "val.csv").write_text(
        "species,image,kingdom\noak,img/0.jpg,Plantae\n,img/1.jpg,Animalia\n"
    )
    bundle = build(folder)
    assert len(bundle.train) == 6
    assert [bundle.val[i][1].tolist() for i in range(2)] == [[1, 2], [0, -1]]
    (folder / "val.csv").rename(folder / "check.csv")
    assert len(build(folder, VAL="check.csv").val) == 2


def test_paths_start_from_root_or_from_the_manifest(folder, tmp_path_factory):
    assert build(None, TRAIN=str(folder / "train.csv")).train[0][0].shape == (3, 8, 8)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "list.csv"
    elsewhere.write_text(ROWS)
    assert build(folder, TRAIN=str(elsewhere)).train[0][0].shape == (3, 8, 8)
    with pytest.raises(DataError, match=r"DATA\.DATASET\.ROOT"):
        build(None, TRAIN=str(elsewhere))
    elsewhere.write_text(ROWS.replace("img/", f"{folder}/img/"))
    assert build(None, TRAIN=str(elsewhere)).train[0][0].shape == (3, 8, 8)


def test_missing_and_damaged_images_are_left_out_and_named(folder):
    (folder / "img" / "0.jpg").unlink()
    (folder / "img" / "1.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"img/0\.jpg"):
        labels(build(folder))
    bundle = build(folder, on_bad_image="skip")
    assert set(labels(bundle)) == {f"img/{i}.jpg" for i in (2, 3, 4, 5)}
    assert all(name in " ".join(bundle.report) for name in ("img/0.jpg", "img/1.jpg"))


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_that_are_not_there_are_found_at_the_start(folder, run, monkeypatch, split):
    (folder / "val.csv").write_text(ROWS)
    build(folder)  # the negative control: all are there, if not intact
    rows = "".join(f"img/no{i}.jpg,Animalia,cat\n" for i in range(7))
    (folder / f"{split}.csv").write_text(ROWS + rows)
    (folder / "img/no0.jpg").symlink_to("gone")
    with pytest.raises(DataError) as caught:
        build(folder)
    assert all(text in str(caught.value) for text in (f"{split}.csv", "7 of 13", "img/no0.jpg"))
    assert len(build(folder, "skip").train) == 6
    checked = run("check-data", "data=manifest", f"DATA.DATASET.ROOT={folder}")
    assert checked.code == 1
    assert all(f"img/no{i}.jpg" in checked.err for i in range(7))
    monkeypatch.setenv("LOCAL_RANK", "1")  # another process of this machine looks
    build(folder)


@pytest.mark.parametrize("place", ["train", "train_images", "images"])
def test_a_table_of_ids_beside_a_folder_of_images(tmp_path, place):
    for i in range(6):
        write_image(tmp_path / place / f"{i}.jpg", seed=i)
    rows = "".join(f"\n{'ab'[i % 2]},{i}" for i in range(6))
    (tmp_path / "train.csv").write_text(f"label,id{rows}")
    bundle = build(tmp_path)
    assert bundle.taxonomy is not None
    assert bundle.taxonomy.names == ("label",)
    assert labels(bundle) == {f"{place}/{i}.jpg": [i % 2] for i in range(6)}


@pytest.mark.parametrize(
    ("old", "new", "there"),
    [
        ("0.jpg", "0.JPG", "img/0.jpg"),
        (".jpg", ".png", "img/0.jpg"),
        ("img/", "Img/", "img/0.jpg"),
        ("img/0.jpg", "IMG/0.tif", "img/0.jpg"),
    ],
)
def test_a_file_of_another_case_or_ending_is_named(folder, old, new, there):
    (folder / "train.csv").write_text(ROWS.replace(old, new))
    with pytest.raises(DataError, match=rf"there is {folder}/{there}"):
        build(folder)
    (folder / "train.csv").write_text(ROWS.replace("0.jpg", "gone.jpg"))
    with pytest.raises(DataError, match=r"gone\.jpg") as caught:
        build(folder)
    assert "there is" not in str(caught.value)


def test_misspelled_levels_are_mistakes_of_the_configuration(folder):
    with pytest.raises(ConfigError, match="'species'") as caught:
        build(folder, LEVELS=["kingdm", "specie"])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == (
        ["DATA.DATASET.LEVELS"] * 2
    )
    assert caught.value.exit_code == 2


def test_long_paths_are_read_and_those_of_no_file_refused(folder):
    (folder / "train.csv").write_text(ROWS.replace("img/0.jpg", "12 " * 99))
    with pytest.raises(DataError, match=r"1 of \d images not found"):
        build(folder)
    deep = "/".join(["a" * 99] * 3)
    write_image(folder / deep / "0.jpg")
    (folder / "train.csv").write_text(ROWS.replace("img/0.jpg", f"{deep}/0.jpg"))
    assert f"{deep}/0.jpg" in labels(build(folder))


@pytest.mark.parametrize("split", ["val", "test"])
def test_images_that_occur_twice_are_counted(folder, split):
    (folder / f"{split}.csv").write_text(ROWS.replace("img/", "img/../img/"))
    assert "also held out" not in " ".join(build(folder).report)
    (folder / f"{split}.csv").write_text(ROWS)
    (line,) = (line for line in build(folder).report if "also held out" in line)
    assert line.startswith("6 training images")
    assert line.endswith("img/0.jpg")
    (folder / f"{split}.csv").write_text("image,kingdom,species\nimg/0.jpg,Animalia,cat\n")
    (folder / "train.csv").write_text(ROWS.replace("img/0", "img/1"))
    (line,) = (line for line in build(folder).report if "several labels" in line)
    assert line.startswith("1 training image ")
    assert "also held out" not in " ".join(build(folder).report)


def parents(*cells):
    return "".join(f"img/{i}.jpg,{cell}\n" for i, cell in enumerate(cells))


def test_a_name_under_several_parents_is_counted(folder):
    cells = ["asters,daisy", "asters,daisy", "roses,daisy", "roses,dog", ",dog", "asters,"]
    (folder / "train.csv").write_text("image,family,species\n" + parents(*cells))
    (line,) = (line for line in build(folder).report if "daisy stands" in line)
    assert "asters (2 rows), roses (1 row)" in line
    assert "dog" not in line
    (folder / "train.csv").write_text(ROWS)
    assert "stands under" not in " ".join(build(folder).report)


@pytest.mark.parametrize(
    ("cells", "twins"),
    [
        (["a,Daisy", "a,daisy", "b,dog", "b,dog"], ["'Daisy' and 'daisy'"]),
        (
            ["a,dog rose", "b,dog  Rose", "b,oak", "A,oak"],
            ["'A' and 'a'", "'dog  Rose' and 'dog rose'"],
        ),
        (["a,daisy", "a,daisies", "b,dog", "b,dog"], []),
    ],
)
def test_classes_that_differ_in_case_or_spaces_are_named(folder, cells, twins):
    (folder / "train.csv").write_text("image,family,species\n" + parents(*cells))
    lines = [line for line in build(folder, VAL="train.csv").report if "case or spaces" in line]
    assert [line.rpartition(": ")[2] for line in lines] == twins


@pytest.mark.parametrize("last", ["img/5.jpg,Animalia", "img/5.jpg"])
def test_a_row_with_fewer_cells_is_named_by_its_line(folder, last):
    rows = ROWS.replace("img/5.jpg,Animalia,cat", last)
    (folder / "val.csv").write_text(ROWS)
    (folder / "train.csv").write_text(rows)
    (line,) = (line for line in build(folder).report if "fewer cells" in line)
    assert f"line 7: {last}" in line
    (folder / "train.csv").write_text(ROWS + "\n,,\n")
    assert "fewer cells" not in " ".join(build(folder).report)


def test_a_label_is_one_line(folder):
    (folder / "train.csv").write_text(ROWS.replace("cat", '"cat\nfish"'))
    bundle = build(folder)
    assert bundle.taxonomy is not None
    assert "cat fish" in bundle.taxonomy.levels[1].classes


def test_a_finished_run_reads_no_data(folder, run):
    words = ["train", "data=manifest", f"DATA.DATASET.ROOT={folder}", "MODEL.NAME=test_resnet"]
    words += ["DATA.DATASET.VAL_FRACTION=0.34", "DATA.IMG_SIZE=32", "TRAIN.EPOCHS=1"]
    words += ["EXPERIMENT.DEVICE=cpu", "DATA.NUM_WORKERS=0", "TRAIN.AUTO_RESUME=True"]
    assert run(*words).code == 0
    (folder / "train.csv").unlink()
    assert run(*words).code == 0
    assert run(*words, "TRAIN.EPOCHS=2").code != 0
