"""The searches of a run as a run prepares them, over a model and a dataset of the tests' own."""

import torch
from torch import nn
from torch.utils.data import Dataset

from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.search import TrialRecord
from linnaeus.autobatch.state.rng import rng_state
from linnaeus.config.load import load_config
from linnaeus.data.datasets import build_data
from linnaeus.runtime.distributed import World
from linnaeus.runtime.rng import seed_all
from linnaeus.size_search.searches import SizeSearch
from linnaeus.training.build import assemble
from tests.helpers.bits import bits

CPU = torch.device("cpu")
ON = "DATA.AUTOBATCH.ENABLED=True"
OWN_MODEL = f"MODEL._target_={__name__}.Model"
OWN_DATA = f"DATA.DATASET._target_={__name__}.Growing"
SEEN = {"shapes": [], "dtypes": []}
"""What `Model` was given, and what its layer gave, since the last search was prepared."""


class Growing(Dataset):
    """Images of sides 8, 9, 10, ... with zeros around the smaller ones of a batch."""

    classes = ("a", "b")

    def __init__(self, split, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((3, 8 + index, 8 + index), 0.5), index % 2

    @staticmethod
    def collate_fn(samples):
        images, labels = zip(*samples, strict=True)
        side = max(image.shape[-1] for image in images)
        larger = [nn.functional.pad(image, (0, side - image.shape[-1]) * 2) for image in images]
        return torch.stack(larger), torch.tensor(labels)


class Model(nn.Module):
    """Averages, then a layer of a width that can be large."""

    def __init__(self, num_classes, width=16, fails_at=10**9):
        super().__init__()
        self.fails_at = fails_at
        self.first = nn.Linear(3, width)
        self.second = nn.Linear(width, width)
        counts = list(num_classes.values()) if isinstance(num_classes, dict) else [num_classes]
        self.heads = nn.ModuleList(nn.Linear(width, count) for count in counts)

    def forward(self, images):
        SEEN["shapes"].append(tuple(images.shape))
        if len(images) >= self.fails_at:
            raise ZeroDivisionError("the user's model is wrong")
        hidden = self.second(self.first(images.mean((2, 3))).relu())
        SEEN["dtypes"].append(hidden.dtype)
        outputs = [head(hidden) for head in self.heads]
        return outputs if len(outputs) > 1 else outputs[0]


def prepared(*argv, world=World(CPU), **options):  # noqa: B008
    """A search as a run prepares it; `options` are those of `SizeSearch`."""
    config = load_config(
        [ON, "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1", "EXPERIMENT.DEVICE=cpu", *argv]
    ).config
    seed_all(0)
    data = build_data(config.DATA, seed=0)
    assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
    for values in SEEN.values():
        values.clear()
    seed = config.EXPERIMENT.SEED
    return SizeSearch(config.DATA, config.TRAIN, data, assembly, world, seed, **options), assembly


def content(assembly):
    """All that a step may change: the state, gradients, metrics, random numbers."""
    gradients = [parameter.grad for parameter in assembly.model.parameters()]
    states = [part.state_dict() for part in (*assembly.state, assembly.metrics) if part is not None]
    return bits([states, gradients, rng_state(CPU)])


def result(size, *trials, rank=0):
    """What a rank has found, each of its figures larger by its number; a trial is a size and its status."""
    return AutoBatchResult(
        mode="train",
        batch_size=size,
        certified=True,
        limited_by="memory",
        target_memory_fraction=0.8,
        budget_bytes=20 + rank,
        total_bytes=100,
        strategy="guided",
        seconds=1.0 + rank,
        held_bytes=2 + rank,
        trials=tuple(TrialRecord(tried, status, 5, 0.1) for tried, status in trials),
    )
