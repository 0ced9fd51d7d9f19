"""How the layout of a data set gives its splits and labels, and what is refused."""

import os
import re
from pathlib import Path

import pytest

from linnaeus.data.split_file import save_split
from linnaeus.runtime.errors import ConfigError, DataError
from tests.helpers.datasets import write_image
from tests.helpers.layouts import CLASSES, build, folders, levels, paths, sizes, table

FLAT = {"class": CLASSES}
LABEL = {"label": CLASSES}


def notes(bundle, text):
    """The lines of the report with a text."""
    return [line for line in bundle.report if text in line]


@pytest.fixture
def manifest(tmp_path):
    """Gives the data of a manifest, which it writes first where it gets columns.

    Such as "label: cat dog | split: train train val". The cells of each column recur.
    """

    def build_manifest(text="", *, num=24, file="train.csv", **dataset):
        if text:
            columns = {name: cells.split() for name, cells in re.findall(r"(\w+): ([^|]+)", text)}
            row = lambda i: ",".join(cells[i % len(cells)] for cells in columns.values())  # noqa: E731
            table(tmp_path, ",".join(["image", *columns]), row, num=num, name=file)
        return build(tmp_path, "manifest", **dataset)

    return build_manifest


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("Training", "Testing"),
        ("cub_train", "cub_test"),
        ("seg_train/seg_train", "seg_test/seg_test"),
        ("birds/train2017", "birds/val2017"),
    ],
)
def test_folders_of_splits_are_no_level(tmp_path, train, val):
    folders(tmp_path, [train])
    folders(tmp_path, [val], num=2)
    bundle = build(tmp_path)
    assert (levels(bundle), sizes(bundle)) == (FLAT, [12, 6])


@pytest.mark.parametrize("classes", [("car", "plane", "train"), ("car", "train", "val")])
def test_classes_called_like_splits_are_classes(tmp_path, classes):
    assert levels(build(folders(tmp_path, ["{}"], classes, num=5))) == {"class": classes}


@pytest.mark.parametrize("num", [2, 30])
def test_many_folders_with_nearly_the_same_classes_are_refused(tmp_path, num):
    """As folds, sites and patients have them, also in a folder of training; not as a taxonomy has them."""
    for i in range(num):
        classes = ["benign", "malign"] if i % 3 < 2 else ["benign"]
        folders(tmp_path / "data/train", [f"patient{i}"], classes, num=1)
        folders(tmp_path / "nested", [f"genus{i}"], [f"a{i}", f"b{i}", "vulgaris", "alba"[i % 2 :]])
    for root in ("data", "data/train"):
        with pytest.raises(ConfigError, match=r"ROOT.*patient0.*benign, malign.*FOLD.*LEVELS"):
            build(tmp_path / root)
    folders(tmp_path / "data", ["val/patient0"], ["benign"])
    with pytest.raises(ConfigError, match="patient0"):
        build(tmp_path / "data")
    assert len(levels(build(tmp_path / "data", LEVELS=["patient", "tumor"]))["patient"]) == num
    assert len(levels(build(tmp_path / "nested"))["level1"]) == num


def test_folders_of_runs_are_no_classes(tmp_path, run):
    """Such as those of a run that starts among the class folders; a class folder may hold such names."""
    for seed, name in enumerate(("cat/0", "cat/1", "dog/0", "dog/1")):
        write_image(tmp_path / f"{name}.png", seed=seed)
    (tmp_path / "dog/config.yaml").touch()
    command = [
        *("train", "data=imagefolder", f"DATA.DATASET.ROOT={tmp_path}", "DATA.IMG_SIZE=16"),
        *("DATA.DATASET.VAL_FRACTION=0.5", "DATA.BATCH_SIZE=2", "MODEL.NAME=test_resnet"),
        *("TRAIN.EPOCHS=1", "EXPERIMENT.NAME=a", f"EXPERIMENT.OUTPUT_DIR={tmp_path}/runs/today"),
    ]
    for _ in range(2):
        assert run(*command).code == 0
        assert levels(build(tmp_path, VAL_FRACTION=0.5)) == {"class": ("cat", "dog")}
        write_image(tmp_path / "runs/today/plot.png")


def test_train_beside_folders_without_classes_is_a_split(tmp_path):
    folders(tmp_path, ["train"])
    folders(tmp_path, ["car"], [""])
    folders(tmp_path, ["extra"], num=30)
    bundle = build(tmp_path)
    assert (levels(bundle), sum(sizes(bundle))) == (FLAT, 12)
    assert notes(bundle, "not read: car, extra")
    folders(tmp_path / "cars", ["train"], ["steam", "diesel"])
    folders(tmp_path / "cars", ["car"], ["van", "taxi"])
    assert levels(build(tmp_path / "cars"))["level1"] == ("car", "train")


@pytest.mark.parametrize("layout", ["{}/images", "all/{}/crops"])
def test_a_level_with_one_name_is_no_level(tmp_path, layout):
    folders(tmp_path, [f"train/{layout}", f"val/{layout}"])
    assert levels(build(tmp_path)) == levels(build(tmp_path / "train")) == FLAT
    folders(tmp_path / "two", ["train/A", "val/A"], ["x"])  # one name in validation alone
    folders(tmp_path / "two", ["train/B"], ["x", "y"])
    assert levels(build(tmp_path / "two"))["level1"] == ("A", "B")


def test_several_folders_of_a_split_are_refused(tmp_path):
    folders(tmp_path, ["train", "dev", "eval"])
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.VAL.*dev, eval"):
        build(tmp_path)
    assert sizes(build(tmp_path, VAL="dev")) == [12, 12]
    folders(tmp_path, ["val"], num=1)
    assert sizes(build(tmp_path)) == [12, 3]


def test_a_third_split_is_for_the_end(tmp_path):
    """Images in it without a label, as in a competition, are not evaluated."""
    folders(tmp_path / "three", ["train", "val", "test"])
    assert sizes(build(tmp_path / "three")) == [12, 12, 12]
    folders(tmp_path / "three", ["other"], num=1)
    assert sizes(build(tmp_path / "three", TEST="other")) == [12, 12, 3]
    folders(tmp_path / "flat", ["train"], num=5)
    folders(tmp_path / "flat", ["test"], [""])
    assert sizes(build(tmp_path / "flat")) == [12, 3]


@pytest.mark.parametrize(
    "column",
    [
        "Split: Validation TRAIN Training train",
        "is_valid: True False False False",
        "is_training_image: 0 1 1 1",
    ],
)
def test_a_column_of_splits_is_no_level(manifest, column):
    bundle = manifest(f"label: cat dog fox | {column}")
    assert levels(bundle) == LABEL
    assert paths(bundle.val) == [f"img/{i}.jpg" for i in range(0, 24, 4)]


def test_a_column_named_like_splits_has_to_say_them(manifest):
    """Unless it is a label or the group, or another column is that of splits."""
    columns = "label: cat dog fox | Phase: train train train extra extra extra"
    with pytest.raises(ConfigError, match=r"SPLIT_COLUMN.*Phase.*extra.*LEVELS"):
        manifest(columns, LEVELS=["label"])
    assert list(levels(manifest(LEVELS=["Phase"]))) == ["Phase"]
    assert levels(manifest(GROUP_COLUMN="Phase", VAL_FRACTION=0.5)) == LABEL
    assert sizes(manifest(f"{columns} | is_val: 0 1", LEVELS=["label"])) == [12, 12]
    other = columns.replace("Phase", "moon_phase")
    assert levels(manifest(other, LEVELS=["label"])) == LABEL


def test_columns_that_are_not_read_are_named(manifest):
    columns = "label: cat dog fox | width: 1 2 3 4 | site: a a a b b b c c c d d d e e e f f f"
    bundle = manifest(columns, LEVELS=["label"], GROUP_COLUMN="site")
    assert [line.rpartition(": ")[2] for line in notes(bundle, "not read")] == ["width"]


def test_groups_and_attributes_are_no_levels(manifest):
    """Whether they nest or not; alone, such a column is the label."""
    with pytest.raises(ConfigError, match=r"LEVELS.*CameraType: 6 values.*GROUP_COLUMN"):
        manifest("label: cat dog fox | CameraType: c1 d1 f1 c2 d2 f2")
    assert levels(manifest(GROUP_COLUMN="CameraType")) == LABEL
    assert len(levels(manifest(LEVELS=["label", "CameraType"]))) == 2
    assert levels(manifest("CameraType: cat dog fox")) == {"CameraType": CLASSES}
    assert len(levels(manifest("label: cat dog fox | form: c1 d1 f1 c2 d2 f2"))) == 2


@pytest.mark.parametrize(
    ("cells", "separator"),
    [
        (("magpie;black", "tit", ";"), ";"),
        (('"a,b"', "b", "a"), ","),
        (("\"['a', 'it''s']\"", "\"['a', 'b']\"", "\"['b']\""), ","),
    ],
)
def test_several_labels_in_a_cell_are_no_class(manifest, tmp_path, cells, separator):
    table(tmp_path, "image,label", lambda i: cells[i % 3])
    with pytest.raises(ConfigError, match=rf"label: .*LABEL_SEPARATOR '\{separator}'"):
        manifest()
    assert len(levels(manifest(LEVELS=["label"]))["label"]) == 3
    names = levels(manifest(LABEL_SEPARATOR=separator))["label"]
    assert not {*"".join(names)} & {*"[]|;,"}


def test_a_comma_in_a_name_parts_no_labels(manifest, tmp_path):
    names = ("tench, Tinca tinca", "crane, Grus", "crane, machine")
    table(tmp_path, "image\tlabel", lambda i: names[i % 3])
    assert len(levels(manifest())["label"]) == 3


def test_the_column_of_splits_can_be_named(manifest):
    columns = "label: cat dog fox | source: val train test train"
    bundle = manifest(columns, SPLIT_COLUMN="Source")
    assert sizes(bundle) == [12, 6, 6]
    for wrong in ({"SPLIT_COLUMN": "label"}, {"SPLIT_COLUMN": "source", "FOLD": 2}):
        with pytest.raises(ConfigError, match="SPLIT_COLUMN"):
            manifest(**wrong)
    with pytest.raises(ConfigError, match=r"SPLIT_COLUMN.*set, split"):
        manifest("set: train val | split: train val")


def test_splits_in_manifests_of_their_own(manifest, tmp_path):
    """A test manifest without labels is not evaluated."""
    for name, num in {"train": 12, "val": 6, "test": 3}.items():
        bundle = manifest(f"label: cat dog fox | split: {name}", file=f"{name}.csv", num=num)
    assert sizes(bundle) == [12, 6, 3]
    for text in ("", "image\nimg/0.jpg\n"):
        (tmp_path / "test.csv").write_text(text)
        bundle = manifest()
        assert (sizes(bundle), len(notes(bundle, "no test split"))) == ([12, 6], 1)
    (tmp_path / "val.csv").unlink()
    assert sizes(manifest()) == [10, 2]


@pytest.mark.parametrize(
    ("columns", "look"),
    [
        ("label: cat dog fox | width: 1 2 3 4 5", "width: 5 numbers"),
        ("label: cat dog fox | part: one", "part: 1 value"),
        ("label: cat dog fox | text: a b c d e f g h i j k l m n o p q r s t u v w x", "text: 24"),
        ("label: cat dog fox | form: a b c d", "form: 4 values that do not nest"),
        (
            "score: .1 .2 .3 .4 .5 .6 .7 .8 .9 1.1 1.2 1.3 1.4 1.5 1.6 1.7 1.8 1.9 2.1 2.2",
            "score: 20",
        ),
    ],
)
def test_columns_that_are_no_levels_are_refused(manifest, columns, look):
    with pytest.raises(ConfigError, match=rf"DATA\.DATASET\.LEVELS.*{look}"):
        manifest(columns)


def test_words_for_unknown_labels_are_counted_once(manifest):
    """A class may have such a name: with a backslash in front, or in another case."""
    words = "label: \\None none Na None - NA | split: train val val train train"
    bundle = manifest(words, num=30)
    assert levels(bundle) == {"label": ("Na", "None", "none")}
    (line,) = notes(bundle, "unknown labels")
    assert line.endswith(": 5 'None', 5 '-', 5 'NA'")


NAMES = ("none", "None", "NA", "-", "null", "\\None", "\\\\nan", "cat")


@pytest.mark.parametrize("separator", [None, ";"])
def test_the_split_of_a_run_has_its_classes(manifest, tmp_path, separator):
    if separator is None:
        bundle = build(folders(tmp_path / "images", ["{}"], NAMES, num=5))
    else:
        held = [*({i} for i in range(7)), {1, 7}]
        cells = [",".join(str(int(i in each)) for i in range(8)) for each in held]
        table(tmp_path, f"image,{','.join(NAMES)}", lambda i: cells[i % 8], num=80)
        bundle = manifest()
    save_split(bundle, tmp_path / "split.csv")
    again = manifest(TRAIN="split.csv", LABEL_SEPARATOR=separator)
    assert levels(again) == levels(bundle) == {"class": tuple(sorted(NAMES))}
    for one, other in ((bundle.train, again.train), (bundle.val, again.val)):
        assert one.targets.tolist() == other.targets.tolist()
    assert not notes(again, "unknown")


def test_an_unusable_test_split_is_noted(tmp_path):
    """Where the configuration does not name it."""
    folders(tmp_path / "deep", ["train", "val"])
    folders(tmp_path / "deep", ["test/x"], ["y"])
    bundle = build(tmp_path / "deep")
    assert (sizes(bundle), len(notes(bundle, "no test split"))) == ([12, 12], 1)
    with pytest.raises(DataError, match="test: 2 levels"):
        build(tmp_path / "deep", TEST="test")


@pytest.mark.parametrize("place", ["", "images", "train_images", "train/more"])
def test_names_without_an_ending(manifest, tmp_path, place):
    files = [f"{i}.x{('.JPG', '.jpg', '.png')[i % 3]}" for i in range(9)]
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for file in files:
        (tmp_path / place / file).touch()
    folder = "more/" if "more" in place else ""
    rows = "".join(f"\n{CLASSES[i % 3]},{folder}{i}.x" for i in range(9))
    (tmp_path / "train.csv").write_text(f"label,id{rows}")
    bundle = manifest(VAL_FRACTION=0.3)
    assert levels(bundle) == LABEL
    found = paths(bundle.train) + paths(bundle.val)
    assert sorted(found) == sorted(str(Path(place, file)) for file in files)


@pytest.mark.parametrize("header", ["Image;Label", "Image\tLabel", "Image|Label"])
def test_dialects_of_csv(manifest, tmp_path, header):
    table(tmp_path, header, lambda i: CLASSES[i % 3])
    assert levels(manifest()) == {"Label": CLASSES}


def test_columns_of_flags_are_classes(manifest):
    """One in each row is a label, several are a set; a column `label` of 0 and 1 has two classes."""
    bundle = manifest("car: 1.0 0.0 0.0 | train: 0.0 1.0 0.0 | bus: 0.0 0.0 1.0")
    assert levels(bundle) == {"class": ("bus", "car", "train")}
    assert not bundle.taxonomy.is_multilabel
    bundle = manifest("car: 1 0 0 | train: 0 1 0 | bus: 1 0 0")
    assert bundle.taxonomy.is_multilabel
    assert {*map(tuple, bundle.train.targets.tolist())} == {(1, 1, 0), (0, 0, 1), (0, 0, 0)}
    assert levels(manifest("label: 0 1")) == {"label": ("0", "1")}
    bundle = manifest("sick: 1 0 0 | rusty: 0 1 0", LEVELS=["sick", "rusty"])
    assert levels(bundle) == {"class": ("rusty", "sick")}


def test_paths_with_backslashes_and_missing_roots_are_named(manifest, tmp_path):
    manifest("label: cat dog fox")
    with pytest.raises(ConfigError, match="nowhere"):
        build(tmp_path / "nowhere", "manifest", TRAIN=str(tmp_path / "train.csv"))
    text = (tmp_path / "train.csv").read_text()
    (tmp_path / "train.csv").write_text(text.replace("img/", ".\\img\\"))
    with pytest.raises(DataError, match="backslash"):
        manifest()


def test_a_level_that_most_images_lack_is_refused(tmp_path):
    folders(tmp_path, ["{}"], num=9)
    folders(tmp_path, ["cat/new", "dog/old"], [""], num=5)
    with pytest.raises(DataError, match=r"cat/new/0\.jpg, dog/old/0\.jpg;.*ALLOW_COARSE"):
        build(tmp_path)
    assert list(levels(build(tmp_path, ALLOW_COARSE=True))) == ["level1", "level2"]
    named = build(tmp_path, LEVELS=["animal"])
    assert levels(named) == {"animal": CLASSES}
    assert notes(named, "DATA.DATASET.LEVELS")
    folders(tmp_path, ["cat/new", "dog/old", "fox/red"], [""], num=10)
    assert list(levels(build(tmp_path))) == ["level1", "level2"]


def test_folders_that_systems_make_are_not_read(tmp_path):
    folders(tmp_path, ["train", "val"])
    for name in ("@eaDir", ".thumbnails"):
        folders(tmp_path, [name, f"train/{name}", f"train/cat/{name}", f"val/dog/{name}"], [""])
    bundle = build(tmp_path)
    assert (levels(bundle), sizes(bundle)) == (FLAT, [12, 12])


def test_spellings_of_an_accented_letter_are_one_class(manifest, tmp_path):
    names = ("Ho\u0308hle", "H\u00f6hle", "cat")
    folders(tmp_path, ["train"], names[::2])
    folders(tmp_path, ["val"], names[1:])
    assert levels(build(tmp_path)) == {"class": ("H\u00f6hle", "cat")}
    assert levels(manifest(f"label: {' '.join(names)}")) == {"label": ("H\u00f6hle", "cat")}


def test_a_class_folder_that_is_not_utf8_is_named(tmp_path):
    folders(tmp_path, ["{}"])
    (tmp_path / "cat").rename(os.fsdecode(os.fsencode(tmp_path) + b"/f\xe9lin"))
    with pytest.raises(DataError, match=r"f\\xe9lin"):
        build(tmp_path)


def test_what_is_not_read_is_counted_once(tmp_path):
    folders(tmp_path, ["train", "val", "extra"])
    for name in ("train/cat/notes", "val/dog/notes", "val/dog/Thumbs.db", "val/dog/.x"):
        (tmp_path / name).touch()
    beside, files = notes(build(tmp_path), "not read")
    assert "extra" in beside
    assert "no ending 2" in files


def test_folds_hold_out_each_image_once(tmp_path):
    """A class with one image is never held out; a test split stays what it is."""
    folders(tmp_path, ["train", "test"], num=7)
    folders(tmp_path, ["train"], ["rare"], num=1)
    held = []
    for fold in range(5):
        bundle = build(tmp_path, FOLD=fold)
        assert not {*paths(bundle.val)} & {*paths(bundle.train)}
        assert sum(sizes(bundle)) == 22 + 21
        assert any("'rare'" in line and "'cat'" not in line for line in bundle.report)
        held += paths(bundle.val)
    assert sorted(held) == [f"{each}/{i}.jpg" for each in CLASSES for i in range(7)]
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.FOLD"):
        build(tmp_path, FOLD=5)
    folders(tmp_path, ["val"])
    with pytest.raises(ConfigError, match=r"DATA\.DATASET\.FOLD.*val"):
        build(tmp_path, FOLD=0)


def test_a_column_of_folds_is_used(manifest):
    columns = "label: cat dog fox | fold: 0 0 0 1 1 1 2 2 2 3 3 3"
    bundle = manifest(columns, FOLD=2, SPLIT_COLUMN="fold")
    assert paths(bundle.val) == [f"img/{i}.jpg" for i in (6, 7, 8, 18, 19, 20)]
    assert levels(bundle) == LABEL
    for fold, column in ((2, None), (4, "fold")):
        with pytest.raises(ConfigError, match=r"FOLD.*0, 1, 2, 3|0, 1, 2, 3.*FOLD"):
            manifest(FOLD=fold, SPLIT_COLUMN=column)
    bundle = manifest(columns, file="test.csv", num=6, FOLD=2, SPLIT_COLUMN="fold")
    assert sizes(bundle) == [18, 6, 6]


def test_groups_stay_on_one_side(manifest, tmp_path):
    """Whatever the order of the rows; a class in one group alone is trained on."""
    labels = "cat cat cat cat dog dog dog dog fox fox fox fox "
    cameras = [f"camera{i // 4}" for i in range(48)]
    columns = f"label: {3 * labels + labels[:32]} owl owl owl owl | camera: {' '.join(cameras)}"
    manifest(columns, num=48, LEVELS=["label"])
    group = {f"img/{i}.jpg": camera for i, camera in enumerate(cameras)}
    held = []
    for fold in range(3):
        bundle = manifest(GROUP_COLUMN="camera", FOLD=fold, NUM_FOLDS=3)
        train, val = ({group[path] for path in paths(each)} for each in (bundle.train, bundle.val))
        assert val
        assert not train & val
        held += paths(bundle.val)
    assert sorted(held) == sorted(path for path in group if group[path] != "camera11")
    expected = paths(manifest(GROUP_COLUMN="Camera").val)
    assert 8 <= len(expected) <= 12
    header, *rows = (tmp_path / "train.csv").read_text().splitlines()
    (tmp_path / "train.csv").write_text("\n".join([header, *rows[::-1]]))
    backwards = manifest(GROUP_COLUMN="camera")
    assert sorted(paths(backwards.val)) == sorted(expected)
    for wrong in ({"name": "manifest", "GROUP_COLUMN": "place"}, {"GROUP_COLUMN": "camera"}):
        with pytest.raises(ConfigError, match="GROUP_COLUMN"):
            build(tmp_path, **wrong)
