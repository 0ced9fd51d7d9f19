"""Compare the speed of training after a search on the CPU with that of training without one.

    python -m benchmarks.speed_after_search

Pairs of runs of the digits at 64 pixels: one searches its batch size, the other is given what was found. They
take turns at going first, so that the load of the machine affects both alike. The result is the median, over
the pairs, of the ratio of their images per second. The goal: at least 0.97.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = (
    "DATA.DATASET.NAME=digits",
    "DATA.IMG_SIZE=64",
    "MODEL.NAME=test_resnet",
    "EXPERIMENT.DEVICE=cpu",
    "DATA.NUM_WORKERS=0",
    "TRAIN.EPOCHS=2",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=64",
    "DATA.AUTOBATCH.ENABLED_VAL=False",
    "DATA.BATCH_SIZE_VAL=64",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8, help="pairs of runs")
    parser.add_argument("overrides", nargs="*", help="further settings, KEY=VALUE")
    arguments = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        size, _ = _train(Path(folder), "first", "DATA.AUTOBATCH.ENABLED=True", *arguments.overrides)
        kinds = {"search": "DATA.AUTOBATCH.ENABLED=True", "given": f"DATA.BATCH_SIZE={size}"}
        for pair in range(arguments.pairs):
            order = list(kinds) if pair % 2 else list(kinds)[::-1]
            speeds = {
                kind: _train(Path(folder), f"{kind}{pair}", kinds[kind], *arguments.overrides)[1]
                for kind in order
            }
            ratios.append(speeds["search"] / speeds["given"])
            print(
                f"pair {pair + 1}: batch size {size}, after a search {speeds['search']:.0f} images/s, "
                f"without one {speeds['given']:.0f}, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    low, high = min(ratios), max(ratios)
    print(f"median ratio {statistics.median(ratios):.3f} (from {low:.3f} to {high:.3f})")


def _train(folder: Path, name: str, *settings: str) -> tuple[int, float]:
    """Train in a process of its own; return the batch size and the images per second of training."""
    command = [
        sys.executable,
        "-m",
        "linnaeus.train",
        *SETTINGS,
        *settings,
        f"EXPERIMENT.NAME={name}",
    ]
    subprocess.run(
        [*command, f"EXPERIMENT.OUTPUT_DIR={folder}"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    result = json.loads((folder / name / "result.json").read_text())
    searched = folder / name / "autobatch.json"
    size = json.loads(searched.read_text())["train"]["batch_size"] if searched.exists() else 0
    return size, float(result["images_per_s"])


if __name__ == "__main__":
    main()
