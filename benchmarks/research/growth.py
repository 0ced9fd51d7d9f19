"""How reading a manifest grows with its rows and classes, and a sweep with its runs.

    python benchmarks/research/growth.py
    python benchmarks/research/growth.py --check --rows 10000 100000 --classes 1000 10000 --runs 10 100

Each manifest is read in a process of its own, for its CPU seconds and peak memory. The law is the exponent; 1
is linear. With `--check`, the exit code is 1 where it exceeds `MOST`. A busy machine hardly changes it, since
it compares sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

from PIL import Image

MOST = 1.15
SIZES = {
    "rows": [10_000, 100_000, 1_000_000],
    "classes": [1_000, 10_000, 50_000],
    "runs": [10, 100, 1_000],
}
CLASSES_OF_ROWS, ROWS_OF_CLASS = 1000, 4
LEVELS = ("order", "family", "species")


def write_manifest(folder: Path, num_rows: int, num_classes: int, *, knows_parents: bool) -> None:
    """Write a manifest of three levels, whose rows share 200 small images.

    Without `knows_parents`, every second row has its species alone.
    """
    for i in range(200):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.png")
    with (folder / "train.csv").open("w") as file:
        print("image", *LEVELS, sep=",", file=file)
        for i in range(num_rows):
            label = i % num_classes
            above = f"o{label // 100}", f"f{label // 10}"
            if not knows_parents and i // num_classes % 2:
                above = "", ""
            print(f"{i % 200}.png", *above, f"s{label}", sep=",", file=file)


def measure(folder: Path) -> None:
    """Print the CPU seconds of `build_data`, and the memory that it adds at most, in MB."""
    from linnaeus.config.schema import DataConfig, DatasetConfig
    from linnaeus.data.datasets import build_data

    config = DataConfig(DATASET=DatasetConfig(NAME="manifest", ROOT=str(folder)))
    before, started = getrusage(RUSAGE_SELF).ru_maxrss, time.process_time()
    build_data(config, seed=0)
    print(time.process_time() - started, (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024)


def law_of(what: str, sizes: list[int]) -> float:
    """Print a row for each size, and the law, which is returned."""
    seconds: list[float] = []
    print(f"{what:>10} {'CPU s':>8} {'peak MB':>8}")
    for size in sizes:
        rows = (size, CLASSES_OF_ROWS) if what == "rows" else (size * ROWS_OF_CLASS, size)
        with tempfile.TemporaryDirectory() as folder:
            write_manifest(Path(folder), *rows, knows_parents=what == "rows")
            command = [sys.executable, __file__, "--measure", folder]
            words = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        cpu, peak = map(float, words.split())
        seconds.append(cpu)
        print(f"{size:10,} {cpu:8.2f} {peak:8.0f}", flush=True)
    law = math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2])
    print(f"exponent: {law:.2f}\n")
    return law


def measure_runs(sizes: list[int]) -> float:
    """Print CPU seconds of the commands that handle all runs of a sweep; return the largest exponent.

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
    laws = [float(np.polyfit(np.log(sizes), np.log(x), 1)[0]) for x in seconds.values()]
    for name, law in zip(seconds, laws, strict=True):
        print(f"{name}: exponent {law:.2f}")
    return max(laws)


def main() -> int:
    """Print the laws; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for what, sizes in SIZES.items():
        parser.add_argument(f"--{what}", type=int, nargs="+", default=sizes, metavar="N")
    parser.add_argument("--check", action="store_true", help=f"fail above an exponent of {MOST}")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return 0
    laws = [law_of(what, getattr(options, what)) for what in ("rows", "classes")]
    laws.append(measure_runs(options.runs))
    return int(options.check and max(laws) > MOST)


if __name__ == "__main__":
    sys.exit(main())
