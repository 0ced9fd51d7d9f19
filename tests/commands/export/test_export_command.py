"""`linnaeus export` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from linnaeus.commands.export.options import read
from linnaeus.errors import ConfigError
from tests.helpers.runs import Run
from tests.helpers.trained import save_run, spec_of, write_images


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_run(tmp_path / "runs" / "birds", spec_of())
    write_images(tmp_path / "photos", 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_where_the_file_is_and_how_it_was_checked(desk: Path, run: Run) -> None:
    outcome = run("export", "runs/birds", "--format", "timm", "--level", "order")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("runs/birds/export/timm  1.5 MB\n")
    assert "compared with the run on 8 images of noise" in outcome.out
    assert "logits differ by at most" in outcome.out
    outcome = run(
        "export", "--images", "photos/000.png", "photos/001.png", "--format", "safetensors", "runs/birds",
        "--output", "birds.safetensors", "--checkpoint", "last",
    )  # fmt: skip
    assert (desk / "birds.safetensors").is_file()
    assert "on 2 images of --images: logits differ by at most 0 " in outcome.out
    assert "last.pt" in outcome.err
    outcome = run("predict", "birds.safetensors", "photos", "--device", "cpu")
    assert (outcome.code, outcome.out.count("species")) == (0, 2)


def test_all_problems_of_a_command_line_are_told_at_once(desk: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(["runs/bird", "--format", "onyx", "--outputs=p", "--images", "x.jpg", "--foo"])
    for message in (
        "RUN: there is no run or checkpoint runs/bird", "--format: 'onyx' is none of", "did you mean onnx",
        "--outputs: 'p' is none of probabilities, logits", "--images: x.jpg: there is no such file",
        "--foo: no such option",
    ):  # fmt: skip
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="--format: is missing; give one of safetensors, onnx"):
        read(["runs/birds"])
    with pytest.raises(ConfigError, match="name the folder of one run"):
        read(["runs/birds", "runs/birds", "--format", "onnx"])


def test_it_does_not_run_under_torchrun(desk: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    outcome = run("export", "runs/birds", "--format", "onnx")
    assert outcome.code == 2
    assert "run it without torchrun" in outcome.err
