"""A contact sheet of what training would see."""

import pytest
from PIL import Image

from tests.helpers.runs import SMALL


def test_a_preview_draws_samples_and_trains_nothing(run, tmp_path):
    outcome = run("train", *SMALL, "--preview", "samples.png")
    assert outcome.code == 0, outcome.err
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.width > 1000 < picture.height
    assert [path.name for path in tmp_path.iterdir()] == ["samples.png"]


@pytest.mark.parametrize("file", ["samples.pdf", "missing/samples.png"])
def test_a_preview_that_cannot_be_written(run, file):
    outcome = run("train", *SMALL, "--preview", file)
    assert (outcome.code, "--preview" in outcome.err) == (2, True)


def test_a_preview_is_for_images(run, tmp_path):
    points = ("DATA.DATASET._target_=tests.cli.tiny.Points", "EXPERIMENT.DEVICE=cpu")
    outcome = run("train", *points, "--preview", "samples.png")
    assert (outcome.code, "--preview" in outcome.err) == (2, True)
    assert not list(tmp_path.iterdir())
