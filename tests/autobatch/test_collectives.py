"""What runs before collectives of a group that communicates nothing; real groups are in test_group."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # torch has no other group of one process
from torch.distributed import HashStore
from torch.distributed import _functional_collectives as functional

from linnaeus.autobatch.ranks.collectives import BeforeCollectives, collectives_refused
from linnaeus.runtime.errors import AutoBatchError

pytestmark = [
    pytest.mark.usefixtures("compiles_unseen"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # older names
]


@pytest.fixture
def world():
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def kinds():
    """Kinds of collectives, each by the name of its operator."""
    one, two = torch.ones(2), [torch.ones(2), torch.ones(2)]
    return {
        "allreduce_": lambda: dist.all_reduce(one),
        "broadcast_": lambda: dist.broadcast(one, 0),
        "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(one, torch.ones(4)),
        "alltoall_": lambda: dist.all_to_all(two, two),
        "barrier": dist.barrier,
        "send": lambda: dist.send(one, 1),
    }


@pytest.mark.parametrize("name", kinds())
def test_each_kind_of_collective_is_seen_and_then_runs(name, world):
    seen = []
    collective = kinds()[name]
    with BeforeCollectives(lambda name, group: seen.append(name)), torch.inference_mode():
        collective()
    assert seen == [name]
    collective()
    assert seen == [name], "outside of the context it is not seen"


def test_collectives_of_compiled_code_and_backward_are_refused(world):
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            dist.all_reduce(gradient)
            return gradient

    @torch.compile(backend="aot_eager")
    def compiled(x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    def backward():
        Summed.apply(torch.ones(2, requires_grad=True)).sum().backward()

    for step in (partial(compiled, torch.ones(2)), backward):
        step()
        with collectives_refused(), pytest.raises(AutoBatchError, match="allreduce"):
            step()
        step()
