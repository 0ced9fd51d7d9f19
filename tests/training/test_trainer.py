"""The trainer's wrapper of the model, and steps that cannot be taken."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from tests.helpers.greedy import trainer_of

SMALL = (
    "~MODEL",
    "MODEL.NAME=test_resnet",
    "MODEL.FREEZE=backbone",
    "TRAIN.UNFREEZE_EPOCH=2",
    "DATA.IMG_SIZE=32",
    "DATA.DATASET.NUM_SAMPLES=8",
    "DATA.DATASET.NUM_SAMPLES_VAL=8",
)


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

    with trainer_of(tmp_path, *SMALL, size=4) as bare:
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
