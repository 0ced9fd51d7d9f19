"""What training would see and do, before it: the contact sheet and the dry run."""

import pytest
from PIL import Image

from tests.helpers.runs import SMALL


def files(folder):
    """Each file and folder below, with the time when a file changed."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.is_file() and path.stat().st_mtime_ns for name, path in paths.items()}


def test_a_preview_shows_the_images_and_trains_nothing(run, tmp_path):
    for color in ("red", "blue"):
        (tmp_path / "data" / color).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (32, 32), color).save(tmp_path / f"data/{color}/{number}.png")
    before = files(tmp_path)
    argv = (*SMALL, "DATA.DATASET.NAME=imagefolder", "DATA.DATASET.ROOT=data")
    run("train", *argv, "~DATA.DATASET.NUM_CLASSES", "--preview", "samples.png").ok()
    with Image.open(tmp_path / "samples.png") as picture:
        colors = {color for _, color in picture.convert("RGB").getcolors(picture.width**2)}
    assert {(255, 0, 0), (0, 0, 255)} <= colors
    assert files(tmp_path).keys() - before.keys() == {"samples.png"}


def test_a_preview_is_for_images(run, tmp_path):
    points = ("DATA.DATASET._target_=tests.cli.tiny.Points", "EXPERIMENT.DEVICE=cpu")
    outcome = run("train", *points, "--preview", "samples.png")
    assert (outcome.code, "--preview" in outcome.err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_leaves_nothing_and_an_earlier_run_as_it_is(run, tmp_path):
    autobatch = ("DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=16")
    outcome = run("train", *SMALL, *autobatch, "--dry-run").ok()
    assert outcome.err.count("dry run") + outcome.out.count("dry run") == 2
    assert not files(tmp_path)
    run("train", *SMALL, "TRAIN.EPOCHS=1").ok()
    folder = tmp_path / "runs" / "small"
    with Image.open(folder / "logs" / "samples.png") as picture:
        assert picture.width > 1000
    before = files(tmp_path)
    for more in ((), ("TRAIN.AUTO_RESUME=True",)):
        run("train", *SMALL, *more, "--dry-run").ok()
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
