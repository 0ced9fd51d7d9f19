"""What the program itself says: about a command line, a run's folder, a disk, a device and its ranks."""

import os
import re
from errno import EDQUOT
from unittest.mock import Mock

import torch

from linnaeus.runtime.distributed import World, resolve_device
from linnaeus.runtime.files import why_not_written
from linnaeus.runtime.run_folder import claim_run_folder
from tests.helpers.messages import error_of

COMMAND_LINES = (
    "--fractions",
    "--cfg broken.yaml",
    "analyse",
    "xyzzy",
    "-cd . sweep TRAIN.EPOCHS=1,2",
    "TRAIN.EPOCHS=0 DATA.BATCHSIZE=3",
)


def test_messages(golden, run, tmp_path, monkeypatch):
    (tmp_path / "broken.yaml").write_text("DATA: [1,\n")
    messages = {line: run(*line.split(), "--print-config").err for line in COMMAND_LINES}

    file = tmp_path / "file"
    file.touch()
    messages["a folder that cannot be made"] = error_of(claim_run_folder, file / "r1")
    no_quota = OSError(EDQUOT, os.strerror(EDQUOT))
    text = why_not_written(no_quota, tmp_path, 3 * 2**30)
    messages["no quota"] = re.sub(r"has .* free", "has ... free", text)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    for device in ("gpu", "cuda:99"):
        messages[f"device {device}"] = error_of(resolve_device, device)
    alike = {"OPTIMIZER.LR": "0.002", "samples": "96"}
    control = Mock(gather=lambda facts: [facts, {**facts, "OPTIMIZER.LR": "0.5"}])
    world = World(torch.device("cpu"), control=control)
    messages["ranks that differ"] = error_of(world.check_equal, alike)
    golden("program", messages, folder=tmp_path)
