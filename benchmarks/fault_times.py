"""How a torchrun job of two processes ends after a fault, and how the next start goes on, on this machine.

    python -m benchmarks.fault_times [--kind SIGKILL] [--place "in training"]

Each fault happens in a real job on the CPU, on rank 0 or rank 1, at one of five places. Each line of the
output has the seconds from the fault to the end of the last process, the exit code, what the other rank said,
and what the same command did next. The slow start is one of 60 s, on a dataset that takes so long to build.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path
from textwrap import shorten

from tests.helpers import forks
from tests.helpers.odd_ranks import KINDS, PLACES

ROOT = Path(__file__).parents[1]
JOB = (
    "DATA.DATASET._target_=tests.helpers.odd_ranks.Dataset", "MODEL.NAME=test_resnet", "DATA.IMG_SIZE=8",
    "DATA.BATCH_SIZE=8", "DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=8",
    "EXPERIMENT.DEVICE=cpu", "EXPERIMENT.NAME=job", "TRAIN.EPOCHS=3", "TRAIN.AUTO_RESUME=True",
)  # fmt: skip


def run(folder: Path, **env: str) -> tuple[int, str, float]:
    """The exit code of the job, what it printed, and when its last process had ended."""
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "tests.helpers.odd_ranks",
        *JOB,
    ]
    environment = {"PYTHONPATH": str(ROOT), "CI": "true", "OMP_NUM_THREADS": "1", **env}
    outcome = forks.python(*command, cwd=folder, env=environment, timeout=400)
    return outcome.code, outcome.out + outcome.err, time.time()


def show(name: str, **env: str) -> None:
    """Run a job with a fault, then the same command again, and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        code, text, ended = run(Path(folder), **env)
        happened = Path(folder, "fault_happened")
        began = float(happened.read_text()) if happened.exists() else started
        said = re.findall(r"(?:\[rank \d\] (?=rank \d:)|\b)((?:rank \d: .*)|stopped by \w+)", text)
        again, _, _ = run(Path(folder))
        end = "the run is complete" if again == 0 else f"exit code {again}"
        what = (
            shorten(said[0], 90, placeholder=" …")
            if said
            else "trained to its end"
            if code == 0
            else "nothing"
        )
        times = f"{ended - began:5.1f} s  exit code {code:>3}"
        print(f"{name:<48} {times}  {what}; next start: {end}", flush=True)


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=(*KINDS, "slow"))
    parser.add_argument("--place", choices=PLACES)
    options = parser.parse_args()
    print("$ python -m benchmarks.fault_times")
    for kind in (options.kind,) if options.kind else KINDS:
        for place in (options.place,) if options.place else PLACES:
            for rank in (0, 1) if kind != "slow" else ():
                show(f"{kind}, rank {rank}, {place}", FAULT=f"{kind}:{rank}:{PLACES[place]}")
    if options.kind in (None, "slow"):
        for rank in (0, 1):
            show(f"dataset 60 s later, rank {rank}", LATE_DATA=f"{rank}:60")


if __name__ == "__main__":
    main()
