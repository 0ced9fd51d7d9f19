"""`linnaeus export` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import Run
from tests.helpers.trained import save_run, spec_of, write_images


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_run(tmp_path / "runs" / "birds", spec_of())
    write_images(tmp_path / "photos", 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_becomes_a_file_for_other_programs(desk: Path, run: Run) -> None:
    outcome = run("export", "runs/birds", "--format", "timm", "--level", "order")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("runs/birds/export/timm ")
    outcome = run(
        "export", "--images", "photos/000.png", "photos/001.png", "--format", "safetensors", "runs/birds",
        "--output", "birds.safetensors", "--checkpoint", "last",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "last.pt" in outcome.err
    outcome = run("predict", "birds.safetensors", "photos", "--device", "cpu")
    assert (outcome.code, outcome.out.count("species")) == (0, 2)
