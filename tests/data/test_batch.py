import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from linnaeus.autobatch import nest
from linnaeus.data.batch import Batch, BatchSpec, CopiedAhead, batch_size
from linnaeus.data.bundle import collate_pairs
from linnaeus.runtime.errors import DataError
from linnaeus.runtime.rng import seed_generators
from linnaeus.training.precision import Precision


class Images(Dataset):
    """Sample i has the i-th of the given shapes; it draws from all three global generators."""

    def __init__(self, shapes):
        self.shapes = shapes
        self.seen = []

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, index):
        self.seen.append(index)
        return torch.rand(self.shapes[index]) + random.random() + float(np.random.rand()), index


def time_first(samples):
    return Batch(
        {"x": torch.stack([x for x, _ in samples], dim=1)}, torch.tensor([y for _, y in samples])
    )


def concatenated(samples):
    """Rows of all samples one after the other, as for graphs or point clouds."""
    return Batch(torch.cat([x for x, _ in samples]), torch.tensor([[y, y + 1] for _, y in samples]))


def with_constants(samples):
    return Batch([torch.stack([x for x, _ in samples]), torch.ones(3), "text", None], [1.5])


def ordered(samples):
    return collate_pairs(sorted(samples, key=lambda sample: sample[1]))


def noisy(samples):
    batch = collate_pairs(samples)
    return Batch(batch.inputs + torch.randn_like(batch.inputs), batch.targets)


PLAIN = [collate_pairs, concatenated, with_constants]
ODD = [ordered, noisy, time_first]


def assert_same(a, b):
    assert nest.structure(a) == nest.structure(b)
    for x, y in zip(nest.leaves(a), nest.leaves(b), strict=True):
        assert nest.same(x, y)


@pytest.mark.parametrize("collate", PLAIN + ODD)
@pytest.mark.parametrize(("num_looked_at", "n"), [(1, 1), (4, 3), (5, 23)])
def test_made_batch_is_what_collating_would_give(collate, num_looked_at, n):
    spec = BatchSpec(Images([(4, 3)] * 6), collate, num_looked_at, seed=1)
    samples = [spec.samples[i % len(spec.samples)] for i in range(n)]
    torch.manual_seed(0)
    expected = spec._collate(samples)
    if collate in PLAIN:
        spec.collate = lambda samples: pytest.fail(
            "a batch of a recognised collate function is filled"
        )
    torch.manual_seed(0)
    assert_same(spec.make(n, "cpu"), expected)
    assert len(spec.samples) == num_looked_at


def test_the_largest_shape_is_taken_and_its_samples_cycled():
    shapes = [(3, 8, 8), (3, 16, 8), (3, 4, 4), (3, 16, 8), (3, 8, 2)]
    spec = BatchSpec(Images(shapes), collate_pairs, num_samples=10, seed=0)
    batch = spec.make(5, "cpu")
    assert batch.inputs.shape == (5, 3, 16, 8)
    assert set(batch.targets.tolist()) == {1, 3}
    assert spec.tensor_bytes == [3 * 16 * 8 * 4, 8]


def test_reading_samples_leaves_the_global_generators_alone():
    def draw():
        return float(torch.rand(1)), random.random(), np.random.rand()

    seed_generators(3)
    expected = draw()
    seed_generators(3)
    BatchSpec(Images([(4, 3)] * 9), noisy, num_samples=4, seed=0).make(6, "cpu")
    assert draw() == expected


def test_channels_last_is_for_image_inputs_only():
    inputs = {"image": torch.rand(2, 3, 4, 4), "mask": torch.ones(2, 3, 4, 4, dtype=torch.int64)}
    precision = Precision(torch.device("cpu"), channels_last=True)
    placed, targets = precision.place(Batch(inputs, torch.rand(2, 3, 4, 4)))
    assert placed["image"].is_contiguous(memory_format=torch.channels_last)
    assert placed["mask"].is_contiguous()
    assert targets.is_contiguous()


def test_batch_size():
    assert batch_size(Batch(torch.zeros(7, 5, 3), torch.zeros(5))) == 5
    assert batch_size(Batch({"x": torch.zeros(4, 9)}, None)) == 4
    images = [torch.zeros(3, 8, 8), torch.zeros(3, 9, 9)]
    assert batch_size(Batch(images, [{"boxes": torch.zeros(1, 4)}] * 2)) == 2
    assert batch_size(Batch(torch.zeros(3, 8), images)) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_made_batch_takes_no_more_than_itself_on_the_device():
    spec = BatchSpec(Images([(3, 64, 64)] * 4), collate_pairs, 4, seed=0)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    batch = spec.make(1000, "cuda")
    assert torch.cuda.max_memory_allocated() - before <= 1.01 * batch.inputs.nbytes + 2**20
    assert torch.equal(spec.make(64, "cuda").inputs.cpu(), spec.make(64, "cpu").inputs)


def counted(number, seen, error=None):
    for position in range(number):
        seen.append(position)
        inputs = torch.full((1 << 20,), position, dtype=torch.uint8)
        yield Batch(inputs, torch.tensor([position]))
    if error is not None:
        raise error


def test_an_error_of_the_next_batch_waits_for_its_turn():
    batches = CopiedAhead(counted(2, [], DataError("damaged")), torch.device("cpu"))
    assert [int(next(batches).targets) for _ in range(2)] == [0, 1]
    with pytest.raises(DataError, match="damaged"):
        next(batches)
    assert len(list(CopiedAhead(counted(3, []), torch.device("cpu")))) == 3


class Copies(TorchDispatchMode):
    """The streams of the copies from the host."""

    def __init__(self):
        super().__init__()
        self.streams = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and not args[1].is_cuda:
            self.streams.append(torch.cuda.current_stream())
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_next_batch_is_copied_on_another_stream():
    seen = []
    found = []
    before = torch.cuda.memory_allocated()
    with Copies() as copies:
        batches = CopiedAhead(counted(4, seen), torch.device("cuda"))
        for position, batch in enumerate(batches):
            assert len(seen) == min(position + 2, 4)  # one ahead, no more
            assert torch.cuda.memory_allocated() - before < 2.5 * 2**20
            found.append(batch.inputs[-1:].clone())
            del batch
    assert [int(value) for value in found] == [*range(4)]
    assert len(copies.streams) == 8  # inputs and targets
    assert len({*copies.streams}) == 1
    assert torch.cuda.current_stream() not in copies.streams
