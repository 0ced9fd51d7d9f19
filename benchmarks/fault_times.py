"""How long a torchrun job takes to end after a fault during the search, on this machine.

    python benchmarks/fault_times.py [--nproc 2]

Each fault happens in a real job on the CPU: an exception in the model's forward pass, a process killed with
SIGKILL, a process stopped with SIGSTOP. Each line of the output has the seconds from the fault to the end of
the last process, the exit code, and the message of the other rank.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = (
    "DATA.DATASET.NAME=synthetic", "DATA.DATASET.NUM_SAMPLES=96", "DATA.DATASET.NUM_SAMPLES_VAL=31",
    "DATA.IMG_SIZE=8", "MODEL._target_=tests.autobatch.faulty.Model",
    "OPTIMIZER._target_=tests.autobatch.faulty.Optimizer", "EXPERIMENT.DEVICE=cpu", "TRAIN.EPOCHS=1",
    "DATA.AUTOBATCH.ENABLED=True", "DATA.AUTOBATCH.MAX_BATCH_SIZE=24",
)  # fmt: skip
FAULTS = {
    "an exception on rank 0": "error:0",
    "an exception on rank 1": "error:1",
    "rank 0 killed": "kill:0",
    "rank 1 killed": "kill:1",
    "rank 0 hangs": "stop:0",
    "rank 1 hangs": "stop:1",
}


def seconds_after(fault: str, nproc: int) -> tuple[float, int, str]:
    """Seconds from the fault to the end of the job, its exit code, and the message of the other rank."""
    with tempfile.TemporaryDirectory() as folder:
        happened = Path(folder) / "happened"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
            "-m", "linnaeus.main", *JOB,
        ]  # fmt: skip
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "FAULT": fault, "FAULT_LOG": str(happened), "CI": "true",
        }  # fmt: skip
        # `run` returns when the last process that holds the pipe has ended, torchrun's children included.
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        ended = time.time()
        other = 1 - int(fault[-1])
        said = re.search(rf"\[rank {other}\] (.*)", done.stderr)
        return ended - float(happened.read_text()), done.returncode, said[1] if said else "nothing"


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    nproc = parser.parse_args().nproc
    print(f"$ python benchmarks/fault_times.py --nproc {nproc}")
    for name, fault in FAULTS.items():
        seconds, code, said = seconds_after(fault, nproc)
        print(f"{name:<24} {seconds:5.1f} s  exit code {code}  the other: {said}", flush=True)


if __name__ == "__main__":
    main()
