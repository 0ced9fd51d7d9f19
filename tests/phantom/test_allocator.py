"""The model of the caching allocator against torch's own, on a full GPU."""

import pytest
import torch

from tests.phantom.build import on_phantoms

PROGRAM = """
import random, sys, torch
from linnaeus.autobatch.predict.allocator import CachingAllocator
draw, fraction, live, refused = random.Random(0), float(sys.argv[1]), [], 0
free_bytes, total_bytes = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction(fraction)
model = CachingAllocator(min(free_bytes, fraction * total_bytes))
for _ in range(2000):
    if live and draw.random() < 0.47:
        pointer, block = live.pop(draw.randrange(len(live)))
        torch.cuda.caching_allocator_delete(pointer)
        model.free(block)
        continue
    num_bytes, got = int(2 ** draw.uniform(9, draw.choice([21, 28]))), []
    for serve in (torch.cuda.caching_allocator_alloc, model.allocate):
        try:
            got.append(serve(num_bytes))
        except Exception as error:
            assert "OutOfMemory" in type(error).__name__
    assert len(got) != 1 and torch.cuda.memory_reserved() == model.reserved_bytes
    live, refused = live + [got] * bool(got), refused + (not got)
print(refused, torch.cuda.memory_stats()["num_alloc_retries"])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_full_card_serves_and_refuses_the_same():
    shown = on_phantoms("-c", PROGRAM, "0.015625", total_gib=64, other_gib=0, context_mib=0)
    refused, retries = map(int, shown.split())
    assert 0 < refused < retries
