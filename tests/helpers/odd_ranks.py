"""`linnaeus.main` on ranks of which one is odd, as the environment says.

    FAULT=kind:rank:text    the rank does this when it says that it does something that contains the text
    KILL_AT=number          this process is killed at that event: a sample read, a file written, a new phase
    SHORTER=rank:samples    its dataset has so many fewer training samples
    OTHER=rank:option       its command line has this option at its end
    QUICK_BEATS=1           heartbeats and looks come ten times as often

`kind` is `error`, `deaf` (the rank holds the GIL long enough to be named as silent), `hang` (forever), or the
name of a signal that the rank sends itself. A fault comes once in the folder.
"""

import ctypes
import itertools
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from linnaeus.autobatch.ranks import heartbeat
from linnaeus.main import cli
from linnaeus.runtime.distributed import World
from linnaeus.training import checkpoint

RANK = os.environ.get("RANK", "0")
HAPPENED = Path("fault_happened")
PLACES = {
    "while it joins": "joining the process group",
    "before the search": "building data and model",
    "in the search": "trying batch size 8",
    "in training": "training in epoch 2",
    "in validation": "validating after epoch 2",
    "while a checkpoint is written": "saving a checkpoint",
}
"""Where faults come, by what the rank says that it does there."""
JOB = (
    "DATA.DATASET._target_=tests.helpers.odd_ranks.Dataset",
    "DATA.NUM_WORKERS=0",
    "MODEL.NAME=test_resnet",
    "DATA.IMG_SIZE=8",
    "DATA.BATCH_SIZE=8",
    "DATA.AUTOBATCH.ENABLED=True",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=8",
    "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
    "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=1.0",  # others may hold most of this machine's memory
    "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=small",
    "TRAIN.EPOCHS=2",
    "TRAIN.AUTO_RESUME=True",
)
"""A run of two epochs. Later tokens override these."""
KINDS = ("error", "SIGKILL", "SIGSTOP", "SIGTERM", "SIGUSR1", "deaf")

_events = itertools.count(1)


def setting(name):
    """What the variable says for this rank; empty for other ranks."""
    rank, _, value = os.environ.get(name, "").partition(":")
    return value if rank == RANK else ""


def count_event():
    if next(_events) == int(os.environ.get("KILL_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


class Dataset(torch.utils.data.Dataset):
    """Points in two classes."""

    num_classes = 2

    def __init__(self, train, num_samples=96):
        self.num_samples = num_samples - (int(setting("SHORTER") or 0) if train else 0)

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        count_event()
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=generator) + index % 2, index % 2


def watch(doing):
    count_event()
    place = doing if isinstance(doing, str) else doing()
    kind, _, rest = os.environ.get("FAULT", "").partition(":")
    rank, _, text = rest.partition(":")
    if kind and rank == RANK and text in place and not HAPPENED.exists():
        HAPPENED.touch()
        if kind == "error":
            raise ValueError("this rank is broken")
        if kind == "deaf":  # calls a C function with the GIL held
            ctypes.PyDLL(None).usleep(int(1.5e6 * heartbeat.SILENCE_LOOKS * heartbeat.BEAT_S))
        elif kind == "hang":
            threading.Event().wait()
        else:
            os.kill(os.getpid(), signal.Signals[kind])


def main():
    update, write, tell = World.update, checkpoint.write_atomically, heartbeat.ControlPlane.update

    def watched_update(world, doing):
        update(world, doing)
        if world.control is None:
            watch(doing)

    def watched_tell(plane, doing):
        tell(plane, doing)
        watch(doing)

    def watched_write(path, fill, **options):
        def watched_fill(file):
            fill(file)
            watch(f"writing {path.name}")

        write(path, watched_fill, **options)

    World.update = watched_update
    heartbeat.ControlPlane.update = watched_tell
    checkpoint.write_atomically = watched_write
    if os.environ.get("QUICK_BEATS"):
        heartbeat.BEAT_S = 0.1
    other = setting("OTHER")
    return cli([*sys.argv[1:], other] if other else sys.argv[1:])


if __name__ == "__main__":
    from tests.helpers import (
        odd_ranks,
    )  # the module that `DATA.DATASET._target_` names counts the events

    raise SystemExit(odd_ranks.main())
