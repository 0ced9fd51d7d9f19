"""A phantom GPU: torch's own CUDA code without a GPU. See README.md."""

import os


def is_on():
    """Whether this process has phantom GPUs."""
    return "libphantom_cuda" in os.environ.get("LD_PRELOAD", "")
