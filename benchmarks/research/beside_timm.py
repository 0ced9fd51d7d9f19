"""Train Fashion-MNIST with Linnaeus and with a loop of timm's own functions, and fine-tune both.

    python -m benchmarks.research.beside_timm FOLDER --data IDX_FOLDER [--device cuda] [--at-once 2]

Both train the same network on the same images with timm's RandAugment, Mixup, AdamW, a cosine schedule and an
exponential average of the weights. The loop has the loader, augmentation, Mixup, average, optimizer and
schedule of timm's training script, and nothing else of it. A second pair fine-tunes: its weights are of a run
on six articles, and its training data are ten images of each of the other four.

A table row is the top-1 accuracy of the averaged weights after the last epoch, in percent: the mean over the
seeds with the standard deviation of one run, and the seconds of an epoch without its
validation, with its checkpoint in Linnaeus.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import Mixup, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, random_seed

from linnaeus import load_run

SIDE = 56
MEAN, STD = 0.286, 0.353
MODEL = {"stem_width": 8, "channels": [24, 48, 96, 192]}
# Where the magnitude varies (mstd0.5), timm 1.0 asks Pillow 13 for colors of 0 bits, which is an error.
POLICY = "rand-m9-inc1"
MIXUP = 0.2
EMA_DECAY = 0.998
WEIGHT_DECAY = 0.05
CLIP_NORM = 1.0
LAST_LR = 0.01
"""Fraction of the peak learning rate."""
FIRST, OTHERS = list(range(6)), list(range(6, 10))
"""Articles of the run whose weights are fine-tuned, and of the fine-tuning."""


class Articles(torch.utils.data.Dataset):
    """Images of some articles of Fashion-MNIST.

    Args:
        split: `train` or `val`.
        folder: of the four `.gz` files.
        articles: labels 0 to 9 to keep; they are counted anew from 0.
        per_article: training images of each, the first ones; None keeps all.
    """

    transform = None

    def __init__(
        self, split: str, folder: str, articles: list[int], per_article: int | None = None
    ):
        stem = Path(folder) / ("train" if split == "train" else "t10k")
        pixels = gzip.decompress(Path(f"{stem}-images-idx3-ubyte.gz").read_bytes())
        values = gzip.decompress(Path(f"{stem}-labels-idx1-ubyte.gz").read_bytes())
        images = np.frombuffer(pixels, np.uint8, offset=16)
        labels = np.frombuffer(values, np.uint8, offset=8)
        limit = per_article if split == "train" else None
        rows = np.concatenate([np.flatnonzero(labels == article)[:limit] for article in articles])
        self.images = images.reshape(-1, 28, 28)[rows]
        self.targets = [articles.index(label) for label in labels[rows]]
        self.num_classes = len(articles)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int):
        image = Image.fromarray(self.images[index])
        return self.transform(image) if self.transform else image, self.targets[index]


def work(kind: str) -> dict:
    """Articles, images of each, epochs, batch size and learning rate of a kind of run."""
    return {
        "scratch": {"articles": list(range(10)), "per_article": None, "batch": 128, "lr": 4e-3},
        "source": {"articles": FIRST, "per_article": None, "batch": 128, "lr": 4e-3},
        "tuned": {"articles": OTHERS, "per_article": 10, "batch": 20, "lr": 2e-3},
    }[kind]


def linnaeus_command(
    options: argparse.Namespace, kind: str, seed: int, weights: Path | None
) -> list[str]:
    """The command that trains with Linnaeus."""
    job = work(kind)
    keys = {
        "EXPERIMENT.OUTPUT_DIR": options.folder,
        "EXPERIMENT.NAME": f"{kind}_{seed}",
        "EXPERIMENT.SEED": seed,
        "EXPERIMENT.DEVICE": options.device,
        "DATA.DATASET._target_": "benchmarks.research.beside_timm.Articles",
        "DATA.DATASET.folder": options.data,
        "DATA.DATASET.articles": job["articles"],
        "DATA.DATASET.per_article": job["per_article"] or "null",
        "DATA.IMG_SIZE": SIDE,
        "DATA.NUM_WORKERS": options.workers,
        "DATA.BATCH_SIZE": job["batch"],
        "DATA.BATCH_SIZE_VAL": 500,
        "DATA.AUGMENT.CROP_SCALE": [1, 1],
        "DATA.AUGMENT.HFLIP": 0.5,
        "DATA.AUGMENT.POLICY": POLICY,
        "DATA.AUGMENT.MIXUP": MIXUP,
        "DATA.AUGMENT.MEAN": [MEAN],
        "DATA.AUGMENT.STD": [STD],
        "MODEL.NAME": "resnet10t",
        "MODEL.KWARGS": "{" + ",".join(f"{key}:{value}" for key, value in MODEL.items()) + "}",
        "OPTIMIZER.NAME": "adamw",
        "OPTIMIZER.LR": job["lr"],
        "OPTIMIZER.WEIGHT_DECAY": WEIGHT_DECAY,
        "SCHEDULE.WARMUP_EPOCHS": 1,
        "SCHEDULE.MIN_LR_FRACTION": LAST_LR,
        "TRAIN.EPOCHS": epochs_of(options, kind),
        "TRAIN.VALIDATE_EVERY": epochs_of(options, kind),
        "TRAIN.CLIP_GRAD_NORM": CLIP_NORM,
        "TRAIN.EMA.ENABLED": True,
        "TRAIN.EMA.DECAY": EMA_DECAY,
        "TRAIN.CHANNELS_LAST": True,
    } | ({"MODEL.WEIGHTS": weights} if weights else {})
    pairs = [f"{key}={value}".replace(" ", "") for key, value in keys.items()]
    return [sys.executable, "-m", "linnaeus.train", *pairs]


def loop_command(
    options: argparse.Namespace, kind: str, seed: int, weights: Path | None
) -> list[str]:
    """The command that trains with the loop of this file."""
    given = [f"--data={options.data}", f"--device={options.device}", f"--workers={options.workers}"]
    given += [f"--epochs={options.epochs}", f"--tuned-epochs={options.tuned_epochs}"]
    given += [f"--weights={weights}"] if weights else []
    return [
        sys.executable,
        "-m",
        __spec__.name,
        str(options.folder),
        f"--loop={kind},{seed}",
        *given,
    ]


def epochs_of(options: argparse.Namespace, kind: str) -> int:
    return options.tuned_epochs if kind == "tuned" else options.epochs


def loop(options: argparse.Namespace, kind: str, seed: int) -> None:
    """Train with timm's functions alone, and print accuracy and seconds of an epoch."""
    job, num_epochs, device = work(kind), epochs_of(options, kind), torch.device(options.device)
    random_seed(seed)
    common = {
        "input_size": (1, SIDE, SIDE), "mean": (MEAN,), "std": (STD,), "interpolation": "bilinear",
        "num_workers": options.workers, "device": device, "use_prefetcher": device.type == "cuda",
        "pin_memory": device.type == "cuda", "persistent_workers": options.workers > 0,
    }  # fmt: skip
    train = Articles("train", options.data, job["articles"], job["per_article"])
    batches = create_loader(
        train, batch_size=job["batch"], is_training=True, scale=(1, 1), ratio=(1, 1), hflip=0.5,
        color_jitter=0, auto_augment=POLICY, **common,
    )  # fmt: skip
    val = Articles("val", options.data, job["articles"])
    val_batches = create_loader(val, batch_size=500, is_training=False, crop_pct=1.0, **common)
    model = timm.create_model("resnet10t", in_chans=1, num_classes=train.num_classes, **MODEL)
    if options.weights:
        source = load_run(options.weights, checkpoint="last", device="cpu")  # its averaged weights
        backbone = {
            name.removeprefix("backbone."): value
            for name, value in source.model.state_dict().items()
        }
        own = model.state_dict()
        model.load_state_dict(own | {name: backbone[name] for name in own if name in backbone})
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, "adamw", lr=job["lr"], weight_decay=WEIGHT_DECAY)
    schedule, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=num_epochs - 1, warmup_epochs=1, warmup_prefix=True, warmup_lr=1e-5,
        min_lr=job["lr"] * LAST_LR, step_on_epochs=False, updates_per_epoch=len(batches),
    )  # fmt: skip
    mixup = Mixup(mixup_alpha=MIXUP, label_smoothing=0.0, num_classes=train.num_classes)
    loss_of, average = SoftTargetCrossEntropy(), ModelEmaV3(model, decay=EMA_DECAY, use_warmup=True)
    seconds, step = [], 0
    for _ in range(num_epochs):
        model.train()
        started = time.perf_counter()
        for images, labels in batches:
            images, labels = mixup(images.to(device), labels.to(device))
            loss = loss_of(model(images.contiguous(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            step += 1
            average.update(model, step=step)
            schedule.step_update(step)
        loss.item()
        seconds.append(time.perf_counter() - started)
    average.module.eval()
    with torch.no_grad():
        right = sum(
            (average.module(images.to(device)).argmax(1) == labels.to(device)).sum()
            for images, labels in val_batches
        )
    print(f"top-1 {100 * float(right) / len(val):.2f}, {statistics.median(seconds):.3f} s an epoch")


def trained(options: argparse.Namespace, name: str, command: list[str]) -> tuple[float, float]:
    """Accuracy in percent, and the seconds of an epoch, of a run whose output goes to NAME.txt."""
    with (options.folder / f"{name}.txt").open("w+") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        log.seek(0)
        if found := re.search(r"top-1 ([\d.]+), ([\d.]+) s", log.read()):
            return float(found[1]), float(found[2])
    lines = (options.folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    top1 = next(record["top1/class"] for record in reversed(records) if record["split"] == "val")
    ends = {record["epoch"]: record["time"] for record in records if record["split"] == "train"}
    lengths = [after - before for before, after in pairwise(ends.values())]  # with a checkpoint
    return 100 * top1, statistics.median(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--tuned-epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        kind, seed = options.loop.split(",")
        return loop(options, kind, int(seed))
    options.folder.mkdir(parents=True, exist_ok=True)
    source = options.folder / "source_0"
    with ThreadPoolExecutor(options.at_once) as pool:

        def start(kind: str, weights: Path | None = None) -> list:
            return [
                pool.submit(trained, options, name, make(options, kind, seed, weights))
                for seed in range(options.seeds)
                for name, make in (
                    (f"{kind}_{seed}", linnaeus_command),
                    (f"{kind}_loop_{seed}", loop_command),
                )
            ]

        first = pool.submit(
            trained, options, "source_0", linnaeus_command(options, "source", 0, None)
        )
        found = {"scratch": start("scratch")}
        first.result()
        found["tuned"] = start("tuned", source)
        for kind, jobs in found.items():
            for offset, title in enumerate(("Linnaeus", "timm's functions")):
                top1, seconds = zip(*(job.result() for job in jobs[offset::2]), strict=True)
                spread = statistics.stdev(top1) if len(top1) > 1 else 0.0
                print(
                    f"{kind:8} {title:17} {statistics.mean(top1):6.2f} ± {spread:.2f}   "
                    f"{statistics.median(seconds):8.3f} s an epoch",
                    flush=True,
                )


if __name__ == "__main__":
    main()
