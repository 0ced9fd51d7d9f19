"""Compare what `LOSS` and `DATA.SAMPLER` offer for classes of unequal size.

    python benchmarks/uneven_classes.py

The digits, with 144 training samples of the most frequent class and 1 of the rarest, in geometric steps
between them. The seed decides which class is rare. Validation has 34 to 36 samples of each class. All rows
get the same network, steps, optimizer and schedule. `macro` is the mean recall of the ten classes, `rare` of
the three rarest, after the last step: means over the seeds, with the standard deviation of one run.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor

from linnaeus.config.load import load_config
from linnaeus.data.batch import Batch
from linnaeus.data.builtin import ImageTensors
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data
from linnaeus.data.sampler import ClassSampler, EpochSampler
from linnaeus.runtime.distributed import World
from linnaeus.runtime.rng import seed_all
from linnaeus.training.build import assemble

COMMON = (
    "MODEL.NAME=test_resnet",
    "DATA.DATASET.NAME=digits",
    "DATA.DATASET.CHANNELS=1",
    "DATA.IMG_SIZE=8",
    "DATA.AUGMENT.CROP_SCALE=[1,1]",
    "LOSS.LEVEL_WEIGHTS=[0,1]",
)
ROWS = (
    "",
    "DATA.SAMPLER=balanced",
    "DATA.SAMPLER=sqrt",
    "LOSS.CLASS_WEIGHTS=balanced",
    "LOSS.CLASS_WEIGHTS=effective LOSS.EFFECTIVE_BETA=0.99",
    "LOSS.LOGIT_ADJUSTMENT=1",
    "LOSS.NAME=focal",
    "LOSS.NAME=bce",
    "LOSS.NAME=bce LOSS.POS_WEIGHT=balanced",
)
FREQUENT, RATIO = 144, 100
WORLD = World(torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    print(f"{arguments.epochs} epochs, batch size {arguments.batch_size}, {arguments.seeds} seeds")
    for row in ROWS:
        results = [
            train_once(row.split(), seed, arguments.epochs, arguments.batch_size)
            for seed in range(arguments.seeds)
        ]
        macro, rare = (
            f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
            for values in zip(*results, strict=True)
        )
        print(f"{row or 'plain cross-entropy':54s} macro {macro}, rare {rare}", flush=True)


def train_once(tokens: list[str], seed: int, epochs: int, batch_size: int) -> tuple[float, float]:
    """Train from one seed; the mean recall of all classes, and of the three rarest."""
    config = load_config([*COMMON, *tokens]).config
    data = build_data(config.DATA, seed=0)
    # The place of each class among the frequencies.
    places = (torch.arange(10) + 3 * seed) % 10
    train = thinned(data, places)
    data.train = train
    seed_all(seed)
    parts = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, WORLD)
    if config.DATA.SAMPLER == "shuffle":
        sampler = EpochSampler(len(train), seed=seed)
    else:
        power = 0.5 if config.DATA.SAMPLER == "sqrt" else 0.0
        sampler = ClassSampler(train.targets, power=power, seed=seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        parts.optimizer,
        config.OPTIMIZER.LR,
        epochs * (len(train) // batch_size),
        pct_start=0.1,
        cycle_momentum=False,
    )
    inputs, targets = whole(train)
    for epoch in range(epochs):
        parts.model.train()
        sampler.set_epoch(epoch)
        order = torch.tensor([key[1] for key in sampler])
        for rows in order[: len(order) // batch_size * batch_size].split(batch_size):
            parts.train_step([Batch(inputs[rows], targets[rows])])
            schedule.step()
    parts.model.eval()
    inputs, targets = whole(data.val)
    with torch.no_grad():
        is_correct = parts.model(data.on_device.normalise(inputs))[-1].argmax(1) == targets[:, 1]
    recalls = torch.tensor(
        [is_correct[targets[:, 1] == label].float().mean() for label in range(10)]
    )
    return float(recalls.mean()), float(recalls[places >= 7].mean())


def thinned(data: DataBundle, places: Tensor) -> ImageTensors:
    """The training samples, fewer of the classes with later places."""
    train = data.train
    rows = []
    for label, place in enumerate(places.tolist()):
        found = torch.nonzero(train.targets[:, 1] == label).flatten()
        rows.append(found[: round(FREQUENT * RATIO ** (-place / 9))])
    chosen = torch.cat(rows)
    return ImageTensors(train.images[chosen], train.targets[chosen], train.transform)


def whole(dataset: ImageTensors) -> tuple[Tensor, Tensor]:
    """All inputs and all targets."""
    inputs, targets = zip(*(dataset[i] for i in range(len(dataset))), strict=True)
    return torch.stack(inputs), torch.stack(targets)


if __name__ == "__main__":
    main()
