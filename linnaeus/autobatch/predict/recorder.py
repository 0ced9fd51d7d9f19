"""Record the memory that operations on `meta` would allocate and release on a CUDA device.

Kernels of some operations hold memory beside their outputs, as they do in aten/src/ATen/native: copies of
arguments that they cannot read as they are, workspaces of convolutions, sums in float32.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from linnaeus.autobatch import nest
from linnaeus.autobatch.memory.storages import (
    WatchingMode,
    accumulates_in_place,
    references_of_a_gradient,
)
from linnaeus.autobatch.predict.swap import UntraceableError
from linnaeus.autobatch.predict.values import Values, written

BLAS_WORKSPACE_BYTES = 8_519_680
"""Workspace of cuBLAS: torch's default `:4096:2:16:8` up to compute capability 8.x."""
LT_WORKSPACE_BYTES = 1 << 20
"""Workspace of cuBLASLt, which adds the bias of a linear layer to the product."""

CONV_WORKSPACE = "workspace of a convolution"
"""Label of memory without which a convolution runs too."""

_BORROWS_WORKSPACE = "2.15"
"""First torch that borrows the workspace of cuBLAS for each product; older torch keeps it."""

_NEEDS_VALUES = {
    "_local_scalar_dense": "`float(tensor)` or `if tensor`",
    "bincount": "`bincount`",
    "nonzero": "boolean indexing or `nonzero`",
    "masked_select": "boolean indexing",
    "_unique2": "`unique`",
    "unique_dim": "`unique`",
    "unique_consecutive": "`unique`",
    "equal": "`torch.equal`",
}
"""Operations that a trace follows only where it knows the values, as users write them."""

aten = torch.ops.aten

_WITHOUT_OUTPUT = frozenset(
    {
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "_fused_adagrad_",
        "_amp_update_scale_",
        "_amp_foreach_non_finite_check_and_unscale_",
    }
)
"""In-place operations that allocate nothing, and that not every torch knows on `meta`."""


class Event(NamedTuple):
    """An event of the device's memory.

    Attributes:
        kind: `allocate`, `release` or `mark` (a step has ended).
        storage: names the storage, in the order of allocation; 0 for other events.
        num_bytes: of the storage.
        label: the operation that allocates, or `CONV_WORKSPACE`.
        stream: the stream whose blocks it takes: 0, or one of FSDP2's.
    """

    kind: str
    storage: int = 0
    num_bytes: int = 0
    label: str = ""
    stream: int = 0


class Call(NamedTuple):
    """An operation and its arguments."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder(WatchingMode):
    """Mode that records the events so far, and the name of the operation that ran last."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.last_operation = "the start"
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._num_allocated = 0
        self._has_blas = [False, False]
        self.values = Values()
        self._originals: set[int] = set()
        self._optimizes = False
        self._streams: list[Any] = [torch.cpu.current_stream()]
        references_of_a_gradient()

    def keep_state(self, held: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Record pairs of a tensor and its substitute on `meta`, in the order in which a device gets them.

        Masks, indices and counters keep their values, if they have any.
        """
        for tensor, substitute in held:
            self.track(substitute, "state")
            if not tensor.is_meta:
                self._originals.add(nest.local(tensor).untyped_storage()._cdata)
            if not tensor.is_floating_point() and not tensor.is_meta:
                self.values.know(substitute, tensor)

    def enter_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note that an optimizer steps: no memory depends on its scalars, learning rates and bounds."""
        self._optimizes = not isinstance(optimizer, torch.optim.LBFGS)

    def leave_optimizer(self, *_: Any) -> None:
        """Note that it has stepped."""
        self._optimizes = False

    def forget_what_was_released(self) -> None:
        """Drop all events but the allocations of memory that is still held."""
        released = {event.storage for event in self.events if event.kind == "release"}
        self.events = [
            event
            for event in self.events
            if event.kind == "allocate" and event.storage not in released
        ]

    def track(self, outputs: Any, operation: str) -> None:
        """Record the storages of outputs that are new."""
        if isinstance(outputs, list | tuple):
            for output in outputs:
                self.track(output, operation)
        elif isinstance(outputs, Tensor) and outputs.is_meta:
            storage = nest.local(outputs).untyped_storage()
            if storage._cdata not in self._known:
                self._follow(storage, self.allocate(storage.nbytes(), operation))

    def allocate(self, num_bytes: int, operation: str) -> int:
        """Record bytes that an operation allocates; return the storage for `release`."""
        if not num_bytes:
            return 0
        self._num_allocated += 1
        self.events.append(
            Event("allocate", self._num_allocated, num_bytes, operation, stream=self._stream())
        )
        return self._num_allocated

    def _stream(self) -> int:
        """Return the number of the current stream. FSDP2 sets `torch.cpu`'s stream while it communicates."""
        current = torch.cpu.current_stream()
        if current not in self._streams:
            self._streams.append(current)
        return self._streams.index(current)

    def resizer(self) -> Callable[[UntypedStorage, int], Any]:
        """Return a recording `UntypedStorage.resize_`: FSDP2 frees gathered parameters with it."""
        plain = UntypedStorage.resize_

        def resize(storage: UntypedStorage, num_bytes: int) -> Any:
            if (known := self._known.pop(storage._cdata, None)) is not None:
                self.release(known[1])
                self._follow(storage, self.allocate(num_bytes, "resize_"))
            return plain(storage, num_bytes)

        return resize

    def release(self, storage: int) -> None:
        """Record the release of a storage."""
        if storage:
            self.events.append(Event("release", storage))

    @contextlib.contextmanager
    def holding(self, operation: str, *sizes: int) -> Iterator[None]:
        """Allocate bytes that an operation holds until it ends."""
        storages = [self.allocate(num_bytes, operation) for num_bytes in sizes]
        yield
        for storage in storages:
            self.release(storage)

    def borrow(self, num_bytes: int, operation: str) -> None:
        """Record bytes that an operation takes and returns at once, without another allocation in between."""
        self.release(self.allocate(num_bytes, operation))

    def use_blas(self, num_bytes: int) -> None:
        """Record the workspace of cuBLAS.

        It is borrowed for each product. Older torch keeps one for each thread; backward has a thread of its
        own.
        """
        if torch.__version__ >= _BORROWS_WORKSPACE:
            self.borrow(num_bytes, "cublas")
            return
        in_backward = torch._C._current_graph_task_id() != -1
        if not self._has_blas[in_backward]:
            self._has_blas[in_backward] = True
            self.allocate(BLAS_WORKSPACE_BYTES, "cublas")

    def run(self, call: Call) -> Any:
        """Run an operation and record its outputs."""
        outputs = call.func(*call.args, **call.kwargs)
        self.track(outputs, call.name)
        return outputs

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # DTensor goes first, and then its local operations
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # DTensor infers a shape
        if accumulates_in_place(func, args, kwargs):
            return args[0]
        kwargs = kwargs or {}
        targets = list(written(func, args, kwargs))
        if any(
            tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._originals
            for tensor in targets
        ):  # the step holds a tensor of the state
            num_returned = len(func._schema.returns)
            return targets[0] if num_returned == 1 else tuple(targets) if num_returned else None
        name = func.__name__.partition(".")[0]
        self.last_operation = name
        inputs = [*_on_meta(args), *_on_meta(kwargs.values())]
        is_known = self.values.are_known(inputs)
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._follow(storage, 0)  # it was there before the step and does not count
        if inputs and name in _WITHOUT_OUTPUT:
            return args[0] if name == "_amp_update_scale_" else None
        call = Call(name, func, args, kwargs)
        with torch._C.DisableTorchFunction():
            if inputs and name in _NEEDS_VALUES:
                return self._on_values(call, is_known)
            if name == "_to_copy" and str(kwargs.get("device")) == "cpu":
                return self._on_host(call, is_known)
            try:
                outputs = KERNELS.get(name, Recorder.run)(self, call)
                self.values.follow(func, args, kwargs, inputs, outputs)
                return outputs
            except (NotImplementedError, RuntimeError) as error:
                if (found := untraceable(error, name)) is None:
                    raise
                raise found from error

    def _on_values(self, call: Call, is_known: bool) -> Any:
        """Run an operation whose result needs the values of its arguments."""
        if is_known:
            return self._to_meta(self.values.compute(*call[1:]), call.name)
        if call.name == "_local_scalar_dense" and self._optimizes and not torch.is_grad_enabled():
            return 1
        raise UntraceableError(
            f"{call.name} ({_NEEDS_VALUES[call.name]}) needs the values of a tensor"
        )

    def _to_meta(self, results: Any, operation: str) -> Any:
        """Put results that were computed from values on `meta`."""
        if isinstance(results, list | tuple):
            return type(results)(self._to_meta(each, operation) for each in results)
        if not isinstance(results, Tensor):
            return results
        tensor = torch.empty_like(results, device="meta")
        self.track(tensor, operation)
        self.values.know(tensor, results)
        return tensor

    def _on_host(self, call: Call, is_known: bool) -> Tensor:
        """Copy to the host: with values, or else on `meta` without memory of the device."""
        if is_known:
            value: Tensor = self.values.compute(*call[1:])
            return value.clone()
        copy: Tensor = call.func(*call.args, **{**call.kwargs, "device": "meta"})
        self._follow(copy.untyped_storage(), 0)
        return copy

    def _follow(self, storage: UntypedStorage, recorded: int) -> None:
        address = storage._cdata
        self._known[address] = weakref.ref(storage, lambda _: self._forget(address)), recorded

    def _forget(self, address: int) -> None:
        _, recorded = self._known.pop(address)
        self.values.forget(address)
        self.release(recorded)


def untraceable(error: Exception, operation: str) -> UntraceableError | None:
    """Return an error that names the operation; None where the cause is not that `meta` has no data."""
    text = str(error).partition(". ")[0]
    is_missing = isinstance(error, NotImplementedError) or _MISSING.search(text) is not None
    if isinstance(error, UntraceableError) or not is_missing:
        return None
    if _MIXED.search(text):
        return UntraceableError(
            f"{operation} got a tensor that is not in `state`, or that the step makes on the CPU: give every "
            f"module, optimizer and tensor that the step uses ({text.rstrip('.')})"
        )
    return UntraceableError(
        f"{operation} has no implementation without a device: {text.rstrip('.')}"
    )


_MISSING = re.compile(r"\bmeta\b|\bdata-dependent\b", re.IGNORECASE)
"""Found in torch's message where an operation cannot run on `meta`; not in metadata or metaclass."""

_MIXED = re.compile(r"is not on the expected device|two devices|devices, (meta|cpu)")
"""Found in torch's message about tensors on two devices."""


def _on_meta(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors on `meta` among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta:
                yield value
        elif isinstance(value, list | tuple):
            yield from _on_meta(value)


# --- kernels that hold memory beside their outputs ---

Kernel = Callable[[Recorder, Call], Any]


def _is_dense(tensor: Tensor) -> bool:
    """Return whether kernels read it without a copy: contiguous, or channels-last."""
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _is_matrix(tensor: Tensor) -> bool:
    """Return whether cuBLAS reads its last two dimensions without a copy: one of them is dense."""
    if tensor.dim() < 2:
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def _copying(*indices: int, unless: Callable[[Tensor], bool] = Tensor.is_contiguous) -> Kernel:
    """Make a kernel that copies arguments that it cannot read, and holds the copies until it ends."""

    def run(recorder: Recorder, call: Call) -> Any:
        tensors = (call.args[index] for index in indices if index < len(call.args))
        sizes = (each.nbytes for each in tensors if isinstance(each, Tensor) and not unless(each))
        with recorder.holding("copy", *sizes):
            outputs = recorder.run(call)
            if unless is _is_matrix:
                is_lt = (
                    call.name == "addmm"
                    and call.args[0].dim() == 1
                    and call.kwargs.get("beta", 1) == 1
                )
                recorder.use_blas(LT_WORKSPACE_BYTES if is_lt else BLAS_WORKSPACE_BYTES)
        return outputs

    return run


def _convolution(recorder: Recorder, call: Call) -> Tensor:
    x, w = call.args[:2]
    with _conv_copies(recorder, x, w):
        y: Tensor = _in_format(call.func(*call.args, **call.kwargs), _conv_format(x, w))
        recorder.track(y, call.name)
        workspace_bytes = conv_workspace_bytes("forward", x, w, y, call.args[8])
        recorder.borrow(workspace_bytes, CONV_WORKSPACE)
    return y


def _convolution_backward(recorder: Recorder, call: Call) -> Any:
    grad, x, w = call.args[:3]
    with _conv_copies(recorder, x, w, grad):
        layout = _conv_format(x, w)
        outputs = tuple(
            _in_format(output, layout) for output in call.func(*call.args, **call.kwargs)
        )
        for kind, output in zip(("input", "weight", "bias"), outputs, strict=True):
            if output is not None:
                recorder.track(output, call.name)
                if kind != "bias":
                    workspace_bytes = conv_workspace_bytes(kind, x, w, grad, call.args[9])
                    recorder.borrow(workspace_bytes, CONV_WORKSPACE)
    return outputs


def _in_format(output: Any, layout: torch.memory_format) -> Any:
    """Return the output of a convolution in the format of cuDNN, which `meta` forgets at times."""
    if output is None or output.dim() != 4 or output.is_contiguous(memory_format=layout):
        return output
    return torch.empty_like(output, memory_format=layout)


def _conv_format(x: Tensor, w: Tensor) -> torch.memory_format:
    def is_last(tensor: Tensor) -> bool:
        last = tensor.is_contiguous(memory_format=torch.channels_last)
        return last and not tensor.is_contiguous()

    if x.dim() == 4 and (is_last(x) or is_last(w)):
        return torch.channels_last
    return torch.contiguous_format


def _conv_copies(recorder: Recorder, *tensors: Tensor) -> contextlib.AbstractContextManager[None]:
    layout = _conv_format(*tensors[:2])
    strided = (tensor for tensor in tensors if not tensor.is_contiguous(memory_format=layout))
    return recorder.holding("copy", *(tensor.nbytes for tensor in strided))


def conv_workspace_bytes(kind: str, x: Tensor, w: Tensor, y: Tensor, groups: int) -> int:
    """Return the workspace of the kernel of a convolution or of one of its gradients.

    cuDNN chooses its kernels by rules that are not public. This is a model: the gradient of the input works
    on copies of input, output and weight in another layout. All else borrows nothing: forward passes,
    gradients of the weight, depthwise convolutions, products of matrices. Which of them borrow was fitted to
    the part `fit` of benchmarks/data/memory_curves.csv (names with an even SHA-256); factors of the sizes
    gained nothing. The kernels that cuDNN times and does not take are left out.

    Args:
        kind: `forward`, `input` (its gradient) or `weight` (its gradient).
        x, w, y: input (B, C, *size), weight and output.
        groups: number of groups.
    """
    is_product = prod(w.shape[2:]) == 1 and groups == 1
    is_depthwise = 1 < groups == x.shape[1]
    if kind != "input" or is_product or is_depthwise:
        return 0
    return x.element_size() * (x.numel() + y.numel() + w.numel())


def _indexed(recorder: Recorder, call: Call) -> Any:
    """Replace boolean masks by the places where they are true, which CUDA finds first."""
    tensor, indices, *rest = call.args
    places: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            nonzero = Call("nonzero", aten.nonzero.default, (index,), {})
            places += recorder._on_values(nonzero, recorder.values.are_known([index])).unbind(1)
        else:
            places.append(index)
    return recorder.run(call._replace(args=(tensor, places, *rest)))


def _safe_softmax(recorder: Recorder, call: Call) -> Any:
    """Run the softmax of unfused attention, which also holds an unmasked result and a mask."""
    output = call.func(*call.args, **call.kwargs)
    with recorder.holding("softmax", output.nbytes, output.numel()):
        recorder.track(output, call.name)
    return output


def _efficient_backward(recorder: Recorder, call: Call) -> Any:
    """Memory-efficient attention.

    In float32, the product of output and its gradient is computed before the kernel; in shorter formats, the
    kernel sums gradients in float32.
    """
    grad, query = call.args[:2]
    if query.dtype == torch.float32:
        recorder.borrow(grad.nbytes, "delta")
        return recorder.run(call)
    with recorder.holding("gradients in float32", 4 * query.numel()):
        return recorder.run(call)


def _flash_backward(recorder: Recorder, call: Call) -> Any:
    """Flash attention: the gradient of the query is summed in float32, its rows rounded up to 128."""
    batch, heads, rows, size = call.args[1].shape
    shape = batch, heads, -(-rows // 128) * 128, -(-size // 32) * 32
    outputs = recorder.run(call)
    recorder.borrow(4 * prod(shape), "gradient in float32")
    return outputs


def _all_reduce(recorder: Recorder, call: Call) -> Any:
    """Run a reduction over ranks with the values of this one."""
    output = torch.empty_like(call.args[0])
    recorder.track(output, call.name)
    if (value := recorder.values.of(call.args[0])) is not None:
        recorder.values.know(output, value)
    return output


KERNELS: dict[str, Kernel] = {
    "all_reduce": _all_reduce,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        ("native_layer_norm", "_fused_rms_norm", "_softmax", "_log_softmax"), _copying(0)
    ),
    **dict.fromkeys(
        (
            "native_layer_norm_backward",
            "_fused_rms_norm_backward",
            "_softmax_backward_data",
            "_log_softmax_backward_data",
        ),
        _copying(0, 1),
    ),
    **dict.fromkeys(
        ("native_group_norm", "max_pool2d_with_indices", "avg_pool2d"),
        _copying(0, unless=_is_dense),
    ),
    **dict.fromkeys(
        ("native_group_norm_backward", "avg_pool2d_backward"), _copying(0, 1, unless=_is_dense)
    ),
    **dict.fromkeys(("mm", "bmm"), _copying(0, 1, unless=_is_matrix)),
    **dict.fromkeys(("addmm", "baddbmm"), _copying(1, 2, unless=_is_matrix)),
    **dict.fromkeys(("mv", "addmv", "dot"), _copying(unless=_is_matrix)),
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_"), _indexed),
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
"""Operations whose kernels on CUDA hold memory beside their outputs."""
