"""Train Fashion-MNIST three times, the same with timm's own script, and with batches of 512 and 2,048.

    python benchmarks/fashion_mnist.py runs --timm-script train.py

Runs that have a result are not repeated, so that the command may be stopped and given again. `--timm-script`
is `train.py` of timm's repository, which neither its wheel nor its source distribution holds; without it the
other runs are made. It gets the model, augmentation, optimizer and schedule of configs/fashion_resnet.yaml,
and one flat level. `--time 5` compares, instead, the speed of both in runs of one epoch that take turns.

A table row is the accuracy at the finest level after the last epoch, in percent: the mean over the seeds,
with the standard deviation of one run.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

from linnaeus.config.load import load_config
from linnaeus.data.builtin import FASHION_FOLDER

CONFIG = Path(__file__).parents[1] / "configs" / "fashion_resnet.yaml"
SEEDS = (0, 1, 2)
SCALED = [(size, rule) for size in (512, 2048) for rule in ("linear", "sqrt")]
STEP = re.compile(r"(?:step |Train: \d+ \[ *)(\d+)/\d+")
"""The number of the optimizer step, in the logs of both."""


def ours(folder: Path, name: str, seed: int, *changes: str) -> list[str]:
    """The command of one of our runs."""
    return [
        sys.executable,
        "-m",
        "linnaeus.train",
        "--cfg",
        str(CONFIG),
        f"EXPERIMENT.OUTPUT_DIR={folder}",
        f"EXPERIMENT.NAME={name}",
        f"EXPERIMENT.SEED={seed}",
        *changes,
    ]


def scaled(folder: Path, size: int, rule: str) -> list[str]:
    """A run with another batch size. The micro-batch, which BatchNorm sees, is always 128."""
    changes = (
        f"TRAIN.EFFECTIVE_BATCH_SIZE={size}",
        f"OPTIMIZER.LR_SCALING={rule}",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=128",
        "TRAIN.VALIDATE_EVERY=5",
    )
    return ours(folder, f"{rule}_{size}", 0, *changes)


def timms(script: Path, folder: Path, name: str, seed: int, epochs: int | None = None) -> list[str]:
    """The command of timm's script for the configuration of our runs."""
    config = load_config(["--cfg", str(CONFIG)]).config
    data, optimizer, warmup = config.DATA, config.OPTIMIZER, int(config.SCHEDULE.WARMUP_EPOCHS or 0)
    side, augment = str(data.IMG_SIZE), data.AUGMENT
    options = {
        "data-dir": folder / "timm_data",
        "dataset": "torch/fashion_mnist",
        "model": config.MODEL.NAME,
        "num-classes": 10,
        "input-size": ["1", side, side],
        "mean": augment.MEAN,
        "std": augment.STD,
        "model-kwargs": [
            f"{key}={value!r}".replace(" ", "") for key, value in config.MODEL.KWARGS.items()
        ],
        "scale": ["1", "1"],
        "ratio": ["1", "1"],
        "hflip": augment.HFLIP,
        "color-jitter": 0,
        "smoothing": 0,
        "train-interpolation": "bilinear",
        "interpolation": "bilinear",
        "crop-pct": 1,
        "batch-size": config.TRAIN.EFFECTIVE_BATCH_SIZE,
        "validation-batch-size": 500,
        "opt": optimizer.NAME,
        "lr": optimizer.LR,
        "weight-decay": optimizer.WEIGHT_DECAY,
        "sched": "cosine",
        "clip-grad": config.TRAIN.CLIP_GRAD_NORM,
        "min-lr": optimizer.LR * config.SCHEDULE.MIN_LR_FRACTION,
        "warmup-epochs": warmup,
        "epochs": (epochs or config.TRAIN.EPOCHS) - warmup * (epochs is None),
        "workers": data.NUM_WORKERS,
        "seed": seed,
        "device": "cpu",
        "output": folder,
        "experiment": name,
        "log-interval": 10,
        "checkpoint-hist": 1,
    }
    command = [
        sys.executable,
        str(script),
        "--channels-last",
        "--sched-on-updates",
        "--warmup-prefix",
    ]
    for key, value in options.items():
        command += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return command


def accuracy(folder: Path, name: str) -> float | None:
    """Percent after the last epoch; None for a run that is not finished."""
    run = folder / name
    if (run / "result.json").is_file():
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return 100 * float(
            [record for record in records if record["split"] == "val"][-1]["top1/article"]
        )
    if (run / "finished").is_file():
        return float(list(csv.DictReader((run / "summary.csv").open()))[-1]["eval_top1"])
    return None


def train(folder: Path, name: str, command: list[str], threads: int) -> None:
    """Make one run, unless it has a result; its output goes to a file."""
    if accuracy(folder, name) is None:
        with (folder / f"{name}.log").open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        if done.returncode == 0 and (folder / name / "summary.csv").is_file():
            (folder / name / "finished").touch()
    print(name, accuracy(folder, name), flush=True)


def seconds_per_step(command: list[str]) -> float:
    """Seconds of an optimizer step, loading included, from the first logged one to the last."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    steps = [
        (int(found[1]), time.perf_counter())
        for line in process.stdout
        if (found := STEP.search(line))
    ]
    assert process.wait() == 0
    return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timm-script", type=Path)
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at a time; they share the cores"
    )
    parser.add_argument("--only", help="make these runs, in this order, such as seed_1,sqrt_2048")
    parser.add_argument("--time", type=int, help="pairs of epochs to time")
    arguments = parser.parse_args()
    folder, script = arguments.folder, arguments.timm_script
    raw = folder / "timm_data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for path in Path(FASHION_FOLDER).glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    if arguments.time:
        off = (
            "TRAIN.EPOCHS=1",
            "DATA.AUTOBATCH.ENABLED=False",
            "DATA.BATCH_SIZE=128",
            "TRAIN.LOG_EVERY=10",
        )
        commands = (ours(folder, "timed", 0, *off), timms(script, folder, "timm_timed", 0, 1))
        times = [[seconds_per_step(command) for command in commands] for _ in range(arguments.time)]
        mine, other = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"seconds per step: {mine:.4f}, timm's script {other:.4f}; ratio {mine / other:.3f} (medians)"
        )
        return
    jobs = {f"seed_{seed}": ours(folder, f"seed_{seed}", seed) for seed in SEEDS}
    others = {
        f"timm_{seed}": timms(script, folder, f"timm_{seed}", seed) for seed in SEEDS if script
    }
    batches = {f"{rule}_{size}": scaled(folder, size, rule) for size, rule in SCALED}
    pairs = [name for pair in zip_longest(jobs, others) for name in pair if name]
    first = 2 if script else 1
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.processes)
    with ThreadPoolExecutor(arguments.processes) as pool:
        order = [*pairs[:first], *batches, *pairs[first:]]
        order = arguments.only.split(",") if arguments.only else order
        list(
            pool.map(
                lambda name: train(folder, name, {**jobs, **others, **batches}[name], threads),
                order,
            )
        )
    for title, names in {
        "Linnaeus": jobs,
        "timm's script": others,
        **{name: [name] for name in batches},
    }.items():
        found = [value for name in names if (value := accuracy(folder, name)) is not None]
        if found:
            spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
            print(
                f"{title:14} {statistics.mean(found):.2f}{spread}  ({len(found)} of {len(names)} runs)"
            )


if __name__ == "__main__":
    main()
