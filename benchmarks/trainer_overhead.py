"""Compare the steps per second of Linnaeus' trainer with those of a bare PyTorch loop, in one run.

    python benchmarks/trainer_overhead.py

Both train the same timm model on the same batches with the same optimizer and losses. They take turns of a
few steps each, so that the load of the machine affects both alike. The result is the median, over pairs of
turns, of the ratio of their speeds. The goal: the trainer is at most 2 % slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import torch
import torch.nn.functional as functional

from linnaeus.batch_plan.effective_batch import Facts
from linnaeus.batch_plan.plan import plan_batches
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import Loaders, build_loaders
from linnaeus.runtime.console import ProgressBar
from linnaeus.runtime.distributed import World, resolve_device
from linnaeus.runtime.rng import seed_all
from linnaeus.runtime.signals import StopRequest
from linnaeus.training.build import Assembly, assemble
from linnaeus.training.checkpoint import CheckpointFolder
from linnaeus.training.schedule import Schedule
from linnaeus.training.stop import StopAgreement
from linnaeus.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=30, help="pairs of turns")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in one turn")
    parser.add_argument("--model", default="resnet10t")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    config = load_config(
        [
            f"MODEL.NAME={arguments.model}",
            "DATA.DATASET.NAME=synthetic",
            f"DATA.IMG_SIZE={arguments.img_size}",
            f"DATA.DATASET.NUM_SAMPLES={arguments.steps * arguments.batch_size}",
            f"DATA.BATCH_SIZE={arguments.batch_size}",
            f"TRAIN.EPOCHS={2 * arguments.turns}",
            "TRAIN.LOG_EVERY=10",
            "SCHEDULE.NAME=constant",
            "SCHEDULE.WARMUP_EPOCHS=0",
        ]
    ).config
    device = resolve_device("auto")
    ours, bare = our_turns(config, device), bare_turns(config, device)
    turns = [(timed(ours), timed(bare)) for _ in range(arguments.turns + 1)][
        1:
    ]  # the first warms up
    report(arguments, device, turns)


def timed(turns: Iterator[None]) -> float:
    started = time.perf_counter()
    next(turns)
    return time.perf_counter() - started


def build(config: Config, device: torch.device) -> tuple[DataBundle, Assembly, Loaders]:
    seed_all(0)
    data, size = build_data(config.DATA, seed=0), config.DATA.BATCH_SIZE
    assembly = assemble(
        config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, World(device)
    )
    loaders = build_loaders(
        data,
        config.DATA,
        World(device),
        sizes=lambda epoch, skip: repeat(size, config.DATA.DATASET.NUM_SAMPLES // size),
        batch_size_val=size,
        seed=0,
    )
    return data, assembly, loaders


def our_turns(config: Config, device: torch.device) -> Iterator[None]:
    """Each turn is one epoch of the trainer with log lines, meters and stop checks, but no validation."""
    _, assembly, loaders = build(config, device)
    facts = Facts(config.DATA.BATCH_SIZE, 1, config.DATA.DATASET.NUM_SAMPLES, config.OPTIMIZER.LR)
    plan = plan_batches(config.TRAIN, config.OPTIMIZER, config.SCHEDULE, facts)
    schedule = Schedule(
        config.SCHEDULE,
        assembly.optimizer,
        steps_per_epoch=plan.steps_per_epoch,
        warmup_steps=plan.warmup_steps,
    )
    trainer = Trainer(
        config=config.TRAIN,
        plan=plan,
        world=World(device),
        assembly=assembly,
        loaders=loaders,
        schedule=schedule,
        checkpoints=CheckpointFolder(Path("unused")),
        progress_bar=ProgressBar(None),
        stop=StopAgreement(World(device), StopRequest()),
    )
    while True:
        trainer.train_epoch()
        trainer.progress.epoch, trainer.progress.samples = trainer.progress.epoch + 1, 0
        yield


def bare_turns(config: Config, device: torch.device) -> Iterator[None]:
    """Each turn is one epoch of a loop as one would write it by hand."""
    _, assembly, loaders = build(config, device)
    model, optimizer = assembly.model, assembly.optimizer
    epoch = 0
    while True:
        loaders.train.set_epoch(epoch)
        model.train()
        for step, batch in enumerate(loaders.train):
            images = batch.inputs.to(device, non_blocking=True)
            targets = batch.targets.to(device, non_blocking=True)
            images = ((images / 255) - 0.5) / 0.5
            logits = model(images)
            losses = [
                functional.cross_entropy(logits[level], targets[:, level])
                for level in range(len(logits))
            ]
            loss = sum(losses) / len(losses)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.TRAIN.CLIP_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 10 == 9:
                loss.item()
        epoch += 1
        yield


def report(
    arguments: argparse.Namespace, device: torch.device, turns: list[tuple[float, float]]
) -> None:
    ratios = sorted(bare / ours for ours, bare in turns)
    ours, bare = (
        statistics.median(column) / arguments.steps * 1000 for column in zip(*turns, strict=True)
    )
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    print(f"python {' '.join(sys.argv)}")
    print(
        f"{name}, torch {torch.__version__}, {arguments.model} at {arguments.img_size} px, "
        f"batch {arguments.batch_size}, {arguments.turns} turns of {arguments.steps} steps"
    )
    print(f"bare loop {bare:.2f} ms/step, Linnaeus {ours:.2f} ms/step (medians)")
    quarter = len(ratios) // 4
    print(
        f"steps per second, Linnaeus / bare loop: median {statistics.median(ratios):.3f}, "
        f"middle half {ratios[quarter]:.3f} to {ratios[-quarter - 1]:.3f}"
    )


if __name__ == "__main__":
    main()
