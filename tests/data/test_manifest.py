import pytest

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.runtime.errors import DataError
from tests.helpers.datasets import write_image
from tests.helpers.layouts import levels, paths

ROWS = """image,kingdom,species
img/0.jpg,Animalia,cat
img/1.jpg,Animalia,"lynx, wild"
img/2.jpg,Plantae,
img/3.jpg,,oak
img/4.jpg,Plantae,oak
img/5.jpg,Animalia,cat
"""
LABELS = {
    f"img/{i}.jpg": label
    for i, label in enumerate([[0, 0], [0, 1], [1, -1], [-1, 2], [1, 2], [0, 0]])
}


@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        write_image(tmp_path / f"img/{i}.jpg", seed=i)
    (tmp_path / "train.csv").write_text(ROWS)
    return tmp_path


def build(root, on_bad_image="raise", **dataset):
    dataset.setdefault("VAL_FRACTION", 0.34)
    node = DatasetConfig(NAME="manifest", ROOT=None if root is None else str(root), **dataset)
    return build_data(DataConfig(DATASET=node, IMG_SIZE=8, ON_BAD_IMAGE=on_bad_image), seed=0)


def labels(bundle):
    return {
        path: dataset[i][1].tolist()
        for dataset in (bundle.train, bundle.val)
        for i, path in enumerate(paths(dataset))
    }


def notes(root, text):
    """The lines of the report with a text."""
    return [line for line in build(root).report if text in line]


def test_columns_are_levels_and_empty_cells_unknown(folder):
    bundle = build(folder)
    assert levels(bundle) == {
        "kingdom": ("Animalia", "Plantae"),
        "species": ("cat", "lynx, wild", "oak"),
    }
    assert bundle.taxonomy.parents == ((0, 0, 1),)
    assert labels(bundle) == LABELS
    assert bundle.train[0][0].shape == (3, 8, 8)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + ROWS.rstrip("\n"),
        ROWS.replace("\n", "\r\n\r\n"),
        ROWS.replace(",", " , ").replace(' , "lynx ,  wild"', ',"lynx, wild"'),
    ],
    ids=["byte-order mark", "Windows line ends and blank lines", "spaces"],
)
def test_variants_of_the_file_mean_the_same(folder, text):
    (folder / "train.csv").write_bytes(text.encode())
    bundle = build(folder)
    assert levels(bundle)["species"] == ("cat", "lynx, wild", "oak")
    assert labels(bundle) == LABELS


def test_validation_manifest_is_encoded_with_training_classes(folder):
    rows = "species,image,kingdom\noak,img/0.jpg,Plantae\n,img/1.jpg,Animalia\n"
    (folder / "val.csv").write_text(rows)
    bundle = build(folder)
    assert len(bundle.train) == 6
    assert [bundle.val[i][1].tolist() for i in range(2)] == [[1, 2], [0, -1]]
    (folder / "val.csv").rename(folder / "check.csv")
    assert len(build(folder, VAL="check.csv").val) == 2


def test_paths_start_from_root_or_from_the_manifest(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "list.csv"
    elsewhere.write_text(ROWS)
    with pytest.raises(DataError, match=r"DATA\.DATASET\.ROOT"):
        build(None, TRAIN=str(elsewhere))
    found = [build(None, TRAIN=str(folder / "train.csv")), build(folder, TRAIN=str(elsewhere))]
    elsewhere.write_text(ROWS.replace("img/", f"{folder}/img/"))
    found.append(build(None, TRAIN=str(elsewhere)))
    assert [bundle.train[0][0].shape for bundle in found] == [(3, 8, 8)] * 3


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_that_are_not_there_are_found_at_the_start(folder, run, monkeypatch, split):
    (folder / "val.csv").write_text(ROWS)
    build(folder)  # the negative control: all are there, if not intact
    rows = "".join(f"img/no{i}.jpg,Animalia,cat\n" for i in range(7))
    (folder / f"{split}.csv").write_text(ROWS + rows)
    (folder / "img/no0.jpg").symlink_to("gone")
    with pytest.raises(DataError, match=rf"{split}\.csv.*7 of 13.*img/no0\.jpg"):
        build(folder)
    bundle = build(folder, "skip")
    assert [len(bundle.train), len(bundle.val)] == [6, 6]
    checked = run("check-data", "data=manifest", f"DATA.DATASET.ROOT={folder}")
    assert checked.code == 1
    assert all(f"img/no{i}.jpg" in checked.err for i in range(7))
    monkeypatch.setenv("LOCAL_RANK", "1")  # another process of this machine looks
    build(folder)


@pytest.mark.parametrize(("old", "new"), [(".jpg", ".png"), ("img/0.jpg", "IMG/0.tif")])
def test_a_file_of_another_case_or_ending_is_named(folder, old, new):
    (folder / "train.csv").write_text(ROWS.replace(old, new))
    with pytest.raises(DataError, match=rf"there is {folder}/img/0\.jpg"):
        build(folder)


def test_images_that_occur_twice_are_counted(folder):
    (folder / "val.csv").write_text(ROWS.replace("img/", "img/../img/"))
    assert not notes(folder, "also held out")
    (folder / "val.csv").write_text(ROWS)
    (line,) = notes(folder, "also held out")
    assert line.startswith("6 training images")
    assert line.endswith("img/0.jpg")
    (folder / "val.csv").write_text("image,kingdom,species\nimg/0.jpg,Animalia,cat\n")
    (folder / "train.csv").write_text(ROWS.replace("img/0", "img/1"))
    (line,) = notes(folder, "several labels")
    assert line.startswith("1 training image ")
    assert not notes(folder, "also held out")


def write_parents(folder, *cells):
    rows = "".join(f"img/{i}.jpg,{cell}\n" for i, cell in enumerate(cells))
    (folder / "train.csv").write_text("image,family,species\n" + rows)


def test_a_name_under_several_parents_is_counted(folder):
    cells = ["asters,daisy", "asters,daisy", "roses,daisy", "roses,dog", ",dog", "asters,"]
    write_parents(folder, *cells)
    (line,) = notes(folder, "stands under")
    assert "asters (2 rows), roses (1 row)" in line
    assert "dog" not in line


@pytest.mark.parametrize(
    ("cells", "twins"),
    [
        (
            ["a,dog rose", "b,dog  Rose", "b,oak", "A,oak"],
            ["'A' and 'a'", "'dog  Rose' and 'dog rose'"],
        ),
        (["a,daisy", "a,daisies", "b,dog", "b,dog"], []),
    ],
)
def test_classes_that_differ_in_case_or_spaces_are_named(folder, cells, twins):
    write_parents(folder, *cells)
    (folder / "val.csv").write_text((folder / "train.csv").read_text())
    lines = notes(folder, "case or spaces")
    assert [line.rpartition(": ")[2] for line in lines] == twins


def test_a_row_with_fewer_cells_is_named_by_its_line(folder):
    (folder / "val.csv").write_text(ROWS)
    last = "img/5.jpg,Animalia"
    (folder / "train.csv").write_text(ROWS.replace(f"{last},cat", last))
    (line,) = notes(folder, "fewer cells")
    assert f"line 7: {last}" in line
    (folder / "train.csv").write_text(ROWS + "\n,,\n")
    assert not notes(folder, "fewer cells")


def test_a_finished_run_reads_no_data(folder, run):
    words = ["train", "data=manifest", f"DATA.DATASET.ROOT={folder}", "MODEL.NAME=test_resnet"]
    words += ["DATA.DATASET.VAL_FRACTION=0.34", "DATA.IMG_SIZE=32", "TRAIN.EPOCHS=1"]
    words += ["EXPERIMENT.DEVICE=cpu", "DATA.NUM_WORKERS=0", "TRAIN.AUTO_RESUME=True"]
    assert run(*words).code == 0
    (folder / "train.csv").unlink()
    assert run(*words).code == 0
    assert run(*words, "TRAIN.EPOCHS=2").code != 0
