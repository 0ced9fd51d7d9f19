"""What training would see and do, before it: the contact sheet and the dry run."""

import pytest
from PIL import Image

from tests.helpers.runs import SMALL

AUTOBATCH = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=16")


def files(folder):
    """Each file and folder below, with the time when a file changed."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.is_file() and path.stat().st_mtime_ns for name, path in paths.items()}


def test_a_preview_shows_the_images_and_trains_nothing(run, tmp_path):
    for name, color in (("owl", "red"), ("tit", "blue")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (32, 32), color).save(tmp_path / "data" / name / f"{number}.png")
    before = files(tmp_path)
    argv = (*SMALL, "DATA.DATASET.NAME=imagefolder", "DATA.DATASET.ROOT=data")
    outcome = run("train", *argv, "~DATA.DATASET.NUM_CLASSES", "--preview", "samples.png")
    assert outcome.code == 0, outcome.err
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.width > 1000
        colors = {color for _, color in picture.convert("RGB").getcolors(picture.size[0] ** 2)}
    assert {(255, 0, 0), (0, 0, 255)} <= colors
    assert files(tmp_path).keys() - before.keys() == {"samples.png"}


def test_a_preview_is_for_images(run, tmp_path):
    points = ("DATA.DATASET._target_=tests.cli.tiny.Points", "EXPERIMENT.DEVICE=cpu")
    outcome = run("train", *points, "--preview", "samples.png")
    assert (outcome.code, "--preview" in outcome.err) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("autobatch", [(), AUTOBATCH])
def test_a_dry_run_leaves_nothing(run, tmp_path, autobatch):
    outcome = run("train", *SMALL, *autobatch, "--dry-run")
    assert (outcome.code, files(tmp_path)) == (0, {}), outcome.err
    assert outcome.err.count("dry run") + outcome.out.count("dry run") == 2


def test_a_dry_run_leaves_an_earlier_run_as_it_is(run, tmp_path):
    assert run("train", *SMALL, "TRAIN.EPOCHS=1").code == 0
    folder = tmp_path / "runs" / "small"
    with Image.open(folder / "logs" / "samples.png") as picture:
        assert picture.width > 1000
    before = files(tmp_path)
    for more in ((), ("TRAIN.AUTO_RESUME=True",)):
        outcome = run("train", *SMALL, *more, "--dry-run")
        assert outcome.code == 0, outcome.err
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "mistake",
    [
        "DATA.DATASET.NAME=imagefolder",
        "EXPERIMENT.OUTPUT_DIR=/dev/null/x",
        "TRAIN.CALLBACKS=[{_target_: tests.cli.tiny.Missing}]",
    ],
)
def test_a_mistake_ends_a_dry_run_as_it_ends_training(run, tmp_path, mistake):
    wet, dry = run("train", *SMALL, mistake), run("train", *SMALL, mistake, "--dry-run")
    assert (dry.code, dry.err.splitlines()[-1]) == (2, wet.err.splitlines()[-1])
    assert not files(tmp_path)
