"""Compare the growth of the process on the CPU with that of its tensors, over the same training steps.

    python -m benchmarks.resident_growth

AutoBatch counts tensors, and makes the C library return freed blocks, so that the process grows as much.
Each model trains in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import timm
import torch
import torch.nn.functional as functional

from linnaeus.autobatch.memory.device import device_memory

MODELS = {
    "test_resnet": (128, 64),
    "test_vit": (160, 64),
    "test_convnext": (128, 32),
    "resnet18": (96, 32),
}
"""Image size and batch size of each model."""
NUM_STEPS = 15
MIB = 1024**2


def main() -> None:
    if len(sys.argv) > 1:
        print(_growth(sys.argv[1]))
        return
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.resident_growth", name]
        print(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout,
            end="",
            flush=True,
        )


def _growth(name: str) -> str:
    """Train, once counting the tensors and once reading the kernel's figures."""
    img_size, batch_size = MODELS[name]
    options = {"img_size": img_size} if name.endswith("vit") else {}
    model = timm.create_model(name, num_classes=10, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(size: int) -> None:
        images, labels = (
            torch.randn(size, 3, img_size, img_size),
            torch.zeros(size, dtype=torch.long),
        )
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2)  # loads the kernels
    optimizer.state.clear()
    memory = device_memory(torch.device("cpu"))
    held_bytes = memory.in_use()
    with memory.cap(memory.total_bytes):
        step(batch_size)
        step(batch_size)
    tensor_bytes = memory.peak() - held_bytes
    optimizer.state.clear()
    memory.clean()
    resident_bytes = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(NUM_STEPS):
        step(batch_size)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    growth_bytes = peak_bytes - resident_bytes
    return (
        f"{name}, {batch_size} images of {img_size} pixels: tensors {tensor_bytes / MIB:.0f} MiB, "
        f"process {growth_bytes / MIB:.0f} MiB, ratio {growth_bytes / tensor_bytes:.2f}"
    )


if __name__ == "__main__":
    main()
