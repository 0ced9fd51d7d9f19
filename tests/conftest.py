"""Linnaeus as a user runs it: in this process where that is enough, else in child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from linnaeus.main import cli

SMALL = (
    "MODEL.NAME=test_resnet",
    "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_SAMPLES=96",
    "DATA.DATASET.NUM_SAMPLES_VAL=31",
    "DATA.DATASET.NUM_CLASSES=[2,6]",
    "DATA.IMG_SIZE=32",
    "DATA.BATCH_SIZE=16",
    "TRAIN.EPOCHS=2",
    "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=small",
)
"""A run of seconds. Later tokens override these."""


class Outcome(NamedTuple):
    """How a run ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The tests' tensors are small: several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No terminal tricks, no uploads, one thread in child processes."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run_here(*argv: str) -> Outcome:
        capfd.readouterr()
        code = cli(argv)
        return Outcome(code, *capfd.readouterr())

    return run_here


@pytest.fixture
def torchrun(tmp_path: Path) -> Run:
    """Runs a command line in several processes under torchrun, in an empty folder."""

    def run_there(num_processes: int, *argv: str, env: dict[str, str] | None = None) -> Outcome:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={num_processes}", "-m", "linnaeus.main", *argv,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **(env or {})}, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run_there


class Child:
    """A run in a process of its own, to be watched and signalled."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.log = folder / "child.txt"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "linnaeus.train", *argv], cwd=folder, stdout=log, stderr=log
            )

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        """Until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)

    def end(self, signal_number: signal.Signals) -> int:
        """Send the signal and give the exit code."""
        self.process.send_signal(signal_number)
        return self.process.wait(timeout=120)


def weights(folder: Path, name: str = "last.pt") -> dict[str, torch.Tensor]:
    """The model's tensors in a run's checkpoint."""
    content = torch.load(folder / "checkpoints" / name, weights_only=True)
    return dict(content["state"]["model"])


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Both hold the same tensors, bit for bit."""
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ, such as {different[0]}"
