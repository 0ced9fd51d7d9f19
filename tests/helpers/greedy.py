"""Training that runs out of memory: torch's allocator raises its real error in a step of choice."""

import os
import random
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from linnaeus.config.load import load_config
from linnaeus.data.datasets import build_data
from linnaeus.runtime.distributed import World
from linnaeus.runtime.rng import seed_all
from linnaeus.size_search.planned_sizes import PlannedSizes
from linnaeus.training.build import assemble
from linnaeus.training.checkpoint import CheckpointFolder
from linnaeus.training.trainer import Trainer
from tests.helpers.small_runs import Layers
from tests.helpers.trainers import building

EXABYTE = 1 << 60
SPLIT = "TRAIN.ON_OUT_OF_MEMORY=split"
OPTIONS = (
    "EXPERIMENT.DEVICE=cpu",
    f"MODEL._target_={__name__}.Greedy",
    "TRAIN.EMA.ENABLED=True",
    "DATA.IMG_SIZE=8",
    "DATA.NUM_WORKERS=0",
    "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_CLASSES=[3]",
    "DATA.DATASET.NUM_SAMPLES=96",
    "DATA.DATASET.NUM_SAMPLES_VAL=32",
    "TRAIN.EPOCHS=2",
)


def allocate_too_much(*_):
    """Let torch's allocator raise what it raises when memory has run out."""
    torch.empty(EXABYTE, dtype=torch.uint8)


class Greedy(Layers):
    """Batches above a size need too much in one forward or backward pass of training, and in all later ones.

    Where INTERRUPT_AT says so, it presses Ctrl-C after so many samples. It counts samples in a buffer, and
    draws random numbers that its outputs do not depend on, so that what is not restored shows.
    """

    def __init__(
        self,
        num_classes,
        from_sample=0,
        largest=0,
        where="forward",
        rank=0,
        **options,
    ):
        super().__init__(num_classes, **options)
        if os.environ.get("RANK", "0") != str(rank):
            largest = 0
        self.from_sample, self.largest, self.where = from_sample, largest, where
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drawn", torch.zeros(3, dtype=torch.float64), persistent=False)

    def forward(self, inputs):
        first, *rest = self
        outputs = hidden = first(inputs.flatten(1)[:, :4])
        for layer in rest:
            outputs = layer(outputs)
        if not self.training:
            return outputs
        self.num_samples += len(inputs)
        if self.num_samples == int(os.environ.get("INTERRUPT_AT", "0")):
            os.kill(os.getpid(), signal.SIGINT)
        self.drawn = torch.tensor(
            [torch.rand(()).item(), np.random.rand(), random.random()]
        ).double()
        if self.largest and self.num_samples > self.from_sample and len(inputs) > self.largest:
            if self.where == "forward":
                allocate_too_much()
            if self.where == "clip":  # in a process of its own
                torch.nn.utils.clip_grad_norm_ = allocate_too_much
                return outputs
            if self.where == "backward":
                hidden.register_hook(allocate_too_much)  # later layers have gradients then
        return outputs


class Switchable(Greedy):
    """Has a switch for gradient checkpointing, which changes nothing here."""

    def set_grad_checkpointing(self, enable=True):
        self.is_checkpointing = enable


class GreedyInValidation(Greedy):
    """After so many samples of validation, batches above a size need too much."""

    def __init__(self, num_classes, largest, from_sample=0, rank=None):
        super().__init__(num_classes)
        self.largest_val, self.from_sample, self.num_validated = largest, from_sample, 0
        if rank is not None and int(os.environ.get("RANK", "0")) != rank:
            self.from_sample = sys.maxsize

    def forward(self, inputs):
        if not self.training:
            self.num_validated += len(inputs)
            if self.num_validated > self.from_sample and len(inputs) > self.largest_val:
                allocate_too_much()
        return super().forward(inputs)


class Broken(Greedy):
    """Has another error, in training or in validation."""

    def __init__(self, num_classes, in_training):
        super().__init__(num_classes)
        self.in_training = in_training

    def forward(self, inputs):
        return super().forward(inputs) / (1 // (self.training != self.in_training))


def greedy(largest, *, from_step=0, where="forward"):
    """The options under which larger micro-batches run out of memory after so many optimizer steps."""
    return f"MODEL.largest={largest}", f"MODEL.from_sample={16 * from_step}", f"MODEL.where={where}"


@contextmanager
def trainer_of(folder, *argv, size=16, val_size=16):
    """A trainer with `OPTIONS`, which later tokens override; it saves to `folder/checkpoints`."""
    sizes = [f"DATA.BATCH_SIZE={size}", f"DATA.BATCH_SIZE_VAL={val_size}"]
    config = load_config([*OPTIONS, *argv, *sizes]).config
    seed_all(0)
    data, world = build_data(config.DATA, seed=0), World(torch.device(config.EXPERIMENT.DEVICE))
    assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
    checkpoints = CheckpointFolder(folder / "checkpoints")
    with building(
        Trainer, config, data, assembly, world, {"train": size, "val": val_size}, checkpoints
    ) as bare:
        if "MODEL.where=update" in argv:  # it has changed the parameters
            assembly.optimizer.register_step_post_hook(allocate_too_much)
        yield replace(bare, size_origins=PlannedSizes({}, bare.plan, "").origins(config.DATA))
