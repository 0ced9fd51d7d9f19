"""Every experiment in configs/ trains; a new file is tested without being entered here."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.conftest import Run

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SMALLER = (
    "EXPERIMENT.DEVICE=cpu", "MODEL.NAME=test_resnet", "DATA.IMG_SIZE=16", "TRAIN.EPOCHS=2",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=8", "DATA.DATASET.VAL_FRACTION=0.9", "TRAIN.VALIDATE_EVERY=2",
    "DATA.DATASET.NUM_SAMPLES=64", "DATA.DATASET.NUM_SAMPLES_VAL=16",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `data` that the experiments read, with every eighth image of the digits."""
    folder = tmp_path_factory.mktemp("data")
    script = runpy.run_path(str(ROOT / "examples" / "write_digits.py"))
    script["write_digits"](folder / "digits")
    for number, image in enumerate(sorted(folder.rglob("*.png"))):
        if number % 8:
            image.unlink()
    return folder


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_an_experiment_trains(config: Path, run: Run, data: Path, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(data)
    outcome = run("--cfg", str(config), *SMALLER)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "runs" / config.stem / "result.json").is_file(), "EXPERIMENT.NAME is the file's name"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_header_has_the_command_and_its_result(config: Path) -> None:
    header = re.match(r"(#.*\n)+", config.read_text())
    assert header
    assert f"--cfg configs/{config.name}" in header[0]
    assert re.search(r"top1/(digit|species) 0\.\d{4}", header[0])
