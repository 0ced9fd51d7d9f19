"""What a phantom GPU does: memory, errors, values, GPUs, collectives. `make test-gpu` runs these on one."""

import pytest
import torch
from torch import nn

from tests.phantom.build import ON_TWO_RANKS, on_phantoms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MIB = 1 << 20


MEMORY = """
import torch
total = torch.cuda.get_device_properties(0).total_memory
start, seen = torch.cuda.mem_get_info()
assert seen == total and start < total, "the context counts"
def refused(num_bytes):
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return "CUDA out of memory" in str(error)
block = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
assert torch.cuda.mem_get_info()[0] <= start - total // 2
assert refused(total // 2), "more than the GPU has"
del block
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info()[0] == start
torch.cuda.set_per_process_memory_fraction(0.01)
assert refused(total // 50), "more than the cap"
assert torch.cuda.memory_stats()["num_ooms"] == 2
print(total // 2**20, start // 2**20)
"""


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
@pytest.mark.parametrize(("total", "other"), [(8, 0), (24, 3), (80, 0)])
def test_a_card_has_the_memory_that_it_was_given(total, other, segments, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", segments)
    shown = on_phantoms("-c", MEMORY, total_gib=total, other_gib=other, context_mib=300)
    assert shown.split() == [str(1024 * total), str(1024 * (total - other) - 300)]


def trained(amp, **options):
    """The losses of some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    ).cuda()
    images, labels = torch.randn(32, 3, 8, 8).cuda(), torch.randint(0, 10, (32,)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cuda", enabled=amp == torch.float16)
    losses = []
    for _ in range(6):
        with torch.autocast("cuda", amp or torch.bfloat16, enabled=amp is not None):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}])
def test_a_small_model_trains(amp, options):
    losses = trained(amp, **options)
    assert losses[-1] < 0.5 * losses[0]


def test_equal_seeds_give_equal_random_values():
    def drawn():
        torch.cuda.manual_seed(3)
        return torch.cat([torch.rand(4, device="cuda"), torch.rand(4, device="cuda")]).tolist()

    first = drawn()
    assert drawn() == first
    assert len(set(first)) == 8


RESIDUAL = """
import sys, torch
from torch import nn
from tests.phantom import values
if sys.argv[1] == "values":
    values.enable()
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    def forward(self, x):
        return x + self.body(x)
model = nn.Sequential(*(Block() for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(8000, 512, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


def test_values_change_no_memory():
    plain, with_values = (on_phantoms("-c", RESIDUAL, name) for name in ("plain", "values"))
    assert plain == with_values


COLLECTIVES = """
import os, torch, torch.distributed as dist
from torch import nn
from tests.phantom import values
values.enable()
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
sums = torch.tensor([1.0 + rank, 10.0 * (rank + 1)]).cuda()
dist.all_reduce(sums)
assert sums.tolist() == [3.0, 30.0], sums
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.full((4, 64), float(rank), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = [torch.zeros(64, 64).cuda() for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(weights[0].cpu(), weights[1].cpu()), "the ranks have drifted apart"
dist.destroy_process_group()
# One write: lines that two ranks print may mix.
os.write(1, b"%d " % (torch.cuda.get_device_properties(rank).total_memory >> 30))
"""


def test_two_unequal_cards_train_together():
    shown = on_phantoms(*ON_TWO_RANKS, COLLECTIVES, gpus=2, total_gib="40,24")
    assert sorted(shown.split()) == ["24", "40"]
