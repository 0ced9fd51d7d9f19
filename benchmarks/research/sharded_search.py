"""The size that a search finds for a sharded model, beside that of brute force with all ranks.

    PHANTOM_GPUS=2 PHANTOM_TOTAL_GIB=40,24 python -m tests.phantom \\
        torchrun --nproc_per_node=2 -m benchmarks.research.sharded_search [--how full] [--dtype fp32]

The model is vit_base_patch16_224 with AdamW, its blocks and the rest sharded by FSDP2. A row has the size
found, the peak of real joint steps as a part of the budget of the fullest rank, and the largest size whose
real joint steps stay within the budget of every rank, bisected in this process after the search.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.distributed as torch_dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from linnaeus.autobatch import auto_find_batch_size
from linnaeus.autobatch.memory.device import CudaMemory

FRACTION, STEPS = 0.5, 3
FORMATS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


def build(how: str, dtype: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model, sharded over all ranks or over those of each of two nodes, and its optimizer."""
    ranks, names = torch_dist.get_world_size(), ("replicate", "shard")
    shape = (2, ranks // 2) if how == "hybrid" else (ranks,)
    mesh = torch_dist.init_device_mesh("cuda", shape, mesh_dim_names=names[-len(shape) :])
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=FORMATS[dtype])
    model.to_empty(device="cuda")
    return model, torch.optim.AdamW(model.parameters())


def of_all(value: float) -> list[float]:
    """The value of each rank."""
    values = [torch.zeros((), dtype=torch.float64) for _ in range(torch_dist.get_world_size())]
    torch_dist.all_gather(values, torch.tensor(value, dtype=torch.float64), group=HOST)
    return [float(each) for each in values]


def row(how: str, dtype: str) -> str:
    """Search, then step together."""
    model, optimizer = build(how, dtype)
    memory = CudaMemory(torch.device("cuda", torch.cuda.current_device()))

    def step(images: torch.Tensor) -> None:
        model(images).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(n: int) -> torch.Tensor:
        return torch.empty(n, 3, 224, 224, device="cuda")

    began = time.monotonic()
    found = auto_find_batch_size(
        step,
        make_batch,
        state=(model, optimizer),
        max_batch_size=1 << 14,
        target_memory_fraction=FRACTION,
    )
    seconds = time.monotonic() - began
    share = real_share(step, make_batch, memory, optimizer)
    most = largest(lambda n: share(n) <= 1, found.batch_size)
    return (
        f"{torch_dist.get_world_size()} {how:<6} {dtype}  found {found.batch_size:5d}  real steps at "
        f"{share(found.batch_size):.4f} of the budget  brute force {most:5d}  ratio "
        f"{found.batch_size / most:.4f}  {len(found.trials)} trials, {seconds:.0f} s"
    )


def real_share(
    step: Callable[[Any], None],
    make_batch: Callable[[int], Any],
    memory: CudaMemory,
    optimizer: Any,
) -> Callable[[int], float]:
    """A function of the size: the peak of real joint steps over the budget, of the rank where it is most."""

    def share(size: int) -> float:
        optimizer.state.clear()
        optimizer.zero_grad()
        gc.collect()
        memory.clean()
        memory.reset_peak()
        for _ in range(STEPS):
            step(make_batch(size))
        torch.cuda.synchronize()
        return max(of_all(memory.peak() / memory.budget(FRACTION, None)))

    return share


def largest(fits: Callable[[int], bool], near: int) -> int:
    """The largest size that fits, by bisection around one; memory is taken to grow with the size."""
    low, high = (near, near + max(1, near // 20)) if fits(near) else (0, near)
    while fits(high):
        low, high = high, high + max(1, near // 20)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", nargs="+", default=["full", "hybrid"])
    parser.add_argument("--dtype", nargs="+", default=list(FORMATS))
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch_dist.init_process_group("nccl")
    HOST = torch_dist.new_group(backend="gloo")
    lines = [row(how, dtype) for how in options.how for dtype in options.dtype]
    if torch_dist.get_rank() == 0:
        print(
            f"cards of {os.environ.get('PHANTOM_TOTAL_GIB', '?')} GiB", *lines, sep="\n", flush=True
        )
    torch_dist.barrier(HOST)
    os._exit(0)
