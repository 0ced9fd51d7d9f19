"""`linnaeus.main` on ranks of which one is odd, as the environment says.

    FAULT=kind:rank:text    the rank does this when it says that it does something that contains the text
    LATE=rank:seconds       the rank starts so much later
    LATE_DATA=rank:seconds  its dataset takes so much longer to build
    LATE_END=rank:seconds   it writes its result so much later
    SHORTER=rank:samples    its dataset has so many training samples less
    OTHER=rank:option       its command line has this option at its end
    STEP_S=seconds          each training step of `Slow` takes so long
    ODD_DEVICES=1           the name of the device differs between ranks, as cuda:0 and cuda:1 do
    QUICK_BEATS=1           heartbeats and looks come ten times as often

`kind` is `error`, or the name of a signal that the rank sends itself. A fault comes once in the folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from linnaeus import control, dist, run
from linnaeus.dist import World
from linnaeus.main import cli
from linnaeus.training import checkpoint

RANK = os.environ.get("RANK", "0")
HAPPENED = Path("fault_happened")
PLACES = {
    "before the search": "building data and model",
    "in the search": "trying batch size 8",
    "in training": "training in epoch 2",
    "in validation": "validating after epoch 2",
    "while a checkpoint is written": "saving a checkpoint",
}
KINDS = ("error", "SIGKILL", "SIGSTOP", "SIGTERM", "SIGUSR1")
"""The faults, and where they come: by what the rank says that it does there."""


def setting(name: str) -> str:
    """What the variable says for this rank; empty for other ranks."""
    rank, _, value = os.environ.get(name, "").partition(":")
    return value if rank == RANK else ""


def seconds(name: str) -> float:
    return float(setting(name) or 0)


class Dataset(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Points in two classes."""

    num_classes = 2

    def __init__(self, train: bool, num_samples: int = 96) -> None:
        time.sleep(seconds("LATE_DATA") if train else 0)
        self.num_samples = num_samples - (int(setting("SHORTER") or 0) if train else 0)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator) + index % 2, index % 2


class Perceptron(torch.nn.Sequential):
    """A model without BatchNorm."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            torch.nn.Flatten(),
            torch.nn.Linear(3 * 8 * 8, 32),
            torch.nn.GELU(),
            torch.nn.Linear(32, num_classes),
        )


class Slow(torch.nn.Linear):
    """A model whose training steps take a while."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(3 * 8 * 8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(float(os.environ["STEP_S"]))
        return super().forward(images.flatten(1))


def go_wrong(kind: str) -> None:
    HAPPENED.write_text(repr(time.time()))
    if kind == "error":
        raise ValueError("this rank is broken")
    os.kill(os.getpid(), signal.Signals[kind])


def watch(place: str) -> None:
    kind, _, rest = os.environ.get("FAULT", "").partition(":")
    rank, _, text = rest.partition(":")
    if kind and rank == RANK and text in place and not HAPPENED.exists():
        go_wrong(kind)


def main() -> int:
    update, write = World.update, checkpoint.write_atomically

    def watched_update(world: World, doing: str) -> None:
        update(world, doing)
        watch(doing)

    def watched_write(path, fill, **options):  # type: ignore[no-untyped-def]
        def watched_fill(file):  # type: ignore[no-untyped-def]
            fill(file)
            watch(f"writing {path.name}")

        write(path, watched_fill, **options)

    World.update = watched_update  # type: ignore[method-assign]
    checkpoint.write_atomically = watched_write  # type: ignore[attr-defined]
    save_result = run.save_result

    def late_result(*arguments):  # type: ignore[no-untyped-def]
        time.sleep(seconds("LATE_END"))
        save_result(*arguments)

    run.save_result = late_result  # type: ignore[attr-defined]
    if os.environ.get("QUICK_BEATS"):
        control.BEAT_S = 0.1
    if os.environ.get("ODD_DEVICES"):
        dist.resolve_device = lambda name, local_rank=0: torch.device("cpu", int(RANK))
    time.sleep(seconds("LATE"))
    other = setting("OTHER")
    return cli([*sys.argv[1:], other] if other else sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
