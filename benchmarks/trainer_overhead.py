"""Compare the time of a training step of Linnaeus with a plain PyTorch loop, in one run.

    python benchmarks/trainer_overhead.py
    torchrun --nproc_per_node=2 benchmarks/trainer_overhead.py

Both train the same MLP on the same tensors in memory with the same optimizer. The plain loop has torch's own
DataLoader and, with several ranks, DistributedDataParallel. They take turns of a few steps each, so that the
load of the machine affects both alike. The result is the ratio of their shortest turns and the median ratio
of a pair of turns, for each width of the MLP, with one micro-batch a step and with eight. On a machine that
others use, `--cpu-time` counts seconds of this process's threads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as torch_dist
import torch.nn.functional as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from linnaeus.batch_plan.effective_batch import Facts
from linnaeus.batch_plan.plan import plan_batches
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import build_loaders
from linnaeus.runtime.console import ProgressBar
from linnaeus.runtime.context import running
from linnaeus.runtime.distributed import World
from linnaeus.runtime.rng import seed_all
from linnaeus.runtime.signals import StopRequest
from linnaeus.training.build import assemble
from linnaeus.training.checkpoint import CheckpointFolder
from linnaeus.training.ddp import wrap
from linnaeus.training.schedule import Schedule
from linnaeus.training.stop import StopAgreement
from linnaeus.training.trainer import Trainer

NUM_FEATURES = 64
BATCH_SIZE = 16
WIDTHS = {256: 1.5, 1024: 10, 4096: 100}
"""Width of the MLP: milliseconds of a step on one core, roughly."""


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Random vectors in memory, of ten classes."""

    num_classes = 10

    def __init__(self, length: int, split: str) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.inputs = torch.randn(length, NUM_FEATURES, generator=generator)
        self.labels = torch.randint(10, (length,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], self.labels[index]


def mlp(width: int) -> nn.Module:
    """An MLP with four layers."""
    sizes = (NUM_FEATURES, width, width, width)
    hidden = [
        layer
        for before, after in pairwise(sizes)
        for layer in (nn.Linear(before, after), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=20, help="pairs of turns")
    parser.add_argument("--turn-ms", type=int, default=150, help="length of a turn, roughly")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, choices=WIDTHS)
    parser.add_argument("--accumulation", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--cpu-time", action="store_true", help="of this process, not of the clock")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.set_flush_denormal(True)  # the model memorizes its samples, and gradients vanish
    config = load_config([]).config
    with running(config.EXPERIMENT, config.DIST, is_deterministic=False) as context:
        if context.world.is_main:
            print(f"python {' '.join(sys.argv)}")
            print(
                f"torch {torch.__version__}, {context.world.device}, {torch.get_num_threads()} threads, "
                f"ranks: {context.world.world_size}, {arguments.turns} pairs of turns"
            )
        for accumulation in arguments.accumulation:
            for width in arguments.widths:
                step_ms = WIDTHS[width] * accumulation
                num_steps = max(round(arguments.turn_ms / step_ms), 1)
                compare(width, accumulation, num_steps, arguments.turns, context.world, clock)


def compare(
    width: int,
    accumulation: int,
    num_steps: int,
    num_turns: int,
    world: World,
    clock: Callable[[], float],
) -> None:
    """Print how long a step takes in both loops."""
    length = num_steps * accumulation * BATCH_SIZE * world.world_size
    config = load_config(
        [
            f"MODEL={{_target_: trainer_overhead.mlp, width: {width}}}",
            f"DATA.DATASET={{_target_: trainer_overhead.Points, length: {length}}}",
            f"DATA.BATCH_SIZE={BATCH_SIZE}",
            "DATA.NUM_WORKERS=0",
            f"TRAIN.ACCUMULATION_STEPS={accumulation}",
            f"TRAIN.EPOCHS={2 * num_turns + 2}",
            "TRAIN.LOG_EVERY=50",
            "SCHEDULE.NAME=constant",
            "SCHEDULE.WARMUP_EPOCHS=0",
        ]
    ).config
    ours, plain = our_turns(config, world), plain_turns(config, world)
    for turns in (ours, plain):  # the first one warms up
        next(turns)
    pairs = [(timed(ours, clock), timed(plain, clock)) for _ in range(num_turns)]
    shortest = [1000 * min(column) / num_steps for column in zip(*pairs, strict=True)]
    median = statistics.median(ours / plain for ours, plain in pairs)
    if world.is_main:
        print(
            f"accumulation {accumulation}, width {width:4}: plain loop {shortest[1]:7.2f} ms, Linnaeus "
            f"{shortest[0]:7.2f} ms a step, ratio of minima {shortest[0] / shortest[1]:.3f}, "
            f"median ratio {median:.3f}"
        )


def timed(turns: Iterator[None], clock: Callable[[], float]) -> float:
    started = clock()
    next(turns)
    return clock() - started


def our_turns(config: Config, world: World) -> Iterator[None]:
    """Each turn is one epoch of the trainer with log lines, meters and stop checks, but no validation."""
    seed_all(0)
    data = build_data(config.DATA, seed=0)
    assembly = assemble(
        config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world, sharding=config.DIST
    )
    facts = Facts(BATCH_SIZE, world.world_size, len(data.train), config.OPTIMIZER.LR)
    plan = plan_batches(config.TRAIN, config.OPTIMIZER, config.SCHEDULE, facts)
    trainer = Trainer(
        config=config.TRAIN,
        plan=plan,
        world=world,
        assembly=assembly,
        loaders=build_loaders(
            data,
            config.DATA,
            world,
            sizes=plan.micro_batches,
            batch_size_val=BATCH_SIZE,
            seed=0,
        ),
        schedule=Schedule(
            config.SCHEDULE,
            assembly.optimizer,
            steps_per_epoch=plan.steps_per_epoch,
            warmup_steps=plan.warmup_steps,
        ),
        checkpoints=CheckpointFolder(Path("unused")),
        progress_bar=ProgressBar(None),
        stop=StopAgreement(world, StopRequest()),
        wrap=lambda model: wrap(model, world),
    )
    while True:
        trainer.train_epoch()
        trainer.progress.epoch, trainer.progress.samples = trainer.progress.epoch + 1, 0
        yield


def plain_turns(config: Config, world: World) -> Iterator[None]:
    """Each turn is one epoch of a loop as one would write it by hand."""
    seed_all(0)
    node, device = config.DATA.DATASET, world.device
    data = Points(node["length"], "train")
    bare = mlp(config.MODEL["width"]).to(device)
    model = DistributedDataParallel(bare) if torch_dist.is_initialized() else bare
    optimizer = torch.optim.AdamW(bare.parameters(), lr=config.OPTIMIZER.LR)
    sampler = DistributedSampler(data, world.world_size, world.rank, drop_last=True)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler, drop_last=True)
    accumulation = config.TRAIN.ACCUMULATION_STEPS
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        model.train()
        for number, (inputs, labels) in enumerate(loader, start=1):
            is_last = number % accumulation == 0
            if model is not bare:
                model.require_backward_grad_sync = is_last
            loss = functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            (loss / accumulation).backward()
            if is_last:
                nn.utils.clip_grad_norm_(bare.parameters(), config.TRAIN.CLIP_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if number % (50 * accumulation) == 0:
                loss.item()
        epoch += 1
        yield


if __name__ == "__main__":
    main()
