"""What a user sees on the terminal when a process with loader workers ends, or is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import itertools
import signal
import sys

import torch

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
config = DataConfig(
    DATASET=DatasetConfig(NAME="synthetic", NUM_SAMPLES=100_000, NUM_CLASSES=[2, 4]),
    IMG_SIZE=16,
    NUM_WORKERS=2,
)
loaders = build_loaders(
    build_data(config, seed=0), sizes=lambda epoch, skip: itertools.repeat(8, 100), batch_size_val=8,
    data_config=config, seed=0, rank=0, world_size=1, device=torch.device("cpu"),
)
try:
    for step, batch in enumerate(loaders.train):
        if step == 3:
            print("running", flush=True)
            if sys.argv[1] == "exit":
                break
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start(how: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C reaches all processes of the terminal's group, workers too
    )


@pytest.mark.parametrize(
    ("how", "expected"), [("exit", "running\n"), ("interrupt", "running\ninterrupted\n")]
)
def test_processes_end_quietly(how: str, expected: str) -> None:
    process = start(how)
    assert process.stdout is not None
    first = process.stdout.readline()
    if how == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert errors == ""
    assert first + output == expected
    assert process.returncode == 0
