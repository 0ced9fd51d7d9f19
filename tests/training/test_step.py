"""THE step: what it does to gradients and parameters, and what it leaves behind."""

import math
import weakref

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linnaeus.data.batch import Batch
from linnaeus.training.ema import Ema
from linnaeus.training.precision import Precision
from linnaeus.training.step import TrainStep, ValidationStep

CPU = torch.device("cpu")
NUM_FEATURES, NUM_CLASSES = 5, 3
HALF = {"precision": Precision(CPU, torch.float16)}


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
    return layers.to(dtype)


def make_batch(dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(12, NUM_FEATURES, generator=generator, dtype=dtype)
    return Batch(inputs, torch.randint(0, NUM_CLASSES, (12,), generator=generator))


def split(batch, sizes):
    parts = zip(batch.inputs.split(sizes), batch.targets.split(sizes), strict=True)
    return [Batch(*part) for part in parts]


def make_step(model, lr=0.1, momentum=0.0, **changes):
    arguments = {
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "precision": Precision(CPU),
    }
    return TrainStep(model, **arguments | changes)


def parameters(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# --- accumulation ---


@pytest.mark.parametrize("sizes", [(12,), (4, 4, 4), (1,) * 12, (7, 5), (5, 5, 2)])
@pytest.mark.parametrize("clip_grad_norm", [None, 0.05])
def test_micro_batches_give_the_update_and_loss_of_one_big_batch(sizes, clip_grad_norm):
    model, reference, unweighted = make_model(), make_model(), make_model()
    step, big_step, plain_step = (
        make_step(each, momentum=0.9, clip_grad_norm=clip_grad_norm)
        for each in (model, reference, unweighted)
    )
    for seed in range(3):
        batch = make_batch(seed=seed)
        loss = step(split(batch, sizes), len(sizes), 12)
        torch.testing.assert_close(loss, big_step([batch]))
        assert (loss.shape, loss.requires_grad) == ((), False)
        plain_step(split(batch, sizes), len(sizes))
    assert not torch.equal(parameters(model)[0], parameters(make_model())[0])
    assert_close(parameters(model), parameters(reference))
    if len({*sizes}) == 1:
        assert_close(parameters(unweighted), parameters(reference))
    else:
        with pytest.raises(AssertionError):
            assert_close(parameters(unweighted), parameters(reference))


def test_at_most_one_micro_batch_is_alive():
    """Otherwise a step needs more memory than AutoBatch has measured."""
    references, alive = [], []

    def micro_batches():
        for seed in range(4):
            alive.append(sum(reference() is not None for reference in references))
            yield remember(make_batch(seed=seed))

    def remember(batch):
        references.extend(weakref.ref(tensor) for tensor in batch[:2])
        return batch

    make_step(make_model())(micro_batches(), 4)
    assert alive == [0, 0, 0, 0]
    assert len(references) == 8


# --- clipping and precision ---


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("part", [1 / 7, 2.0])
def test_clipping_scales_unscaled_gradients_by_at_most_one(part, is_scaled):
    """Scaled by 1024, every gradient would be above the limit and the step 1024 times too small."""
    dtype = torch.float32 if is_scaled else torch.float64
    model, batch = make_model(dtype), make_batch(dtype)
    before = parameters(model)
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    scaled = HALF | {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}
    step = make_step(model, lr=1.0, clip_grad_norm=part * norm, **(scaled if is_scaled else {}))
    step(split(batch, 6), 2)
    expected = [p - g * min(part, 1.0) for p, g in zip(before, gradients, strict=True)]
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if is_scaled else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(parameters(model), expected, **tolerance)


@pytest.mark.parametrize("clip_grad_norm", [None, 1.0])
def test_a_step_that_overflows_changes_nothing_but_the_scale(clip_grad_norm):
    """And the average counts no update."""
    model, batch = make_model(torch.float32), make_batch(torch.float32)
    scaler, ema = torch.amp.GradScaler("cpu", init_scale=2.0**30), Ema(model, 0.5)
    options = {"scaler": scaler, "callbacks": {"EMA": ema}, "clip_grad_norm": clip_grad_norm}
    step, num_skipped = make_step(model, **HALF, **options), 0
    for number in range(1, 26):
        before = parameters(model)
        step([batch])
        num_skipped += all(map(torch.equal, before, parameters(model)))
        assert scaler.get_scale() == 2.0 ** (30 - num_skipped)
        assert ema.num_updates == number - num_skipped
        assert all(parameter.grad is None for parameter in model.parameters())
    assert 0 < num_skipped < 25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_autocast_lowers_the_layers_and_not_parameters_or_loss(dtype):
    model, batch, dtypes = make_model(torch.float32), make_batch(torch.float32), []
    model.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))
    loss = make_step(model, precision=Precision(CPU, dtype))([batch])
    ValidationStep(model, nn.CrossEntropyLoss(), Precision(CPU, dtype), lambda *_: None)(batch)
    assert dtypes == [dtype or torch.float32] * 2
    assert loss.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# --- several processes ---


@pytest.fixture
def process_group():
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield
    torch_dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_gradients_are_exchanged_once_per_optimizer_step(num_micro_batches):
    wrapped, exchanged = DistributedDataParallel(make_model()), []

    def hook(_, bucket):  # torch reads annotations and takes no strings
        exchanged.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    step = make_step(wrapped)
    for _ in range(3):
        exchanged.clear()
        step(split(make_batch(), 12 // num_micro_batches), num_micro_batches)
        assert len(exchanged) == len(set(exchanged)) > 0
