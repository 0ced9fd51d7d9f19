"""Run a command on a GPU where there is one, else on phantom GPUs.

    python -m tests.phantom python -m pytest -m gpu
    PHANTOM_GPUS=2 PHANTOM_TOTAL_GIB=40,24 python -m tests.phantom torchrun --nproc_per_node=2 ...

Where there is neither a GPU nor the parts of a phantom, one sentence says so, and the command is
skipped; with `CI` set, that is a failure.
"""

import ctypes
import os
import subprocess
import sys
import tempfile

from tests.phantom.build import CannotBuildError, environment


def has_card():
    """Whether the driver finds a GPU; asked without torch, which takes seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def main(command):
    if has_card():
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory(prefix="phantom-", dir="/dev/shm") as folder:
        try:
            env = environment(dir=os.environ.get("PHANTOM_DIR", folder))
        except CannotBuildError as missing:
            is_ci = bool(os.environ.get("CI"))
            print(f"{'failed' if is_ci else 'skipped'}: {missing}")
            return int(is_ci)
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
