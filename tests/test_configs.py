"""Every experiment in configs/ trains; a new file is tested without being entered here.

An experiment that starts from another run has the command of that run in its header, with a name of its own.
"""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from tests.helpers.fashion import write_fashion_mnist

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RARE = ("1", "3", "8", "9")
SMALLER = (
    "EXPERIMENT.DEVICE=cpu",
    "MODEL.NAME=test_resnet",
    "DATA.IMG_SIZE=16",
    "TRAIN.EPOCHS=2",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=64",
    "DATA.DATASET.VAL_FRACTION=0.9",
    "TRAIN.VALIDATE_EVERY=2",
    "DATA.DATASET.NUM_SAMPLES=64",
    "DATA.DATASET.NUM_SAMPLES_VAL=16",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder `data` that the experiments read, as the example writes it, with every eighth image."""
    folder = tmp_path_factory.mktemp("data")
    script = runpy.run_path(str(ROOT / "examples" / "write_digits.py"))
    script["main"]([str(folder / "digits")])
    script["main"]([str(folder / "digits_rare"), "--rare", *RARE])
    write_fashion_mnist(folder, 200, 50)
    for number, image in enumerate(sorted(folder.rglob("*.png"))):
        if number % 8:
            image.unlink()
    return folder


def header_of(config):
    header = re.match(r"(#.*\n)+", config.read_text())
    assert header
    return header[0]


def earlier_runs(config):
    """Arguments of the header's commands that train under a name of their own."""
    text = re.sub(r"\\\n#\s*", "", header_of(config)).replace("configs/", f"{ROOT}/configs/")
    commands = re.findall(r"^#   linnaeus train (.* EXPERIMENT\.NAME=.*)$", text, re.MULTILINE)
    return [shlex.split(command) for command in commands]


@pytest.mark.e2e
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_an_experiment_trains(config, run, data, tmp_path):
    (tmp_path / "data").symlink_to(data)
    for arguments in earlier_runs(config):
        run(*arguments, *SMALLER, "TRAIN.EPOCHS=1").ok()
    is_builtin = "NAME: fashion_mnist" in config.read_text()
    own_data = [f"DATA.DATASET.ROOT={tmp_path}/data"] if is_builtin else []
    run("--cfg", str(config), *SMALLER, *own_data).ok()
    assert (tmp_path / "runs" / config.stem / "result.json").is_file(), (
        "EXPERIMENT.NAME is the file's name"
    )


def test_every_header_has_the_command_and_its_result():
    for config in CONFIGS:
        assert f"configs/{config.name}" in header_of(config)
        assert re.search(r"top1/(digit|species|article) 0\.\d{4}", header_of(config)), config
