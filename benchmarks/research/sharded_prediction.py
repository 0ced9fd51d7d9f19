"""What torch reserves on one rank of a sharded training step, and what is predicted.

    PHANTOM_TOTAL_GIB=80 python -m tests.phantom python -m benchmarks.research.sharded_prediction \\
        [--worlds 2,4,8,64]

The rank runs alone, in groups that communicate nothing, on a phantom GPU: torch's own FSDP2 and allocator.
AdamW, blocks and root sharded, parameters gathered in float32 or bf16. The buffers of NCCL are not there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from itertools import product
from statistics import median

import torch

SIZES = ("8", "32")
CASES = (
    ("vit_base_patch16_224", "float32"),
    ("vit_base_patch16_224", "bf16"),
    ("resnet50", "float32"),
    ("gpt", "float32"),
    ("gpt", "bf16"),
)
LINE = re.compile(r"torch (\d+) MiB, predicted (\d+) \(([+-][\d.]+)%\)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", default="2,4,8,64")
    worlds = parser.parse_args().worlds.split(",")
    print(
        "$ PHANTOM_TOTAL_GIB=80 python -m tests.phantom python -m benchmarks.research.sharded_prediction"
    )
    print(f"phantom card; torch {torch.__version__}\n")
    print(
        f"{'model':22} {'gathered':9} {'ranks':>5} {'batch':>5} {'MiB':>7} {'predicted':>9} {'error':>7}"
    )
    errors = []
    for model, kind in CASES:
        for world, size in product(
            worlds, SIZES
        ):  # each in a process of its own: leftovers change the pools
            options = [model, size, "--amp", kind, "--shards", world]
            done = subprocess.run(
                [sys.executable, "-m", "tests.phantom.compare", *options],
                capture_output=True,
                text=True,
                check=True,
            )
            ((real, predicted, error),) = LINE.findall(done.stdout)
            errors.append(abs(float(error)))
            print(
                f"{model:22} {kind:9} {world:>5} {size:>5} {real:>7} {predicted:>9} {error:>6}%",
                flush=True,
            )
    print(
        f"\nerror of {len(errors)} rows: median {median(errors):.2f} %, largest {max(errors):.2f} %"
    )


if __name__ == "__main__":
    main()
