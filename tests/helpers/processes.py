"""Several real processes that compute something for the tests of one module, started once."""

import os
import subprocess
from contextlib import contextmanager, suppress

import torch
import torch.distributed as torch_dist

from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.runtime.distributed import World
from tests.helpers import children
from tests.helpers.children import ROOT


def compute(module, num_ranks, folder):
    """What `work(rank, folder)` of a module returns in each of several processes, by rank."""
    log = folder / "output.txt"
    program = "from tests.helpers.processes import save; import {0}; save({0}.work, {1}, {2!r})"
    with log.open("w") as output:
        commands = [["-c", program.format(module, rank, str(folder))] for rank in range(num_ranks)]
        processes = [
            children.start(command, cwd=ROOT, stdout=output, stderr=output) for command in commands
        ]
        with suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(children.limit_s)
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
    assert codes == [0] * num_ranks, log.read_text()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(num_ranks)]


def save(work, rank, folder):
    """In one of the processes: do the work and leave its results for the test."""
    torch.set_num_threads(1)
    torch.save(work(rank, folder), f"{folder}/rank{rank}.pt")


@contextmanager
def group_of(world_size, rank, folder):
    """In one of the processes: a group of the first `world_size` of them. A folder serves each size once."""
    device = torch.device("cpu")
    if world_size == 1:
        yield World(device)
        return
    store = torch_dist.FileStore(f"{folder}/store{world_size}", world_size)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        with ControlPlane(torch_dist.PrefixStore("control", store), rank, world_size) as control:
            yield World(device, rank, world_size, world_size, control)
            control.gather(None)  # no heartbeat ends before the others are done
    finally:
        torch_dist.destroy_process_group()


def join_as_torchrun(rank, num_ranks, folder):
    """In one of the processes: join the group of all, with the environment that torchrun gives."""
    own, size = str(rank), str(num_ranks)
    os.environ |= {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    store = torch_dist.FileStore(f"{folder}/store", num_ranks)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
