"""How reading a manifest grows with its rows and classes: CPU seconds, peak memory and the law.

    python benchmarks/growth.py
    python benchmarks/growth.py --check --rows 10000 100000 --classes 1000 10000

Each size runs in a process of its own. The law is the exponent between the two largest sizes; 1 is linear.
With `--check`, the exit code is 1 where it exceeds `MOST`. A busy machine hardly changes it, since it
compares sizes.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from PIL import Image

MOST = 1.15
SIZES = {"rows": [10_000, 100_000, 1_000_000], "classes": [1_000, 10_000, 50_000]}
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
    laws = [law_of(what, getattr(options, what)) for what in SIZES]
    return int(options.check and max(laws) > MOST)


if __name__ == "__main__":
    sys.exit(main())
