"""What the program itself says: about a command line, a run's folder, a disk, a device and its ranks."""

import os
import re
import socket
from errno import EDQUOT
from unittest.mock import Mock

import torch

from linnaeus.config.schema import DistConfig
from linnaeus.runtime.distributed import World, join, resolve_device
from linnaeus.runtime.files import why_not_written
from linnaeus.runtime.run_folder import Claim, claim_run_folder
from linnaeus.training.metrics_file import MetricsFile
from tests.helpers.messages import error_of

COMMAND_LINES = (
    "+DATA.FOO=1",
    "EPOCHS",
    "--fractions",
    "--cfg broken.yaml",
    "analyse",
    "xyzzy",
    "-cd . sweep TRAIN.EPOCHS=1,2",
    "EXPERIMENT.SEED=-1",
    "TRAIN.EPOCHS=0 DATA.BATCHSIZE=3",
)


def test_messages(golden, run, tmp_path, monkeypatch):
    (tmp_path / "broken.yaml").write_text("DATA: [1,\n")
    messages = {line: run(*line.split(), "--print-config").err for line in COMMAND_LINES}

    run_folder, file = tmp_path / "r1", tmp_path / "file"
    file.touch()
    claim = Claim(run_folder)
    messages["a folder in use"] = error_of(Claim, run_folder)
    claim.id = "abc"
    claim.begin()
    claim.release()
    claim = Claim(run_folder)
    messages["a checkpoint of another run"] = error_of(
        claim.check_id, "def", run_folder / "checkpoints/last.pt"
    )
    run_folder.rename(tmp_path / "renamed")
    messages["a folder that was renamed"] = error_of(claim.check)
    claim.release()
    messages["a folder that cannot be made"] = error_of(claim_run_folder, file / "r1")
    messages["a file that cannot be written"] = error_of(
        MetricsFile, tmp_path / "none/metrics.jsonl"
    )
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
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    messages["tasks without torchrun"] = error_of(join("cpu", DistConfig()).__enter__)
    golden(
        "program",
        messages,
        folder=tmp_path,
        host=socket.gethostname(),
        process=f"process {os.getpid()}",
    )
