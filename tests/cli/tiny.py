"""Models and data that train in milliseconds, for the runs of these tests."""

import os
import select
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset


class Points(Dataset):
    """Points in the plane, labelled by their quadrant."""

    classes = ("I", "II", "III", "IV")

    def __init__(self, split, length=64):
        generator = torch.Generator().manual_seed(len(split))
        self.points = torch.randn(length, 2, generator=generator)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        x, y = (self.points[index] > 0).long().tolist()
        return self.points[index], 2 * x + y


class Perceptron(nn.Sequential):
    """Takes what the framework offers by name."""

    def __init__(self, width, num_classes):
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, num_classes))


GATE = "gate"
"""A named pipe in the current folder; without one nothing waits."""


class Gated(Points):
    """Points that wait in the second epoch: until a signal has come, or somebody writes to the gate."""

    def __init__(self, split):
        super().__init__(split)
        self.num_given = 0
        self.waits = split == "train" and Path(GATE).exists()
        if self.waits:
            self.signals, ours = os.pipe()
            os.set_blocking(ours, False)
            signal.set_wakeup_fd(ours)  # also for a signal that comes before anybody waits for it

    def __getitem__(self, index):
        self.num_given += 1
        if self.waits and self.num_given == 3 * len(self) // 2:
            gate = os.open(GATE, os.O_RDONLY | os.O_NONBLOCK)
            select.select([self.signals, gate], [], [])
            os.close(gate)
        return super().__getitem__(index)


class Wide(nn.Module):
    """Some MiB of parameters and little else, for points."""

    def __init__(self, num_classes, width=2**22):
        super().__init__()
        self.head = nn.Linear(2, num_classes)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x):
        return self.head(x) + (self.scale + self.shift).mean()


class Growing(Wide):
    """A MiB of activations per sample and layer, in few operations: memory limits at small sizes.

    Args:
        num_classes: of the points.
        width: of the layers, a quarter of their bytes per sample.
        interrupt_at: the call that presses Ctrl-C.
    """

    num_calls = 0  # of the class: those of a model are restored after a trial

    def __init__(self, num_classes, width=2**18, interrupt_at=None):
        super().__init__(num_classes, width)
        self.interrupt_at = interrupt_at
        Growing.num_calls = 0

    def forward(self, x):
        Growing.num_calls += 1
        if Growing.num_calls == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        wide = (x.sum(1, keepdim=True) * self.scale + self.shift).sigmoid().tanh()
        return self.head(x) + wide.mean(1, keepdim=True)


class Peeking(Wide):
    def forward(self, x):
        scores = super().forward(x)
        return scores * (scores.mean().item() > 0)


class Numerate(Wide):
    def __init__(self, num_classes):
        super().__init__(num_classes, width=int(torch.tensor(2.0**22).item()))


class Blocks(nn.Module):
    """A few layers for images, whose parts may be run again in the backward pass."""

    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GELU(), nn.Dropout(0.1), nn.Tanh())
            for _ in range(3)
        )
        self.head = nn.Linear(32, num_classes)
        self.is_checkpointed = False

    def set_grad_checkpointing(self, enable):
        self.is_checkpointed = enable

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x.mean((2, 3)))


class Deep(nn.Sequential):
    """Eight blocks of 16 MiB of parameters, for points."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            return self.linear(x).relu()

    def __init__(self, num_classes, width=2048):
        blocks = (self.Block(width) for _ in range(8))
        super().__init__(nn.Linear(2, width), *blocks, nn.Linear(width, num_classes))


class TinyNet(nn.Module):
    """A convolution, BatchNorm and a linear layer for each level, on images of any size.

    When it is evaluated, it runs out of memory with more than 30 samples, or rows of pixels.
    """

    def __init__(self, num_classes, in_chans):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_chans, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.heads = nn.ModuleList(nn.Linear(32, count) for count in num_classes.values())

    def forward(self, images):
        if not torch.is_grad_enabled() and (len(images) > 30 or images.shape[2] > 30):
            torch.empty(2**62, dtype=torch.uint8)
        features = self.features(images)
        return tuple(head(features) for head in self.heads)


class Pairs(Dataset):
    """Vectors and their doubles, without classes."""

    def __init__(self, split):
        self.values = torch.arange(24.0).view(8, 3) / (24 if split == "train" else 20)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index], 2 * self.values[index]


Perceptrons = None
"""No class, as only a run can see."""
