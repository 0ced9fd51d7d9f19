"""Trace two steps on `meta`: what they allocate and release on a CUDA device, in order.

>>> model = torch.nn.Linear(1000, 100)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> def step(batch):
...     model(batch).sum().backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> found = trace(step, lambda n: torch.empty(n, 1000), 8, state=(model, optimizer))
>>> (found.live_peak_bytes() - 2 * BLAS_WORKSPACE_BYTES) // 1000  # weight, gradient and batch
835

No data is computed and the model is not touched, so a trace of a large model takes a second and no memory.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from linnaeus import nest
from linnaeus.memory.cuda_paths import cuda_paths
from linnaeus.memory.meta_state import UntraceableError, state_on_meta
from linnaeus.rng import preserved_generators

__all__ = ["Buckets", "ConvFacts", "Event", "Trace", "UntraceableError", "trace"]

aten = torch.ops.aten
MIB = 1 << 20
NUM_STEPS = 2
"""The first step allocates the optimizer's state, the second starts with it."""


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets of DistributedDataParallel.

    Attributes:
        cap_bytes: `bucket_cap_mb` in bytes.
        as_view: `gradient_as_bucket_view`; without it gradients and buckets are both held.
    """

    cap_bytes: int = 25 * MIB
    as_view: bool = False


class ConvFacts(NamedTuple):
    """A convolution, as far as the workspace of its kernel depends on it.

    Attributes:
        kind: `forward`, `input` (its gradient) or `weight` (its gradient).
        x: shape of the input, (B, C, *size).
        w: shape of the weight.
        y: shape of the output.
        groups: number of groups.
        strides: of each dimension.
        itemsize: bytes of an element.
        channels_last: whether the kernel reads and writes channels-last tensors.
    """

    kind: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    groups: int
    strides: tuple[int, ...]
    itemsize: int
    channels_last: bool

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has filters of its own."""
        return self.groups > 1 and self.groups == self.x[1]

    @property
    def is_by_cudnn(self) -> bool:
        """Whether cuDNN runs it; torch has kernels of its own for contiguous depthwise ones in float32."""
        return not self.is_depthwise or self.channels_last or self.itemsize < 4


class Event(NamedTuple):
    """One thing that happens to memory.

    Attributes:
        kind: `allocate`, `release`, `workspace` (held within one operation), `flush` (the allocator gives
            its free segments back) or `mark`.
        number: names the storage, in the order of allocation; 0 for other events.
        num_bytes: of the storage.
        label: of a mark; the operation that allocates.
        facts: of a workspace.
    """

    kind: str
    number: int
    num_bytes: int = 0
    label: str = ""
    facts: ConvFacts | None = None


@dataclass(frozen=True)
class Trace:
    """What two steps do to the memory of the device.

    Attributes:
        batch_size: of both steps.
        events: in order, from the first tensor of the state on.
    """

    batch_size: int
    events: tuple[Event, ...]

    def live_peak_bytes(self) -> int:
        """Most bytes of storages alive at once, without workspaces."""
        sizes: dict[int, int] = {}
        live = peak = 0
        for event in self.events:
            if event.kind == "allocate":
                sizes[event.number] = event.num_bytes
                live += event.num_bytes
                peak = max(peak, live)
            elif event.kind == "release":
                live -= sizes.pop(event.number)
        return peak


def trace(
    step: Callable[[Any], object],
    make_batch: Callable[[int], Any],
    n: int,
    *,
    state: Any = (),
    buckets: Buckets | None = None,
    before: Callable[[], object] | None = None,
) -> Trace:
    """Run a step twice on `meta`.

    Args:
        step: runs one step on a batch: training with the optimizer's update, or validation. It may move
            tensors to a CUDA device and use `torch.autocast` for it; they go to `meta`.
        make_batch: makes a batch of so many samples, on any device.
        n: the batch size.
        state: everything with tensors that the step uses: modules, optimizers, scalers, moving averages. It
            may be on any device, `meta` too. Afterwards it is as it was.
        buckets: of DistributedDataParallel, around the first module of the state; None without it.
        before: called once on `meta` before the steps, such as a training step before those of validation.
            Of what it does only the memory counts that is still held when it has returned.

    Raises:
        UntraceableError: an operation needs the values of a tensor (`.item()`, boolean indexing) or has no
            implementation on `meta`; the message names it.
    """
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_undisturbed())
        held = stack.enter_context(state_on_meta(state))
        recorder.hold(held)
        stack.enter_context(cuda_paths())
        stack.enter_context(recorder)
        if buckets is not None:
            _attach_buckets(_first_module(state), buckets)
        if before is not None:
            with _naming_operations(recorder):
                before()
            gc.collect(1)
            recorder.forget_what_was_released()
        for number in range(NUM_STEPS):
            recorder.mark(f"step {number}")
            with _naming_operations(recorder):
                step(_placed(make_batch(n)))
            gc.collect(1)  # whatever is held in circles is freed at the same place each time
        recorder.mark("end")
    return Trace(n, tuple(recorder.events))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside the context, only a call collects garbage, random states are kept and nothing is compiled."""
    was_enabled = gc.isenabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_generators())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


@contextlib.contextmanager
def _naming_operations(recorder: Recorder) -> Iterator[None]:
    """Report errors of operations that `meta` does not know by their names."""
    try:
        yield
    except UntraceableError:
        raise
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if not _is_missing(error):
            raise
        raise UntraceableError(f"after {recorder.last_operation}: {error}") from error


def _placed(batch: Any) -> Any:
    """The batch on `meta`."""
    return tree_map_only(Tensor, lambda t: t if t.is_meta else torch.empty_like(t, device="meta"), batch)


def _first_module(state: Any) -> nn.Module:
    for part in nest.leaves(state):
        if isinstance(part, nn.Module):
            return part
    raise ValueError("gradient buckets need a module in `state`")


def _attach_buckets(module: nn.Module, buckets: Buckets) -> None:
    """Copy gradients to flat buckets when they are ready, as DistributedDataParallel does."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[list[nn.Parameter]] = []
    filled_bytes = buckets.cap_bytes
    for parameter in reversed(parameters):  # gradients come in about this order
        num_bytes = parameter.numel() * parameter.element_size()
        if filled_bytes >= buckets.cap_bytes or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(parameter)
        filled_bytes += num_bytes
    for group in groups:
        num_elements = sum(parameter.numel() for parameter in group)
        flat = torch.empty(num_elements, dtype=group[0].dtype, device="meta")
        start = 0
        for parameter in group:
            view = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            parameter.register_post_accumulate_grad_hook(_copy_to(view, as_view=buckets.as_view))


def _copy_to(view: Tensor, *, as_view: bool) -> Callable[[Tensor], None]:
    def copy(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if as_view:
            parameter.grad = view
        # Without a view, the mean is copied back into the gradient: nothing is allocated.

    return copy


class Recorder(TorchDispatchMode):
    """Records what operations on `meta` would allocate and release on a CUDA device.

    Attributes:
        events: so far.
        last_operation: the name of the operation that ran last.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.last_operation = "the start"
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._num_allocated = 0
        self._has_blas = [False, False]
        self._timed: set[ConvFacts] = set()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: `torch.compile` ignores this mode."""
        return True

    def mark(self, label: str) -> None:
        """Record a place between two steps."""
        self.events.append(Event("mark", 0, 0, label))

    def hold(self, tensors: list[Tensor]) -> None:
        """Record the tensors of the state, in the order in which they are allocated."""
        for tensor in tensors:
            self.track(tensor, "state")

    def forget_what_was_released(self) -> None:
        """Keep of the events so far only the allocation of what is still held."""
        released = {event.number for event in self.events if event.kind == "release"}
        self.events = [
            event for event in self.events if event.kind == "allocate" and event.number not in released
        ]

    def track(self, tensor: Tensor, operation: str) -> None:
        """Record the storage of an output, unless it is known."""
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._follow(storage, self.borrow(storage.nbytes(), operation))

    def borrow(self, num_bytes: int, operation: str) -> int:
        """Record bytes that an operation allocates; `give_back` releases them. Returns their number."""
        if not num_bytes:
            return 0
        self._num_allocated += 1
        self.events.append(Event("allocate", self._num_allocated, num_bytes, operation))
        return self._num_allocated

    def give_back(self, number: int) -> None:
        """Record the release of what was borrowed."""
        if number:
            self.events.append(Event("release", number))

    def convolve(self, facts: ConvFacts) -> None:
        """Record the workspace of a convolution's kernel.

        With `torch.backends.cudnn.benchmark`, kernels are timed where a convolution runs for the first time;
        torch then gives the free segments back to the device (aten/src/ATen/native/cudnn/Conv_v8.cpp).
        """
        if torch.backends.cudnn.benchmark and facts.is_by_cudnn and facts not in self._timed:
            self._timed.add(facts)
            self.events.append(Event("flush", 0, 0, "convolution"))
        self.events.append(Event("workspace", 0, 0, "convolution", facts))

    def _forget(self, address: int) -> None:
        _, number = self._known.pop(address)
        self.give_back(number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        self.last_operation = name
        is_meta = self._leave_out_inputs(args) | self._leave_out_inputs(kwargs.values())
        if is_meta and name in _NEEDS_VALUES:
            raise UntraceableError(f"{name} ({_NEEDS_VALUES[name]}) needs the values of a tensor")
        if is_meta and name in _WITHOUT_OUTPUT:
            return args[0] if name == "_amp_update_scale_" else None
        if name in BLAS:
            self._start_blas()
        handler = HANDLERS.get(name)
        with torch._C.DisableTorchFunction():
            try:
                if handler is not None:
                    return handler(self, name, func, args, kwargs)
                outputs = func(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, UntraceableError) or not _is_missing(error):
                    raise
                raise UntraceableError(f"{name} has no implementation without a device: {error}") from error
            self.track_all(outputs, name)
        return outputs

    def track_all(self, outputs: Any, name: str) -> None:
        """Record the storages of all outputs that are new."""
        if isinstance(outputs, Tensor):
            self.track(outputs, name)
        elif isinstance(outputs, list | tuple):
            for output in outputs:
                self.track_all(output, name)

    def _leave_out_inputs(self, inputs: Iterable[Any]) -> bool:
        """Whether any is on `meta`. Those that nobody has recorded were there before: they do not count."""
        is_meta = False
        for value in inputs:
            if isinstance(value, Tensor):
                if value.is_meta:
                    is_meta = True
                    storage = value.untyped_storage()
                    if storage._cdata not in self._known:
                        self._follow(storage, 0)
            elif isinstance(value, list | tuple) and self._leave_out_inputs(value):
                is_meta = True
        return is_meta

    def _follow(self, storage: UntypedStorage, number: int) -> None:
        address = storage._cdata
        self._known[address] = weakref.ref(storage, lambda _: self._forget(address)), number

    def _start_blas(self) -> None:
        """Each thread's first use of cuBLAS allocates its workspace; backward has a thread of its own."""
        in_backward = torch._C._current_graph_task_id() != -1
        if not self._has_blas[in_backward]:
            self._has_blas[in_backward] = True
            self.borrow(BLAS_WORKSPACE_BYTES, "cublas")


BLAS_WORKSPACE_BYTES = 8_519_680
"""Bytes that cuBLAS keeps for each thread: torch's default `:4096:2:16:8` up to compute capability 8.x."""

BLAS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"})

_NEEDS_VALUES = {
    "_local_scalar_dense": "`.item()`, `float(tensor)` or `if tensor`",
    "nonzero": "boolean indexing or `nonzero`",
    "masked_select": "boolean indexing",
    "_unique2": "`unique`",
    "unique_dim": "`unique`",
    "unique_consecutive": "`unique`",
    "equal": "`torch.equal`",
}
"""Operations that no trace without data can follow."""

_WITHOUT_OUTPUT = frozenset({
    "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_",
    "_amp_update_scale_", "_amp_foreach_non_finite_check_and_unscale_",
})  # fmt: skip
"""Operations in place that allocate nothing, and that not every torch knows on `meta`."""


def _is_missing(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, NotImplementedError) or "meta" in text or "data-dependent" in text


def nbytes(tensor: Tensor) -> int:
    """Bytes that a dense copy of the tensor takes."""
    return tensor.numel() * tensor.element_size()


Handler = Callable[[Recorder, str, Any, tuple[Any, ...], dict[str, Any]], Any]


def _is_dense(tensor: Tensor) -> bool:
    """Whether kernels read it as it is: contiguous, or channels-last."""
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _copying_strided(*indices: int, layouts: Callable[[Tensor], bool] = _is_dense) -> Handler:
    """A kernel that copies those of its arguments that are not dense, and holds the copies until it ends."""

    def run(recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies = [
            recorder.borrow(nbytes(tensor), "copy")
            for tensor in (args[index] for index in indices if index < len(args))
            if isinstance(tensor, Tensor) and not layouts(tensor)
        ]
        outputs = func(*args, **kwargs)
        recorder.track_all(outputs, name)
        for number in copies:
            recorder.give_back(number)
        return outputs

    return run


def _is_contiguous(tensor: Tensor) -> bool:
    return tensor.is_contiguous()


def _is_matrix(tensor: Tensor) -> bool:
    """Whether cuBLAS takes its last two dimensions as they are: one of them is dense."""
    if tensor.dim() < 2:
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def _convolution(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, w = args[0], args[1]
    copies = _conv_copies(recorder, x, w)
    y: Tensor = func(*args, **kwargs)
    recorder.track(y, name)
    _conv_workspace(recorder, "forward", x, w, y, args[8], args[3])
    for number in copies:
        recorder.give_back(number)
    return y


def _convolution_backward(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    grad, x, w = args[:3]
    copies = _conv_copies(recorder, x, w, grad)
    outputs = func(*args, **kwargs)
    for kind, output in zip(("input", "weight", "bias"), outputs, strict=True):
        if output is not None:
            recorder.track(output, name)
            if kind != "bias":
                _conv_workspace(recorder, kind, x, w, grad, args[9], args[4])
    for number in copies:
        recorder.give_back(number)
    return outputs


def _conv_format(x: Tensor, w: Tensor) -> torch.memory_format:
    def is_last(tensor: Tensor) -> bool:
        last = tensor.is_contiguous(memory_format=torch.channels_last)
        return last and not tensor.is_contiguous()

    if x.dim() == 4 and (is_last(x) or is_last(w)):
        return torch.channels_last
    return torch.contiguous_format


def _conv_copies(recorder: Recorder, x: Tensor, w: Tensor, *others: Tensor) -> list[int]:
    layout = _conv_format(x, w)
    return [
        recorder.borrow(nbytes(tensor), "copy")
        for tensor in (x, w, *others)
        if not tensor.is_contiguous(memory_format=layout)
    ]


def _conv_workspace(
    recorder: Recorder, kind: str, x: Tensor, w: Tensor, y: Tensor, groups: int, strides: Any
) -> None:
    facts = ConvFacts(
        kind, tuple(x.shape), tuple(w.shape), tuple(y.shape), groups, tuple(strides), x.element_size(),
        _conv_format(x, w) is torch.channels_last,
    )  # fmt: skip
    recorder.convolve(facts)


def _safe_softmax(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The softmax of attention without a fused kernel: with a mask of rows, and a second result."""
    output = func(*args, **kwargs)
    first = recorder.borrow(nbytes(output), "softmax")
    mask = recorder.borrow(output.numel(), "isneginf")
    recorder.track(output, name)
    for number in (mask, first):
        recorder.give_back(number)
    return output


def _efficient_backward(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Memory-efficient attention: in float32, the product of output and its gradient is computed apart."""
    grad, query = args[0], args[1]
    number = recorder.borrow(nbytes(grad), "delta") if query.dtype == torch.float32 else 0
    recorder.give_back(number)
    accumulated = 0
    if query.dtype != torch.float32:
        accumulated = recorder.borrow(4 * query.numel(), "gradients in float32")
    outputs = func(*args, **kwargs)
    recorder.track_all(outputs, name)
    recorder.give_back(accumulated)
    return outputs


def _flash_backward(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Flash attention: the gradient of the query is summed in float32, its rows rounded up to 128."""
    query = args[1]
    batch, heads, rows, size = query.shape
    shape = batch, heads, -(-rows // 128) * 128, -(-size // 32) * 32
    outputs = func(*args, **kwargs)
    recorder.track_all(outputs, name)
    recorder.give_back(recorder.borrow(4 * prod(shape), "gradient in float32"))
    return outputs


HANDLERS: dict[str, Handler] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_layer_norm": _copying_strided(0, layouts=_is_contiguous),
    "native_layer_norm_backward": _copying_strided(0, 1, layouts=_is_contiguous),
    "_fused_rms_norm": _copying_strided(0, layouts=_is_contiguous),
    "_fused_rms_norm_backward": _copying_strided(0, 1, layouts=_is_contiguous),
    "native_group_norm": _copying_strided(0),
    "native_group_norm_backward": _copying_strided(0, 1),
    "_softmax": _copying_strided(0, layouts=_is_contiguous),
    "_softmax_backward_data": _copying_strided(0, 1, layouts=_is_contiguous),
    "_log_softmax": _copying_strided(0, layouts=_is_contiguous),
    "_log_softmax_backward_data": _copying_strided(0, 1, layouts=_is_contiguous),
    "max_pool2d_with_indices": _copying_strided(0),
    "avg_pool2d": _copying_strided(0),
    "avg_pool2d_backward": _copying_strided(0, 1),
    "mm": _copying_strided(0, 1, layouts=_is_matrix),
    "bmm": _copying_strided(0, 1, layouts=_is_matrix),
    "addmm": _copying_strided(1, 2, layouts=_is_matrix),
    "baddbmm": _copying_strided(1, 2, layouts=_is_matrix),
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
"""Operations whose kernels on CUDA hold memory beside their outputs."""
