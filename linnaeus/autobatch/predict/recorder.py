"""Records what operations on `meta` would allocate and release on a CUDA device."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from linnaeus.autobatch.memory.storages import accumulates_in_place, references_of_a_gradient
from linnaeus.autobatch.predict.events import ConvFacts, Event
from linnaeus.autobatch.predict.kernels import BLAS_WORKSPACE_BYTES, KERNELS
from linnaeus.autobatch.predict.meta_state import UntraceableError
from linnaeus.autobatch.predict.reductions import Reduction

_BORROWS_WORKSPACE = "2.15"
"""From this torch on, the workspace of cuBLAS is borrowed for each product; older torch keeps it."""

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
        references_of_a_gradient()

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
        released = {event.storage for event in self.events if event.kind == "release"}
        self.events = [
            event for event in self.events if event.kind == "allocate" and event.storage not in released
        ]

    def track(self, tensor: Tensor, operation: str) -> None:
        """Record the storage of an output, unless it is known."""
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._follow(storage, self.allocate(storage.nbytes(), operation))

    def allocate(self, num_bytes: int, operation: str) -> int:
        """Record bytes that an operation allocates; returns the storage that `release` takes."""
        if not num_bytes:
            return 0
        self._num_allocated += 1
        self.events.append(Event("allocate", self._num_allocated, num_bytes, operation))
        return self._num_allocated

    def release(self, storage: int) -> None:
        """Record the release of what was allocated."""
        if storage:
            self.events.append(Event("release", storage))

    def borrow(self, num_bytes: int, operation: str) -> None:
        """Record bytes that an operation takes and returns at once, without another allocation in between."""
        if num_bytes:
            self.events.append(Event("workspace", 0, num_bytes, operation))

    def reduce(self, facts: Reduction) -> None:
        """Record the scratch memory of a reduction."""
        self.events.append(Event("workspace", 0, 0, "reduction", facts))

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

    def record_convolution(self, facts: ConvFacts) -> None:
        """Record the workspace of a convolution's kernel.

        With `torch.backends.cudnn.benchmark`, kernels are timed where a convolution runs for the first time;
        torch then gives the free segments back to the device (aten/src/ATen/native/cudnn/Conv_v8.cpp).
        """
        if torch.backends.cudnn.benchmark and facts.is_by_cudnn and facts not in self._timed:
            self._timed.add(facts)
            self.events.append(Event("flush", 0, 0, "convolution"))
        self.events.append(Event("workspace", 0, 0, "convolution", facts))

    def _forget(self, address: int) -> None:
        _, recorded = self._known.pop(address)
        self.release(recorded)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if accumulates_in_place(func, args, kwargs):
            return args[0]
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        self.last_operation = name
        inputs = [*_on_meta(args), *_on_meta(kwargs.values())]
        self._leave_out_unrecorded(inputs)
        is_meta = bool(inputs)
        if is_meta and name in _NEEDS_VALUES:
            raise UntraceableError(f"{name} ({_NEEDS_VALUES[name]}) needs the values of a tensor")
        if is_meta and name in _WITHOUT_OUTPUT:
            return args[0] if name == "_amp_update_scale_" else None
        handler = KERNELS.get(name)
        with torch._C.DisableTorchFunction():
            try:
                if handler is not None:
                    return handler(self, name, func, args, kwargs)
                outputs = func(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if (found := untraceable(error, name)) is None:
                    raise
                raise found from error
            self.track_all(outputs, name)
        return outputs

    def track_all(self, outputs: Any, name: str) -> None:
        """Record the storages of all outputs that are new."""
        if isinstance(outputs, Tensor):
            self.track(outputs, name)
        elif isinstance(outputs, list | tuple):
            for output in outputs:
                self.track_all(output, name)

    def _leave_out_unrecorded(self, inputs: Iterable[Tensor]) -> None:
        """What nobody has recorded was there before the step: it does not count."""
        for tensor in inputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._follow(storage, 0)

    def _follow(self, storage: UntypedStorage, recorded: int) -> None:
        address = storage._cdata
        self._known[address] = weakref.ref(storage, lambda _: self._forget(address)), recorded


def untraceable(error: Exception, operation: str) -> UntraceableError | None:
    """The error that names the operation; None where the error is not that `meta` has no data for it."""
    text = str(error)
    is_missing = isinstance(error, NotImplementedError) or _MISSING.search(text) is not None
    if isinstance(error, UntraceableError) or not is_missing:
        return None
    if "Tensor.__format__" in text:
        return UntraceableError('formatting a tensor, as in f"{loss:.3f}", needs its value')
    if _MIXED.search(text):
        return UntraceableError(
            f"{operation} got a tensor that is not in `state`: give every module, optimizer and tensor that "
            f"the step uses ({text.rstrip('.')})"
        )
    if operation in _MAY_NEED_VALUES:
        return UntraceableError(f"{operation} ({_MAY_NEED_VALUES[operation]}) needs the values of a tensor")
    return UntraceableError(f"{operation} has no implementation without a device: {text.rstrip('.')}")


_MISSING = re.compile(r"\bmeta\b|\bdata-dependent\b|Tensor\.__format__", re.IGNORECASE)
"""What torch says where an operation cannot run on `meta`; not metadata, nor a metaclass."""

_MIXED = re.compile(r"device cpu is not on the expected device meta|two devices|devices, (meta|cpu)")
"""What torch says of an operation on tensors of two devices."""

_MAY_NEED_VALUES = {"index": "boolean indexing", "_to_copy": "`.cpu()`, `.numpy()` or `.tolist()`"}
"""Operations that fail on `meta` only where they need values."""


def _on_meta(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors on `meta` among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta:
                yield value
        elif isinstance(value, list | tuple):
            yield from _on_meta(value)
