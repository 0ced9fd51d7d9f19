"""Compare the heads `independent` and `marginal` with many and with few labels at the finest level.

    python benchmarks/heads.py

Both heads get the same backbone, data, batches, optimizer and number of steps; only the seed varies. The
datasets are the digits (3 shapes, 10 digits) and made-up images of 3, 9, 27 and 81 classes, with noise. Of
a fraction of the training samples the label is unknown below a random level; validation samples have all
labels. Each figure is the mean over the seeds, with the standard deviation of one run. `consistent` is the
fraction of samples whose predicted classes lie below each other. `probability gap` is the mean, over samples
and coarse classes, of the difference between a class's probability and the sum of those of its children.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.data.batch import Batch
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data
from linnaeus.runtime.distributed import World
from linnaeus.runtime.rng import seed_all
from linnaeus.training.build import Assembly, assemble
from linnaeus.training.losses import logits_per_level

HEADS = ("independent", "marginal")
COMMON = ("MODEL.NAME=test_resnet", "DATA.DATASET.CHANNELS=1", "DATA.IMG_SIZE=8")
DIGITS = ("DATA.DATASET.NAME=digits", "DATA.AUGMENT.CROP_SCALE=[1,1]")
MADE_UP = (
    "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_CLASSES=[3,9,27,81]",
    "DATA.DATASET.NUM_SAMPLES=1620",
    "DATA.DATASET.NUM_SAMPLES_VAL=810",
    "DATA.AUGMENT.CROP_SCALE=[1,1]",
)
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--unknown", default="0.8,0", help="values of UNKNOWN_FRACTION")
    parser.add_argument("--datasets", default="made-up,digits")
    parser.add_argument("--opts", nargs="*", default=[], help="further KEY=VALUE for all runs")
    arguments = parser.parse_args()
    print(f"{arguments.epochs} epochs, batch size {arguments.batch_size}, {arguments.seeds} seeds")
    for dataset in arguments.datasets.split(","):
        for unknown in arguments.unknown.split(","):
            for head in HEADS:
                tokens = [
                    *COMMON,
                    *(DIGITS if dataset == "digits" else MADE_UP),
                    f"MODEL.HEAD={head}",
                    f"DATA.DATASET.UNKNOWN_FRACTION={unknown}",
                    *arguments.opts,
                ]
                config = load_config(tokens).config
                data = build_data(config.DATA, seed=0)
                train, val = whole(data.train), whole(data.val)
                results = [
                    train_once(
                        config, data, train, val, seed, arguments.epochs, arguments.batch_size
                    )
                    for seed in range(arguments.seeds)
                ]
                report(dataset, unknown, head, results)


def whole(dataset: object) -> Batch:
    """All samples as one batch, so that both heads wait for no loader."""
    inputs, targets = zip(*(dataset[i] for i in range(len(dataset))), strict=True)  # type: ignore[index, arg-type]
    return Batch(torch.stack(inputs), torch.stack(targets))


def train_once(
    config: Config,
    data: DataBundle,
    train: Batch,
    val: Batch,
    seed: int,
    epochs: int,
    batch_size: int,
) -> dict[str, float]:
    """Train from one seed; the metrics of validation after the last step."""
    seed_all(seed)
    parts = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, World(CPU))
    total_steps = epochs * (len(train.inputs) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        parts.optimizer, config.OPTIMIZER.LR, total_steps, pct_start=0.1, cycle_momentum=False
    )
    parts.model.train()
    for rows in batches(len(train.inputs), batch_size, epochs, seed):
        parts.train_step([Batch(train.inputs[rows], train.targets[rows])])
        schedule.step()
    return validated(parts, data, val)


def batches(num_samples: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """The rows of each batch, shuffled anew in each epoch; an incomplete batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(num_samples, generator=generator)
        yield from order[: num_samples // batch_size * batch_size].split(batch_size)


def validated(parts: Assembly, data: DataBundle, val: Batch) -> dict[str, float]:
    parts.model.eval()
    parts.validation_step(val)
    values = parts.metrics.compute(World(CPU))
    assert values is not None
    assert data.taxonomy is not None
    with torch.no_grad():
        levels = [
            level.softmax(dim=1)
            for level in logits_per_level(parts.model(val.inputs), list(data.taxonomy.names))
        ]
    return {**values, "probability gap": probability_gap(levels, data.taxonomy.parents)}


def probability_gap(levels: Sequence[Tensor], parents: Sequence[Sequence[int]]) -> float:
    """Mean of |p(class) - sum of p(child)| over samples and all classes above the finest level."""
    gaps = [
        (coarse - torch.zeros_like(coarse).index_add(1, torch.tensor(row), fine)).abs().flatten()
        for coarse, fine, row in zip(levels, levels[1:], parents, strict=False)
    ]
    return float(torch.cat(gaps).mean())


def report(dataset: str, unknown: str, head: str, results: list[dict[str, float]]) -> None:
    shown = [name for name in results[0] if name.startswith(("top1", "consistent", "probability"))]
    figures = []
    for name in shown:
        values = [result[name] for result in results]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        figures.append(f"{name} {statistics.mean(values):.3f} ± {deviation:.3f}")
    print(f"{dataset:8} unknown {unknown:5} {head:12} {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
