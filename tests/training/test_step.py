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


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
    return layers.to(dtype)


def make_batch(size=12, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, NUM_FEATURES, generator=generator, dtype=dtype)
    return Batch(inputs, torch.randint(0, NUM_CLASSES, (size,), generator=generator))


def split(batch, num):
    return [
        Batch(*parts)
        for parts in zip(batch.inputs.chunk(num), batch.targets.chunk(num), strict=True)
    ]


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


def gradients_by_hand(model, batch):
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def norm(tensors):
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture
def process_group():
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield
    torch_dist.destroy_process_group()


class Spy(nn.Module):
    """Keeps what a layer sees and gives."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.inputs = []
        self.output_dtypes = []

    def forward(self, inputs):
        output = self.layer(inputs)
        self.inputs.append(inputs)
        self.output_dtypes.append(output.dtype)
        return output


# --- accumulation ---


@pytest.mark.parametrize("num_micro_batches", [1, 3, 12])
@pytest.mark.parametrize("clip_grad_norm", [None, 0.05])
def test_micro_batches_give_the_update_and_the_loss_of_one_big_batch(
    num_micro_batches, clip_grad_norm
):
    model, reference = make_model(), make_model()
    step = make_step(model, momentum=0.9, clip_grad_norm=clip_grad_norm)
    big_step = make_step(reference, momentum=0.9, clip_grad_norm=clip_grad_norm)
    for seed in range(3):
        batch = make_batch(seed=seed)
        expected = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        loss = step(split(batch, num_micro_batches), num_micro_batches)
        torch.testing.assert_close(loss, big_step([batch]))
        assert (loss.shape, loss.requires_grad) == ((), False)
        assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    assert not torch.equal(parameters(model)[0], parameters(make_model())[0])
    assert_close(parameters(model), parameters(reference))


@pytest.mark.parametrize("sizes", [(7, 5), (5, 5, 2)])
def test_micro_batches_of_different_sizes_count_by_their_samples(sizes):
    model, reference, unweighted = make_model(), make_model(), make_model()
    batch = make_batch(12)
    parts = [
        Batch(*pair)
        for pair in zip(batch.inputs.split(sizes), batch.targets.split(sizes), strict=True)
    ]
    loss = make_step(model)(parts, len(parts), 12)
    torch.testing.assert_close(loss, make_step(reference)([batch]))
    assert_close(parameters(model), parameters(reference))
    make_step(unweighted)(parts, len(parts))
    with pytest.raises(AssertionError):
        assert_close(parameters(unweighted), parameters(reference))


def test_at_most_one_micro_batch_is_alive():
    """Otherwise a step needs more memory than AutoBatch has measured."""
    references = []
    alive = []

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


# --- clipping ---


@pytest.mark.parametrize("part", [1 / 7, 2.0])
def test_clipping_scales_all_parameters_by_one_factor_of_at_most_one(part):
    model, batch = make_model(), make_batch()
    before, gradients = parameters(model), gradients_by_hand(model, batch)
    make_step(model, lr=1.0, clip_grad_norm=part * norm(gradients))([batch])
    expected = [p - g * min(part, 1.0) for p, g in zip(before, gradients, strict=True)]
    torch.testing.assert_close(parameters(model), expected, rtol=1e-5, atol=1e-7)


# --- precision ---


def test_clipping_under_a_scaler_sees_unscaled_gradients():
    """Scaled by 1024, every gradient would be above the limit and the step 1024 times too small."""
    model, batch = make_model(torch.float32), make_batch(dtype=torch.float32)
    before, gradients = parameters(model), gradients_by_hand(model, batch)
    step = make_step(
        model,
        lr=1.0,
        clip_grad_norm=2 * norm(gradients),
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
        precision=Precision(CPU, torch.float16),
    )
    step(split(batch, 2), 2)
    expected = [p - g for p, g in zip(before, gradients, strict=True)]
    torch.testing.assert_close(parameters(model), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("clip_grad_norm", [None, 1.0])
def test_a_step_whose_gradients_overflow_changes_nothing_but_the_scale(
    clip_grad_norm,
):
    model = make_model(torch.float32)
    before = parameters(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    step = make_step(
        model, clip_grad_norm=clip_grad_norm, scaler=scaler, precision=Precision(CPU, torch.float16)
    )
    step([make_batch(dtype=torch.float32)])
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))
    assert scaler.get_scale() == 2.0**39
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_autocast_lowers_the_layers_and_not_parameters_or_loss(dtype):
    model, batch = Spy(make_model(torch.float32)), make_batch(dtype=torch.float32)
    loss = make_step(model, precision=Precision(CPU, dtype))([batch])
    ValidationStep(model, nn.CrossEntropyLoss(), Precision(CPU, dtype), lambda *_: None)(batch)
    assert model.output_dtypes == [dtype or torch.float32] * 2
    assert loss.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# --- what a step leaves behind ---


def test_the_average_stays_where_the_scaler_skips_a_step():
    model, batch = make_model(torch.float32), make_batch(dtype=torch.float32)
    ema = Ema(model, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    step = make_step(
        model, scaler=scaler, precision=Precision(CPU, torch.float16), callbacks={"EMA": ema}
    )
    num_skipped, num_updates = 0, []
    for _ in range(25):
        before = parameters(model)
        step([batch])
        num_skipped += all(map(torch.equal, before, parameters(model)))
        num_updates.append(ema.num_updates)
    assert num_updates == [max(0, number - num_skipped) for number in range(1, 26)]
    assert 0 < num_skipped < 25


# --- several processes ---


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_gradients_are_exchanged_once_per_optimizer_step(process_group, num_micro_batches):
    model, reference = make_model(), make_model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    exchanged = []

    def hook(_, bucket):  # torch reads annotations and takes no strings
        exchanged.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, hook)
    step, plain = make_step(wrapped, momentum=0.9), make_step(reference, momentum=0.9)
    for seed in range(3):
        exchanged.clear()
        step(split(make_batch(seed=seed), num_micro_batches), num_micro_batches)
        plain([make_batch(seed=seed)])
        assert len(exchanged) == len(set(exchanged)) > 0
    assert_close(parameters(model), parameters(reference))


# --- validation ---
