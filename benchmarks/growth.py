"""How reading a manifest grows with its rows: seconds and peak memory of `build_data`, and the law.

    python benchmarks/growth.py 10000 100000 1000000
    python benchmarks/growth.py runs 10 100 500

Each size runs in a process of its own. The law is the exponent between the two largest sizes; 1 is linear.
The exit code is 1 where it exceeds `MOST`. A busy machine hardly changes it, since it compares sizes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from PIL import Image

MOST = 1.15
NUM_CLASSES = 1000
LEVELS = ("order", "family", "species")


def write_manifest(folder: Path, num_rows: int) -> None:
    """Write a manifest of three levels, whose rows share 200 small images."""
    for i in range(200):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.png")
    with (folder / "train.csv").open("w") as file:
        print("image", *LEVELS, sep=",", file=file)
        for i in range(num_rows):
            label = i % NUM_CLASSES
            names = (f"o{label // 100}", f"f{label // 10}", f"s{label}")
            print(f"{i % 200}.png", *names, sep=",", file=file)


def measure(folder: Path) -> None:
    """Print the CPU seconds of `build_data`, and the memory that it adds at most, in MB."""
    from linnaeus.config.schema import DataConfig, DatasetConfig
    from linnaeus.data.datasets import build_data

    config = DataConfig(DATASET=DatasetConfig(NAME="manifest", ROOT=str(folder)))
    before, started = getrusage(RUSAGE_SELF).ru_maxrss, time.process_time()
    build_data(config, seed=0)
    print(time.process_time() - started, (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024)


def measure_runs(sizes: list[int]) -> int:
    """Print CPU seconds of the commands that handle all runs of a sweep, and the exponents.

    `write` plans and writes a sweep, `again` is the same command, `sort` is `compare --sort metric`, and
    `look` is one look of the live table.
    """
    import numpy as np

    from linnaeus.cli.compare import find_runs, run_names
    from linnaeus.cli.runs import compared, read_run
    from linnaeus.cli.sweep import read
    from linnaeus.runtime.run_folder import read_state

    seconds: dict[str, list[float]] = {}

    def clock(name: str, call: Callable[[], Any]) -> Any:
        started = time.process_time()
        found = call()
        seconds.setdefault(name, []).append(time.process_time() - started)
        return found

    for num_runs in sizes:
        with tempfile.TemporaryDirectory() as folder:
            rates = f"OPTIMIZER.LR=range(0.001,{num_runs / 1000 + 0.0005:.4f},0.001)"
            command = [f"EXPERIMENT.OUTPUT_DIR={folder}", "EXPERIMENT.NAME=many", rates]
            for name in ("write", "again"):
                sweep = clock(name, lambda command=command: read(command)[1])
                sweep.write()
            runs = sweep.grid()
            for number, run in enumerate(runs):
                run.folder.mkdir()
                (run.folder / "config.yaml").write_text(run.config)
                line = {"epoch": 1, "split": "val", "loss": 1.0, "top1/digit": number / num_runs}
                (run.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")

            def sort(folder: str = folder) -> None:
                found = find_runs([folder], [], [])
                compared([read_run(each) for each in found], run_names(found)).sort("metric")

            clock("sort", sort)
            clock("look", lambda runs=runs: [read_state(run.folder) for run in runs])
        print(num_runs, {name: f"{found[-1]:.3f}" for name, found in seconds.items()}, flush=True)
    for name, found in seconds.items():
        law = np.polyfit(np.log(sizes), np.log(found), 1)[0]
        print(f"{name}: exponent {law:.2f}")
        if law > MOST:
            return 1
    return 0


def main(sizes: list[int]) -> int:
    """Print a row for each size, and the law; return the exit code."""
    seconds = []
    print(f"{'rows':>10} {'CPU s':>8} {'peak MB':>8}")
    for num_rows in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_manifest(Path(folder), num_rows)
            command = [sys.executable, __file__, "--measure", folder]
            words = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        cpu, peak = map(float, words.split())
        seconds.append(cpu)
        print(f"{num_rows:10,} {cpu:8.2f} {peak:8.0f}", flush=True)
    pairs = zip(pairwise(seconds), pairwise(sizes), strict=True)
    laws = [math.log(t / s) / math.log(n / m) for (s, t), (m, n) in pairs]
    print("exponents:", ", ".join(f"{law:.2f}" for law in laws))
    return int(bool(laws) and laws[-1] > MOST)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["runs"]:
        sys.exit(measure_runs([int(word) for word in sys.argv[2:]] or [10, 100, 500]))
    else:
        sys.exit(main([int(word) for word in sys.argv[1:]] or [10_000, 100_000, 1_000_000]))
