"""Runs of Lightning's trainer for the tests: with AutoBatch, and with the size that it found by hand."""

import copy
import random

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from linnaeus import BudgetBatchSampler
from linnaeus.autobatch import nest
from linnaeus.integrations.lightning import AutoBatch
from tests.helpers.bits import differences

NUM_SAMPLES, NUM_VAL, WIDTH, NUM_CLASSES = 96, 30, 16, 4


def data(num_samples=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(num_samples, WIDTH, generator=generator)
    return TensorDataset(images, torch.randint(NUM_CLASSES, (num_samples,), generator=generator))


class Net(LightningModule):
    """A small network whose steps take real memory, draw random numbers and log."""

    def __init__(self, batch_size=4, lr=0.05, mib=0.0):
        super().__init__()
        self.save_hyperparameters("lr")
        self.batch_size = batch_size
        self.mib = mib
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(32, NUM_CLASSES),
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES)
        self.sizes = []

    def loss(self, batch):
        images, labels = batch
        scores = self.net(images)
        self.accuracy(scores, labels)
        ballast = images.new_ones(len(images), int(self.mib * 2**18)).mul(scores.sum())
        return nn.functional.cross_entropy(scores, labels) + 0 * ballast.sum()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) + 0 * np.random.random() + 0 * random.random()
        self.log("loss", loss)
        self.log("loss_epoch", loss, on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.sizes.append(len(next(iter(nest.leaves(batch)))))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=total
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self):
        return loader(self.batch_size, shuffle=True)

    def val_dataloader(self):
        return loader(self.batch_size, NUM_VAL)


class Large(Net):
    """With parameters, gradients and optimizer state that take memory as well."""

    def __init__(self, batch_size=4):
        super().__init__(batch_size, mib=1.0)
        self.layer = nn.Linear(1024, 2048, bias=False)

    def loss(self, batch):
        return super().loss(batch) + 1e-3 * self.layer.weight.square().mean()


COSTS = [1 + index * 5 % 23 for index in range(NUM_SAMPLES)]


class Single(Net):
    """Takes a batch of one sample."""

    def __init__(self, mib=0.0):
        super().__init__(mib=mib)
        self.net[1] = nn.LayerNorm(32)


class Within(Single):
    """Batches within a budget, by hand."""

    def __init__(self, budget, mib=0.0):
        super().__init__(mib=mib)
        self.budget = budget

    def train_dataloader(self):
        sampler = BudgetBatchSampler(COSTS, self.budget)
        sampler.sampler = sampler  # where Lightning sets the epoch
        return DataLoader(data(), batch_sampler=sampler)


class InHyperparameters(Net):
    """The size is a hyperparameter."""

    def __init__(self, batch_size=4):
        super().__init__()
        del self.batch_size
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader(self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return loader(self.hparams.batch_size, NUM_VAL)


class Bare(Net):
    """Neither loaders nor a size."""

    train_dataloader = LightningModule.train_dataloader
    val_dataloader = LightningModule.val_dataloader

    def __init__(self):
        super().__init__()
        del self.batch_size


class Data(LightningDataModule):
    """Loaders of a size and one for validation, from a dataset with random numbers and a count of its own."""

    def __init__(self, batch_size=4, val_batch_size=2):
        super().__init__()
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.dataset = Noisy()

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(11)
        return DataLoader(self.dataset, self.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self):
        return loader(self.val_batch_size, NUM_VAL)


class Made(LightningDataModule):
    """Training batches of a loader that a function makes."""

    def __init__(self, make, batch_size=4):
        super().__init__()
        self.make, self.batch_size = make, batch_size

    def train_dataloader(self):
        return self.make(self.batch_size)


class Noisy(Dataset):
    """Samples with noise of a generator that the dataset holds."""

    def __init__(self):
        self.data = data()
        self.generator = np.random.default_rng(5)
        self.num_read = 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        self.num_read += 1
        return image + float(self.generator.normal()) + 1e-3 * self.num_read, label


class Manual(Net):
    """Two optimizers and their schedules, stepped by hand."""

    def __init__(self, batch_size=4):
        super().__init__(batch_size)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            schedule.step()
            self.log(f"loss_{type(schedule).__name__}", loss)

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.Adam(self.net[1:].parameters(), lr=0.01)
        total = self.trainer.estimated_stepping_batches
        return [first, second], [
            torch.optim.lr_scheduler.OneCycleLR(first, 0.1, total_steps=total),
            torch.optim.lr_scheduler.LinearLR(second, total_iters=5),
        ]


class Needy(Net):
    """Its steps need what its hooks make, count in the module and its optimizer, and log past Lightning."""

    def __init__(self, batch_size=4):
        super().__init__(batch_size)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.num_steps = 0

    def on_train_start(self):
        self.weights = torch.ones(NUM_CLASSES)

    def on_train_epoch_start(self):
        self.losses = []

    def training_step(self, batch, batch_idx):
        assert self.batch_size >= len(batch[0])
        self.logger.log_metrics({"direct": 1.0}, step=batch_idx)
        loss = self.loss(batch) * self.weights.mean()
        self.num_steps += 1
        self.losses.append(loss.item())
        return loss * (1 + 1e-3 * self.num_steps) / (1 + self.global_step)

    def configure_optimizers(self):
        schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, start_factor=0.5, total_iters=5
        )
        return [self.optimizer], [schedule]


class Several(Net):
    """Two validation loaders, of which one has a fixed size."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self):
        return [loader(self.batch_size, NUM_VAL), loader(8, 8)]


class Recorder(Logger):
    """Keeps all that is logged."""

    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def name(self):
        return "recorder"

    @property
    def version(self):
        return 0

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args):
        self.rows.append(dict(params))


def fit(module, given=None, callbacks=(), ckpt=None, **options):
    """Train two epochs and describe the outcome: see `outcome`. A loader or a data module may be given."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    trainer = trainer_for(callbacks, **options)
    trainer.fit(module, given, ckpt_path=ckpt, weights_only=False if ckpt else None)
    return outcome(trainer, module)


def trainer_for(callbacks=(), **options):
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": Recorder(),
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(callbacks=list(callbacks), **{**quiet, **options})


def outcome(trainer, module):
    """Everything that must be the same with the same size, copied."""
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    found = {
        "weights": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [
            {name: held for name, held in each.items() if "_fn" not in name} for each in schedules
        ],
        "logs": trainer.logger.rows,
        "metrics": dict(trainer.callback_metrics),
        "progress": trainer.fit_loop.state_dict(),
        "random numbers": [
            torch.get_rng_state(),
            *map(repr, (np.random.get_state(), random.getstate())),
        ],
        "sizes": module.sizes,
        "attributes": {
            name: held
            for name, held in vars(module).items()
            if isinstance(held, bool | int | float | str)
        },
        "hyperparameters": dict(module.hparams),
        "accumulate": trainer.accumulate_grad_batches,
    }
    return copy.deepcopy(found)


def loader(size, num_samples=NUM_SAMPLES, **options):
    return DataLoader(data(num_samples), size, **options)


def nothing(*sizes):
    return None


def compared(module, search, given=nothing, others=list, **options):
    """The callback of a run that has searched, its outcome, and what differs with its sizes by hand.

    Args:
        module: makes the module for a batch size.
        search: arguments of `AutoBatch`.
        given: makes what is handed to `fit` for a batch size and one of validation.
        others: makes the other callbacks.
        options: of the trainer.
    """
    callback = AutoBatch(**search)
    searched = fit(module(4), given(4), callbacks=[*others(), callback], **options)
    size = callback.batch_size
    if callback._effective_batch_size is not None:
        options["accumulate_grad_batches"] = searched["accumulate"]
    loaders = given(size, callback.val_batch_size or size)
    by_hand = fit(module(size), loaders, callbacks=others(), **options)
    return callback, searched, differences(searched, by_hand)
