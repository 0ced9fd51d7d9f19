"""The trainer's wrapper of the model, and steps that cannot be taken."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linnaeus.config.load import load_config
from linnaeus.data.datasets import build_data
from linnaeus.dist import World
from linnaeus.training.build import assemble
from linnaeus.training.checkpoint import CheckpointFolder
from linnaeus.training.trainer import Trainer
from tests.helpers.trainers import building


@contextmanager
def trainer_of(folder: Path, size: int, *argv: str) -> Iterator[Trainer]:
    config = load_config([
        "EXPERIMENT.DEVICE=cpu", "MODEL.NAME=test_resnet", "DATA.IMG_SIZE=32", "DATA.NUM_WORKERS=0",
        "DATA.DATASET.NAME=synthetic", "DATA.DATASET.NUM_SAMPLES=8", "DATA.DATASET.NUM_SAMPLES_VAL=8", *argv,
    ]).config  # fmt: skip
    data, world = build_data(config.DATA, seed=0), World(torch.device("cpu"))
    assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
    checkpoints = CheckpointFolder(folder)
    with building(Trainer, config, data, assembly, world, {"train": size}, checkpoints) as trainer:
        yield trainer


class Wrapper(nn.Module):
    """As DistributedDataParallel takes it: the parameters that train when it is made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.trained = {name for name, p in module.named_parameters() if p.requires_grad}

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def test_unfreezing_frees_the_wrapper_and_makes_one_of_all_parameters(tmp_path: Path) -> None:
    made: list[weakref.ref[Wrapper]] = []

    def wrap(model: nn.Module) -> Wrapper:
        assert all(wrapper() is None for wrapper in made)  # two would both hold gradients
        wrapper = Wrapper(model)
        made.append(weakref.ref(wrapper))
        return wrapper

    freezing = ("MODEL.FREEZE=backbone", "TRAIN.UNFREEZE_EPOCH=2")
    with trainer_of(tmp_path, 4, *freezing) as bare:
        step = bare.train_step  # held on to by the caller
        trainer = replace(bare, wrap=wrap)
        trained = []
        for epoch in range(2):
            trainer.progress.epoch, trainer.progress.samples = epoch, 0
            trainer.train_epoch()
            wrapper = made[-1]()
            assert trainer.train_step.model is wrapper is not None
            trained.append(wrapper.trained)
            del wrapper
        names = {name for name, _ in trainer.assembly.model.named_parameters()}
    assert len(made) == 2
    assert trained[0] == {name for name in names if name.startswith("heads.")}
    assert trained[1] == names
    assert step.model is bare.assembly.model
