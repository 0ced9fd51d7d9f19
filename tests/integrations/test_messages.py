"""What the integrations refuse, and the warnings that name a remedy, word by word."""

import itertools
from functools import partial
from unittest import mock

import pytest

pytest.importorskip("lightning")
pytest.importorskip("transformers")

import pytorch_lightning
import torch
from accelerate import Accelerator
from lightning.pytorch import strategies
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset
from transformers import Trainer

from linnaeus.integrations.accelerate import find_batch_size
from linnaeus.integrations.common import checked_options, divisor_of, warn_of_growth
from linnaeus.integrations.lightning import AutoBatch
from linnaeus.integrations.samples import Largest
from linnaeus.integrations.transformers import autobatch
from tests.helpers.messages import raised
from tests.integrations.hugging import Text, collate, trainer
from tests.integrations.lightning_runs import (
    Bare,
    Made,
    Manual,
    Net,
    data,
    fit,
    loader,
    trainer_for,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def split(effective, world_size, largest, *, multiple=1, **more):
    model, options = torch.nn.BatchNorm1d(1), {"min_batch_size": 1, "multiple_of": multiple}
    return raised(divisor_of, effective, world_size, largest, model, options, **more)


def shared(caplog):
    warn_of_growth(8, 32)
    assert not caplog.records, "four times as many is usual"
    warn_of_growth(8, 33)
    rows, sizes = [torch.ones(3)] * 9, itertools.count(1)
    return {
        "a larger step": caplog.records[-1].message,
        "batches without tensors": raised(Largest, rows, lambda samples: object()),
        "batches of random size": raised(Largest, rows, lambda samples: torch.ones(next(sizes))),
        "an unknown option": raised(checked_options, "val_options", {"size": 1}),
        "97 on 2 processes": split(97, 2, 512),
        "a multiple that does not divide": split(96, 2, 40, multiple=32),
        "above an epoch": split(97, 1, 40, epoch=96),
    }


# -- Lightning


class Iterating(Net):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


class Drawing(Net):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [*batch, torch.ones(int(torch.randint(1, 99, ())))]


class Lines(IterableDataset):
    def __iter__(self):
        return iter(())  # it is refused before it is read


def made(make):
    return Bare, {"given": Made(make)}


FITS = {
    "no attribute": (Net, {"batch_arg_name": "size"}),
    "a fixed size": made(lambda size: loader(8)),
    "loaders handed to fit": (Bare, {"given": loader(4)}),
    "a batch sampler": made(
        lambda size: DataLoader(data(), batch_sampler=BatchSampler(range(9), 4, False))
    ),
    "twice the size": made(lambda size: loader(2 * size)),
    "several loaders": made(lambda size: {"one": loader(size), "other": loader(size)}),
    "a size drawn in the transfer": (Drawing, {}),
    "an iterator": (Iterating, {}),
    "a stream": made(lambda size: DataLoader(Lines(), size)),
    "a cost that is no column": (Net, {"cost": "length"}),
    "a cost of nothing": (Net, {"cost": [0] * len(data())}),
    "accumulation by hand": (Manual, {"effective_batch_size": 8}),
}
ARGUMENTS = (
    {"min_batch_size": 5, "val_options": {"max_batch_size": 4}},
    {"cost": "length", "effective_batch_size": 8},
)


def searched(module, given=None, **options):
    try:
        fit(module, given, callbacks=[AutoBatch(**{"max_batch_size": 20, **options})])
    finally:
        for holder in (module, given):
            assert getattr(holder, "batch_size", 4) == 4, "what is refused changes nothing"


def not_alone(name):
    trainer = trainer_for()
    trainer._accelerator_connector.strategy = getattr(strategies, name)()
    return raised(AutoBatch().setup, trainer, Net(), "fit")


def lightning():
    return {
        **{f"Lightning: {arguments}": raised(AutoBatch, **arguments) for arguments in ARGUMENTS},
        **{
            f"Lightning: {name}": raised(searched, module(), **options)
            for name, (module, options) in FITS.items()
        },
        "Lightning: FSDP": not_alone("FSDPStrategy"),
        "Lightning: the older package": raised(
            AutoBatch().setup, pytorch_lightning.Trainer(logger=False), Net(), "fit"
        ),
    }


# -- transformers and accelerate


class FixedLoader(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=collate)


def with_an_optimizer_elsewhere():
    judge = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)

    class Elsewhere(Trainer):
        def training_step(self, *arguments):
            judge(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            return super().training_step(*arguments)

    return trainer(Elsewhere)


CHANGES = (
    ("auto_find_batch_size", True),
    ("is_deepspeed_enabled", True),
    ("is_fsdp_enabled", True),
    ("is_model_parallel", True),
    ("_n_gpu", 2),
    ("optim", "galore_adamw_layerwise"),
    ("train_sampling_strategy", "batch_rebalance"),
)
WRONG = (
    {"effective_batch_size": 0},
    {"samples": []},
    {"eval_samples": {"input_ids": [5]}, "evaluation": True},
    {"budget": "pixels"},
    {"budget": "tokens", "effective_batch_size": 8},
)


def trained(made, **options):
    autobatch(made, **{"max_batch_size": 2, **options}).train()


def changed(name, value):
    made = trainer()
    setattr(made.args if hasattr(made.args, name) else made, name, value)
    return raised(autobatch, made)


def transformers():
    stream, generating = trainer(), trainer()
    stream.train_dataset = (row for row in Subset(Text(), range(3)))
    generating.args.predict_with_generate = True
    found = {
        **{str(options): raised(trained, trainer(), **options) for options in WRONG},
        **{name: changed(name, value) for name, value in CHANGES},
        "a class": raised(autobatch, Trainer),
        "a loader of one's own": raised(trained, trainer(FixedLoader)),
        "an optimizer elsewhere": raised(trained, with_an_optimizer_elsewhere()),
        "a stream": raised(trained, stream),
        "generation": raised(trained, generating, evaluation=True),
    }
    return {f"transformers: {title}": text for title, text in found.items()}


def accelerate():
    accelerator = Accelerator(cpu=True)
    sharded = mock.Mock(Accelerator, distributed_type="DistributedType.FSDP", scaler=None)
    search = partial(raised, find_batch_size)
    return {
        "accelerate: no accelerator": search([], None, None, None, None),
        "accelerate: a stream": search(accelerator, None, None, None, iter([])),
        "accelerate: FSDP": search(sharded, None, None, None, []),
    }


def test_messages(golden, caplog):
    golden("integrations", {**shared(caplog), **lightning(), **transformers(), **accelerate()})
