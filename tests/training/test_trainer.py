"""The trainer's wrapper of the model, and steps that cannot be taken."""

import weakref
from dataclasses import replace

import pytest
from torch import nn

from tests.helpers.greedy import trainer_of
from tests.helpers.runs import checkpoint_of
from tests.helpers.small_runs import PLAIN, Layers, lines_of

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

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.trained = {name for name, p in module.named_parameters() if p.requires_grad}

    def forward(self, *args):
        return self.module(*args)


def test_unfreezing_frees_the_wrapper_and_wraps_all_parameters(tmp_path):
    made, trained = [], []

    def wrap(model):
        assert all(wrapper() is None for wrapper in made)  # two would both hold gradients
        wrapper = Wrapper(model)
        made.append(weakref.ref(wrapper))
        return wrapper

    with trainer_of(tmp_path, *SMALL, size=4) as bare:
        step = bare.train_step  # held on to by the caller
        trainer = replace(bare, wrap=wrap)
        for trainer.progress.epoch in range(2):
            trainer.progress.samples = 0
            trainer.train_epoch()
            assert trainer.train_step.model is made[-1]() is not None
            trained.append(trainer.train_step.model.trained)
        names = {name for name, _ in trainer.assembly.model.named_parameters()}
    assert len(made) == 2
    assert trained == [{name for name in names if name.startswith("heads.")}, names]
    assert step.model is bare.assembly.model


class Overflowing(Layers):
    """Its outputs exceed float16 in the first so many forward passes of training."""

    def __init__(self, num_classes, num_passes):
        super().__init__(num_classes)
        self.left = num_passes

    def forward(self, points):
        outputs = super().forward(points)
        self.left -= self.training
        return outputs * 2.0**30 / 2.0**30 if self.training and self.left >= 0 else outputs


OVERFLOWING = (*PLAIN, f"MODEL._target_={__name__}.Overflowing", "TRAIN.EPOCHS=8")


@pytest.mark.e2e
@pytest.mark.parametrize(("amp", "num_null"), [("fp16", 2), ("off", 0)])
def test_a_forward_pass_that_overflows_skips_a_step(run, tmp_path, amp, num_null):
    options = ("MODEL.num_passes=2", f"TRAIN.AMP={amp}", "TRAIN.EMA.ENABLED=True")
    run(*OVERFLOWING, *options).ok()
    folder = tmp_path / "runs/plain"
    losses = [line["loss"] for line in lines_of(folder)]
    assert len(losses) == 24
    assert losses.count(None) == num_null
    state = checkpoint_of(folder)["state"]
    assert state["ema"]["num_updates"] == 24 - num_null
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
