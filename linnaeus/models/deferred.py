"""Builds a model without memory for its weights, and computes each weight on its own, bit for bit.

Inside of `Deferred`, large tensors are made on `meta`, and the operations on them are recorded. A weight is
computed by repeating the operations that it depends on, with the random numbers that they would have had.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from linnaeus.errors import LinnaeusError

_CPU, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_OVERWRITING = (_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_)
_UNKNOWN = "on meta that was not made inside of Deferred, so that it has no values"
_TRIM_BYTES = 32 * 1024**2
_Storages = dict[int, torch.UntypedStorage]


class DeferredError(LinnaeusError):
    """A tensor that cannot be computed from what was recorded, or an operation that cannot be recorded."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """A recorded call.

    Attributes:
        function, args, kwargs: the call; its tensors on `meta` stand for parts of deferred storages.
        outputs: the tensors on `meta` that it returned.
        reads: the deferred storages whose values it needs.
        overwrites: whether nothing is left of what its target held before.
        random: the generator of its random numbers with its state before; None where it draws none.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: list[Tensor]
    reads: set[int]
    overwrites: bool
    random: tuple[torch.Generator, Tensor] | None


class Deferred(TorchDispatchMode):
    """Context in which large floating-point tensors of the CPU take no memory.

    They are on `meta`, but inside of the context they say that they are on the CPU: initialisers skip
    tensors on `meta`. Small tensors, and integers, are real. Where code needs values, such as those of
    `item`, they are computed and forgotten. Random number generators advance as without the context. It
    may be entered again, for example to copy the model: a copy made outside of it is not recorded.

    Real tensors that deferred ones are computed from, such as loaded weights, are kept and not copied. They
    must not change between the end of the context and the last `materialize`.

    Args:
        min_elements: size from which a tensor is deferred.
    """

    def __init__(self, min_elements: int = 4096) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._min_elements = min_elements
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}  # of each deferred storage, the first one makes it
        self._captured: dict[int, list[Tensor]] = defaultdict(list)  # real tensors in operations, by storage
        self._disguise = _Disguise(self)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        self._untrimmed_bytes = 0

    def __enter__(self) -> Deferred:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._disguise.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._disguise.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def materialize(self, tensor: Tensor) -> Tensor:
        """Compute the values of a tensor, in memory of its own; a real tensor is returned as it is.

        Raises:
            DeferredError: it is on `meta`, but was not made inside of the context.
        """
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
            if not tensor.is_meta:
                return tensor
            value = _part(tensor, self._compute([tensor]))
            return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors, written = _tensors((args, kwargs)), _written(func, args, kwargs)
        deferred = [tensor for tensor in tensors if _key(tensor) in self._writers]
        makes = any(argument.name == "device" for argument in func._schema.arguments)
        if makes and kwargs.get("device") not in (None, _CPU, _META):
            return self._run(func, args, kwargs, deferred)
        if makes:
            kwargs["device"] = _CPU
        kinds = {_key(tensor) in self._writers for tensor in written}
        if len(kinds) > 1:
            raise DeferredError(f"{func} writes to tensors with and without memory; write to them one by one")
        if False in kinds:
            return self._run(func, args, kwargs, deferred, written)
        stand_ins: dict[int, Tensor] = {}
        on_meta = {**kwargs, "device": _META} if makes else kwargs
        try:
            result = func(*_mapped(_stand_in(stand_ins), args), **_mapped(_stand_in(stand_ins), on_meta))
        except Exception as error:  # it needs values, or is wrong: the real call tells
            if written:
                raise DeferredError(f"{func} on a tensor that has no memory: {error}") from error
            return self._run(func, args, kwargs, deferred)
        outputs = _tensors(result)
        real = {_key(stand_in) for stand_in in stand_ins.values()}
        new = [out for out in outputs if _key(out) not in self._writers]
        is_view_of_real = any(_key(out) in real for out in outputs)
        if is_view_of_real and written:
            raise DeferredError(f"{func} puts memory into a tensor that has none; use copy_")
        if is_view_of_real or not (deferred or self._are_large(new)):
            return self._run(func, args, kwargs, deferred)
        is_view = not new and (not written or torch.Tag.inplace_view in func.tags)
        if not is_view:
            if makes and outputs and any(argument.name == "dtype" for argument in func._schema.arguments):
                kwargs["dtype"] = outputs[0].dtype  # the default may change
            self._record(func, args, kwargs, outputs, new, written)
        return result

    def _are_large(self, tensors: list[Tensor]) -> bool:
        return any(
            tensor.numel() >= self._min_elements and (tensor.is_floating_point() or tensor.is_complex())
            for tensor in tensors
        )

    def _run(self, func: Any, args: Any, kwargs: Any, deferred: list[Tensor], written: Any = ()) -> Any:
        """Call the function for real, with the values of deferred arguments."""
        for key in map(_key, written):
            for tensor in self._captured.pop(key, ()):  # an operation needs the values of before
                tensor.data = tensor.clone()
        return _repeat(func, args, kwargs, self._compute(deferred))

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        outputs: list[Tensor],
        new: list[Tensor],
        written: list[Tensor],
    ) -> None:
        args, kwargs = _mapped(Tensor.detach, args), _mapped(Tensor.detach, kwargs)
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            if not tensor.is_meta:
                self._captured[_key(tensor)].append(tensor)
            elif _key(tensor) not in self._writers:
                raise DeferredError(f"{func} on a tensor {_UNKNOWN}")
        reads = [_key(tensor) for tensor in inputs if _key(tensor) in self._writers]
        targets = {_key(tensor) for tensor in written}
        overwrites = (
            func.overloadpacket in _OVERWRITING
            and all(reads.count(key) == 1 for key in targets)
            and all(_fills(tensor) for tensor in written)
        )
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generators = (leaf for leaf in tree_leaves(kwargs) if isinstance(leaf, torch.Generator))
            generator = next(generators, torch.default_generator)
            random = generator, generator.get_state()
            storages = self._compute([tensor for tensor in inputs if _key(tensor) in {*reads} - targets])
            for tensor in written:  # what they hold decides nothing
                storages[_key(tensor)] = torch.UntypedStorage(tensor.untyped_storage().nbytes())
            _repeat(func, args, kwargs, storages)
            self._forget(storages)
        left = set(reads) - targets if overwrites else set(reads)
        kept = [output.detach() for output in outputs]
        operation = _Operation(func, args, kwargs, kept, left, overwrites, random)
        for key in targets | {_key(output) for output in new}:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)

    def _compute(self, tensors: Iterable[Tensor]) -> _Storages:
        """The storages of tensors on `meta`, with those that they depend on."""
        storages: _Storages = {}
        for index in sorted(self._needed({_key(tensor) for tensor in tensors})):
            operation = self._operations[index]
            with _random_state(operation.random):
                result = _repeat(operation.function, operation.args, operation.kwargs, storages)
            for output, value in zip(operation.outputs, _tensors(result), strict=True):
                if _key(output) in storages:
                    continue
                if (value.stride(), value.storage_offset()) != (output.stride(), output.storage_offset()):
                    value = _like(output).copy_(value)
                storages[_key(output)] = value.untyped_storage()
        self._forget(storages)
        return storages

    def _forget(self, storages: _Storages) -> None:
        """Return the pages of earlier temporaries to the system: glibc keeps those below any small object."""
        self._untrimmed_bytes += sum(storage.nbytes() for storage in storages.values())
        if self._trim is not None and self._untrimmed_bytes > _TRIM_BYTES:
            self._untrimmed_bytes = 0
            self._trim(0)

    def _needed(self, keys: set[int]) -> set[int]:
        """The operations that the last values of storages depend on."""
        chosen: set[int] = set()
        todo = [(key, len(self._operations)) for key in keys]
        while todo:
            key, end = todo.pop()
            if key not in self._writers:
                raise DeferredError(f"a tensor {_UNKNOWN}")
            writers = [index for index in self._writers[key] if index < end]
            whole = [number for number, index in enumerate(writers) if self._operations[index].overwrites]
            for index in {writers[0], *writers[whole[-1] if whole else 0 :]} - chosen:
                chosen.add(index)
                todo += [(read, index) for read in self._operations[index].reads]
        return chosen


class _Disguise(TorchFunctionMode):
    """Lets tensors on `meta` say that they are on the CPU, and gives their values to Python."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            args = (self._deferred.materialize(args[0].detach()), *args[1:])
        result = func(*args, **(kwargs or {}))
        return _CPU if isinstance(result, torch.device) and result == _META else result


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return tree_map_only(Tensor, function, tree)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    writes = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return _tensors([given.get(name) for name in writes])


def _stand_in(made: dict[int, Tensor]) -> Callable[[Tensor], Tensor]:
    """Maps real tensors to ones on `meta`, and notes those by the identity of the real ones."""

    def on_meta(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else made.setdefault(id(tensor), _like(tensor, _META))

    return on_meta


def _like(tensor: Tensor, device: torch.device = _CPU) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _fills(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and 0 not in tensor.stride()


def _part(tensor: Tensor, storages: _Storages) -> Tensor:
    """The real tensor that one on `meta` stands for."""
    whole = torch.empty(0, dtype=tensor.dtype, device=_CPU)
    return whole.set_(storages[_key(tensor)], tensor.storage_offset(), tensor.size(), tensor.stride())


def _repeat(func: Any, args: Any, kwargs: Any, storages: _Storages) -> Any:
    """Call a function with real tensors in place of those on `meta`."""

    def part(tensor: Tensor) -> Tensor:
        return _part(tensor, storages) if _key(tensor) in storages else tensor

    return func(*_mapped(part, args), **_mapped(part, kwargs))


@contextmanager
def _random_state(random: tuple[torch.Generator, Tensor] | None) -> Iterator[None]:
    """Inside the context a generator has the given state; afterwards the one of before."""
    if random is None:
        yield
        return
    generator, state = random
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)
