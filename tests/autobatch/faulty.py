"""A user's model that goes wrong where the environment variable FAULT says, in real ways."""

import os

import torch
from torch import nn

from tests.helpers.runs import SMALL

TINY = (
    *(option for option in SMALL if not option.startswith("MODEL.")),
    f"MODEL._target_={__name__}.Model",
    "DATA.IMG_SIZE=8",
    "DATA.AUTOBATCH.ENABLED=True",
    "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=24",
    "TRAIN.EPOCHS=1",
    "DIST.FIND_UNUSED_PARAMETERS=True",  # else torch would wait for the gradient of `unused`
)
"""A run with it."""
LARGEST = 8
"""Beyond this batch size, the rank with the fault `oom` runs out of memory."""

_last_batch_size = 0


def fault():
    """What goes wrong on this rank, and where."""
    kind, _, rest = os.environ.get("FAULT", "").partition(":")
    rank, _, place = rest.partition(":")
    return (kind, place) if rank == os.environ.get("RANK") else ("", "")


def exhaust(place):
    """Ask the real allocator for more than there is.

    With the fault `oom`, beyond a size and at a place; with the fault `not`, at one size, and not beyond it.
    """
    global _last_batch_size
    too_large = fault() == ("oom", place) and _last_batch_size > LARGEST
    if too_large or fault() == ("not", str(_last_batch_size)):
        _last_batch_size = 0
        torch.empty(1 << 50, dtype=torch.uint8)


class Exhausting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        exhaust("backward")
        return gradient


class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        counts = [num_classes] if isinstance(num_classes, int) else list(num_classes.values())
        self.hidden = nn.Linear(3 * 8 * 8, 64)
        self.unused = nn.Linear(64, 64)
        self.heads = nn.ModuleList(nn.Linear(64, count) for count in counts)

    def forward(self, images):
        global _last_batch_size
        _last_batch_size = len(images)
        exhaust("forward")
        features = Exhausting.apply(self.hidden(images.flatten(1)).relu())
        return tuple(head(features) for head in self.heads)
