"""Runs of a tenth of a second, and what is read from their folders."""

import json
import os
import signal

import torch
import yaml
from torch import nn
from torch.utils.data import Dataset

from tests.helpers.runs import assert_same_bits, checkpoint_of


class Clusters(Dataset):
    """Points around three centres. Reading so many of them presses Ctrl-C, once in each process."""

    classes = ("a", "b", "c")

    def __init__(self, split, length=100, interrupt_after=0):
        generator = torch.Generator().manual_seed(len(split))
        self.labels = torch.randint(3, (length,), generator=generator)
        self.points = torch.randn(length, 4, generator=generator) + self.labels[:, None]
        self.remaining = interrupt_after if split == "train" else 0

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        self.remaining -= 1
        if self.remaining == 0:
            in_worker = torch.utils.data.get_worker_info() is not None
            os.kill(os.getppid() if in_worker else os.getpid(), signal.SIGINT)
        return self.points[index] + 0.1 * torch.randn(4), int(self.labels[index])


class Layers(nn.Sequential):
    """A classifier, with dropout and with the normalisation that is asked for."""

    def __init__(self, num_classes, norm="LayerNorm", drop=0.0):
        super().__init__(
            nn.Linear(4, 16),
            getattr(nn, norm)(16),
            nn.ReLU(),
            nn.Dropout(drop),
            nn.Linear(16, num_classes),
        )


PLAIN = (
    f"DATA.DATASET._target_={__name__}.Clusters",
    f"MODEL._target_={__name__}.Layers",
    "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=plain",
    "TRAIN.EPOCHS=3",
    "TRAIN.LOG_EVERY=1",
    "DATA.BATCH_SIZE=32",
    "DATA.NUM_WORKERS=0",
    "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
    "OPTIMIZER.LR=0.01",
)
"""A run without BatchNorm. Later tokens override these."""

NAME = "EXPERIMENT.NAME="


def lines_of(folder, split="train"):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def validations_of(folder):
    """The optimizer steps of the validations so far."""
    has_any = (folder / "metrics.jsonl").exists()
    return [line["step"] for line in lines_of(folder, "val")] if has_any else []


def curve(folder):
    """Steps, rates and losses."""
    lines = lines_of(folder)
    steps, rates, losses = ([line[name] for line in lines] for name in ("step", "lr", "loss"))
    return steps, rates, losses


def plan_of(folder):
    """The batch plan in `config.yaml`, without the run's id."""
    plan = yaml.safe_load((folder / "config.yaml").read_text())["PLAN"]
    del plan["RUN"]
    return plan


def assert_same_states(a, b):
    """Model, optimizer and average of two runs are equal bit for bit."""
    parts = []
    for folder in (a, b):
        state = checkpoint_of(folder)["state"]
        parts.append([state["model"], state["ema"]["module"], state["optimizer"]["state"]])
    assert_same_bits(*parts)


def assert_same_run(a, b):
    """States, steps, rates and losses of two runs are equal bit for bit."""
    assert_same_states(a, b)
    for split in ("train", "val"):
        lines = (
            [(line["step"], line["loss"], line.get("lr")) for line in lines_of(folder, split)]
            for folder in (a, b)
        )
        assert next(lines) == next(lines)
