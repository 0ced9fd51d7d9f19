"""What a trace on `meta` records of a step."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from linnaeus.autobatch.predict import trace
from linnaeus.autobatch.predict.recorder import CONV_WORKSPACE
from linnaeus.autobatch.predict.trace import Buckets, UntraceableError
from linnaeus.data.batch import Batch
from linnaeus.training.precision import Precision
from linnaeus.training.step import TrainStep
from tests.helpers.ledger import Ledger

META = torch.device("meta")


def of_one_step(found):
    """The events of the second step."""
    marks = [index for index, event in enumerate(found.events) if event.kind == "mark"]
    return list(found.events[marks[0] : marks[1]])


def allocated(found, operation=None):
    """Bytes of each allocation of the second step, of an operation or of all."""
    return [
        event.num_bytes
        for event in of_one_step(found)
        if event.kind == "allocate" and operation in (None, event.label)
    ]


def run(forward, *shapes):
    """The trace of a forward and a backward pass on leaves of these shapes; the first dimension is given."""

    def step(n):
        leaves = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
        forward(*leaves).sum().backward()

    return trace.trace(step, lambda n: n, 8)


def optimized(make, clip=False):
    """The trace of training a linear layer of 1,000 by 100, with 400,400 bytes of parameters."""
    model = nn.Linear(1000, 100)
    optimizer = make(model.parameters())

    def step(batch):
        model(batch).sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return trace.trace(step, lambda n: torch.empty(n, 1000), 8, state=(model, optimizer))


def attention(*shape, dtype=None):
    def forward(q, k, v):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return functional.scaled_dot_product_attention(q, k, v)

    return run(forward, *[shape] * 3)


def under_autocast(function):
    def forward(*leaves):
        with torch.autocast("meta", torch.bfloat16):
            return function(*leaves)

    return run(forward, (8, 100), (10, 100))


def peak(found):
    """The peak of live bytes, without what operations borrow and cuBLAS keeps."""
    sizes = {
        event.storage: event.num_bytes
        for event in found.events
        if event.kind == "allocate" and event.label != "cublas"
    }
    signs = {"allocate": 1, "release": -1}
    changes = (signs.get(event.kind, 0) * sizes.get(event.storage, 0) for event in found.events)
    return max(itertools.accumulate(changes))


def framework_step(model, optimizer, scaler, precision, clip_grad_norm):
    """The framework's own step, on micro-batches of images and labels."""
    step = TrainStep(
        model,
        functional.cross_entropy,
        optimizer,
        scaler,
        precision,
        clip_grad_norm=clip_grad_norm,
    )
    return lambda batches: step(iter(batches), len(batches))


def images(n, micro_batches=1):
    return [
        Batch(torch.empty(n, 3, 8, 8), torch.zeros(n, dtype=torch.long))
        for _ in range(micro_batches)
    ]


def network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
    )


PARTS = {
    # A product of the output and its gradient, which float32 computes before the kernel.
    "delta of attention": (lambda: attention(2, 4, 256, 8), "delta", [2 * 4 * 256 * 8 * 4]),
    # Output and mask, one byte each of the latter, then the gradient; the sum is what is left of 4 bytes.
    "dropout": (
        lambda: run(lambda x: functional.dropout(x, 0.5), (1024,)),
        "native_dropout",
        [1024, 4096],
    ),
    # The loss and its gradient; the reciprocal deviation; x, its norm, the copied gradient, x's gradient.
    "RMSNorm": (
        lambda: run(lambda x: functional.rms_norm(x, (64,)), (32, 64)),
        None,
        [4, 4, 32 * 4, *[32 * 64 * 4] * 4],
    ),
    # Forward copies the input; backward copies it again, and the expanded gradient of the sum.
    "LayerNorm of a strided input": (
        lambda: run(lambda x: functional.layer_norm(x.transpose(1, 2), (8,)), (2, 8, 16)),
        "copy",
        [1024] * 3,
    ),
    "convolution of a strided input": (
        lambda: run(lambda x, w: functional.conv2d(x[:, ::2], w), (2, 4, 8, 8), (3, 2, 1, 1)),
        "copy",
        [1024, 1024, 384 * 4],
    ),
    # For the gradient of the input, copies of input, output and weight.
    "workspaces of a convolution": (
        lambda: run(lambda x, w: functional.conv2d(x, w, stride=2), (2, 4, 9, 9), (3, 4, 3, 3)),
        CONV_WORKSPACE,
        [4 * (2 * 4 * 81 + 2 * 3 * 16 + 3 * 4 * 9)],
    ),
    # Products of matrices and depthwise convolutions borrow nothing.
    "a convolution of single pixels": (
        lambda: run(functional.conv2d, (2, 4, 9, 9), (3, 4, 1, 1)),
        CONV_WORKSPACE,
        [],
    ),
    "a depthwise convolution": (
        lambda: run(partial(functional.conv2d, groups=4), (2, 4, 9, 9), (4, 1, 3, 3)),
        CONV_WORKSPACE,
        [],
    ),
    # The weight is cast once for both, x twice; then the gradients are cast back: x twice, w once.
    "autocast keeps cast parameters": (
        lambda: under_autocast(
            lambda x, w: functional.linear(x * 1, w) + functional.linear(x * 1, w)
        ),
        "_to_copy",
        [1600, 1600, 2000, 3200, 3200, 4000],
    ),
    "autocast of softmax": (
        lambda: under_autocast(lambda x, w: functional.linear(x, w).softmax(-1)),
        "_softmax",
        [8 * 10 * 4],
    ),
    # The output, then the means and the reciprocal deviations.
    "autocast of LayerNorm": (
        lambda: under_autocast(lambda x, w: functional.layer_norm(functional.linear(x, w), (10,))),
        "native_layer_norm",
        [8 * 4, 8 * 4, 8 * 10 * 4],
    ),
    # Forward and again in backward the layer's input and weight; then their gradients.
    "autocast in a checkpoint": (
        lambda: under_autocast(partial(checkpoint, functional.linear, use_reentrant=False)),
        "_to_copy",
        [1600, 1600, 2000, 2000, 3200, 4000],
    ),
    # One root for each parameter, all at once.
    "multi-tensor AdamW": (lambda: optimized(torch.optim.AdamW), "_foreach_sqrt", [400, 400_000]),
    "clipping": (lambda: optimized(torch.optim.SGD, clip=True), "_foreach_norm", [4, 4]),
}
"""What allocates in a part of a step, and the bytes; without the part the trace says another thing."""


@pytest.mark.parametrize(("traced", "operation", "expected"), PARTS.values(), ids=PARTS)
def test_each_part_of_a_step_is_recorded(traced, operation, expected):
    assert sorted(allocated(traced(), operation)) == expected


@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.bfloat16, "flash_attention"), (None, "efficient_attention")]
)
def test_attention_runs_in_its_kernel(dtype, kernel):
    names = {event.label for event in of_one_step(attention(2, 4, 256, 8, dtype=dtype))}
    found = {name.removeprefix("_scaled_dot_product_") for name in names if "attention" in name}
    assert found == {kernel, f"{kernel}_backward"}


def test_attention_of_five_dimensions_keeps_its_scores():
    """Scores, softmax, its masked result; in backward the gradients of the last two."""
    assert allocated(attention(1, 2, 4, 256, 8)).count(2 * 4 * 256 * 256 * 4) == 5


def test_a_fused_optimizer_allocates_nothing():
    fused = optimized(partial(torch.optim.AdamW, fused=True))
    assert allocated(fused) == allocated(optimized(torch.optim.SGD))


@pytest.mark.parametrize(("as_view", "expected"), [(False, 12), (True, 9)])
def test_gradients_have_buckets(as_view, expected):
    """Four layers of 40,000 bytes: parameters, gradients and buckets, less biases and activations.

    As views, the gradients are in the buckets, but for the one that was computed last.
    """
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))

    def step(batch):
        model(batch).sum().backward()
        model.zero_grad()

    buckets = Buckets(as_view=as_view)
    found = trace.trace(step, lambda n: torch.empty(n, 100), 1, state=model, buckets=buckets)
    assert peak(found) // 40_000 == expected


def test_products_borrow_the_workspace_of_cublas():
    """For each product of two steps. Before torch 2.15, forward and backward keep one each."""
    events = optimized(torch.optim.SGD).events
    found = [event.num_bytes for event in events if event.label == "cublas"]
    assert found == ([1 << 20, 8_519_680] * 2 if torch.__version__ >= "2.15" else [8_519_680] * 2)


def test_autocast_is_on_for_the_device_of_a_tensor():
    """As the rotary embeddings of transformers 5.0 ask."""
    found = []

    def forward(x):
        device = x.device.type
        with torch.autocast("cuda", torch.bfloat16):
            found.append((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        return x

    run(forward, (8,))
    assert found[0] == (True, torch.bfloat16)


@pytest.mark.parametrize(("num_micro_batches", "clip_grad_norm"), [(1, None), (2, 1.0)])
def test_the_peak_is_that_of_a_real_step_with_equal_operators(num_micro_batches, clip_grad_norm):
    """The framework's step, traced on `meta` and run on the CPU; the optimizer's state is part of both."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step_on(device):
        precision = Precision(torch.device(device))
        return framework_step(model, optimizer, scaler, precision, clip_grad_norm)

    def make_batch(n):
        return images(n, num_micro_batches)

    found = trace.trace(step_on("meta"), make_batch, 8, state=(model, optimizer))
    state_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    step = step_on("cpu")
    with Ledger() as ledger:
        for _ in range(trace.NUM_STEPS):
            step(make_batch(8))
    assert peak(found) == pytest.approx(ledger.peak_bytes + state_bytes, rel=0.01)


def test_a_scaler_lets_the_optimizer_step_in_every_trace():
    """The scaler notes what a step has done with each optimizer."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("meta")
    step = framework_step(model, optimizer, scaler, Precision(META, torch.float16), 1.0)
    first, second = (
        trace.trace(step, images, 8, state=(model, optimizer, scaler)) for _ in range(2)
    )
    assert allocated(first, "_foreach_sqrt")
    assert not optimizer.state
    assert scaler._scale is None
    assert first == second


def test_before_the_steps_only_what_is_still_held_counts():
    model = nn.Linear(1000, 100)
    optimizer = torch.optim.AdamW(model.parameters())

    def rows(n):
        return torch.empty(n, 1000, device=META)

    def train():
        model(rows(500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    validate, state = torch.no_grad()(model), (model, optimizer)
    plain = trace.trace(validate, rows, 8, state=state)
    after = trace.trace(validate, rows, 8, state=state, before=train)
    moments_bytes = 2 * 4 * 100 * (1000 + 1)
    assert peak(after) - peak(plain) == moments_bytes
    assert not optimizer.state


def cut(x, labels):
    return x[: int(labels.max())] if (labels >= 0).all() else x


def changed(x, labels):
    labels[4:] = -1
    labels.clamp_(min=0)
    return x[: int(labels.sum())]


def masked_on_host(x, labels):
    return x[labels.cpu() > 1] if x.cpu()[torch.arange(8) > 4].shape[0] == 3 else x


def made_there(x, labels):
    mask = torch.arange(8, device="cuda") < 3
    return x[mask & mask.any()]


def logged(x, labels):
    loss = x.exp().mean()
    history = [loss.item(), *loss[None].tolist(), loss.detach().cpu()]
    print(
        f"{loss:.3f} {sum(history[:2]) / 2:.2f} {round(loss.item(), 2)} {100 * (x > 0).sum().item():.0f}"
    )
    return x[:5]


@pytest.mark.parametrize(
    ("look", "num_rows"),
    [(cut, 3), (changed, 6), (masked_on_host, 4), (made_there, 3), (logged, 5)],
)
def test_small_tensors_of_the_batch_are_followed(look, num_rows):
    """Labels are 0, 1, 2, 3, 0, 1, 2, 3: the rows taken are those that a device would take."""
    model = nn.Linear(100, 100)

    def step(batch):
        x, labels = batch
        look(model(x), labels).exp().sum().backward()

    found = trace.trace(step, lambda n: (torch.empty(n, 100), torch.arange(n) % 4), 8, state=model)
    assert 4 * 100 * num_rows in allocated(found, "exp")


def test_what_has_changed_beyond_its_values_is_unknown():
    def step(batch):
        x, labels = batch
        labels.add_(x.sum(1).long())
        x[labels > 0].sum()

    with pytest.raises(UntraceableError, match="nonzero"):
        trace.trace(step, lambda n: (torch.empty(n, 1 << 20), torch.arange(n)), 8)


def test_a_ddp_wrapper_is_traced_as_its_module_with_buckets():
    def traced(wraps, buckets):
        model = nn.Linear(100, 100)
        if wraps:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            assert Buckets.of([model]) == buckets

        def step(batch):
            model(batch).sum().backward()
            model.zero_grad()

        return trace.trace(step, lambda n: torch.empty(n, 100), 8, state=[model], buckets=buckets)

    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        buckets = Buckets(as_view=True)
        assert traced(True, buckets) == traced(False, buckets)
        assert traced(False, buckets) != traced(False, None)
    finally:
        torch_dist.destroy_process_group()


def test_a_step_may_name_a_cuda_device():
    model = nn.Linear(100, 10)

    def step(batch):
        x = batch.to("cuda", non_blocking=True).cuda() + torch.ones(100, device="cuda:0")
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            model(x).sum().backward()

    found = trace.trace(step, lambda n: torch.empty(n, 100).pin_memory(), 8, state=model)
    assert 8 * 10 * 2 in allocated(found, "addmm")


def test_tensors_in_attributes_and_lists_are_part_of_the_state():
    weights, parts = torch.ones(10), [nn.Linear(10, 10), {"offset": torch.zeros(10)}]
    loss = SimpleNamespace(weights=weights, parts=parts)

    def step(batch):
        layer, table = loss.parts
        layer(batch * loss.weights + table["offset"]).sum().backward()

    found = trace.trace(step, lambda n: torch.empty(n, 10), 8, state=[loss])
    state = [event.num_bytes for event in found.events if event.label == "state"]
    assert sum(state) == 40 + (400 + 40) + 40
    assert loss.weights is weights
    assert loss.parts is parts
    assert not any(tensor.is_meta for tensor in (weights, parts[0].weight, parts[1]["offset"]))
