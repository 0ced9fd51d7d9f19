"""What a user sees on the terminal when a process with loader workers is interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers import forks
from tests.helpers.forks import ROOT
from tests.helpers.runs import wait_until

PROGRAM = """
import itertools
import signal

import torch

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.dist import World

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
config = DataConfig(
    DATASET=DatasetConfig(NAME="synthetic", NUM_SAMPLES=100_000, NUM_CLASSES=[2, 4]),
    IMG_SIZE=16,
    NUM_WORKERS=2,
)
loaders = build_loaders(
    build_data(config, seed=0), config, World(torch.device("cpu")),
    sizes=lambda epoch, skip: itertools.repeat(8, 12_500), batch_size_val=8, seed=0,
)
try:
    for step, batch in enumerate(loaders.train):
        if step == 3:
            print("running", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.e2e
def test_interrupted_processes_end_quietly(tmp_path: Path) -> None:
    output, errors = tmp_path / "output.txt", tmp_path / "errors.txt"
    with output.open("w") as stdout, errors.open("w") as stderr:
        process = forks.start(
            ["-W", "error", "-c", PROGRAM], cwd=ROOT, stdout=stdout, stderr=stderr, finalize=True,
            new_session=True,  # Ctrl-C reaches all processes of the terminal's group, workers too
        )  # fmt: skip
    wait_until(lambda: "running\n" in output.read_text(), process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(50) == 0
    assert errors.read_text() == ""
    assert output.read_text() == "running\ninterrupted\n"
