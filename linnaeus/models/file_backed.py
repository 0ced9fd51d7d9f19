"""Builds a model whose large tensors lie in a temporary file instead of the process's memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # nothing public sees each operation
from torch.utils._pytree import tree_leaves, tree_map_only  # torch 2.11 has no public one


class FileBacked(TorchDispatchMode):
    """Context in which large tensors of the CPU are made in files without a name.

    They are ordinary tensors. Their pages leave the process's memory after each operation that uses them; the
    system keeps them in its cache as long as nobody needs the memory. A file lives as long as its tensors, in
    `TMPDIR` or `/var/tmp`, which is on a disk where `/tmp` may be in memory.

    Args:
        min_bytes: size from which a tensor is in a file.
    """

    def __init__(self, min_bytes: int = 2**20) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._min_bytes = min_bytes
        self._files: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by address

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in memory of its own."""
        value = tensor.detach().clone()
        self._release([tensor])
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        addresses = {tensor.untyped_storage()._cdata for tensor in given}

        def moved(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            is_new = storage._cdata not in addresses and storage.data_ptr() not in self._files
            is_large = tensor.device.type == "cpu" and storage.nbytes() >= self._min_bytes
            return self._moved(tensor) if is_new and is_large else tensor

        result = tree_map_only(Tensor, moved, result)
        self._release(given)
        return result

    def _moved(self, tensor: Tensor) -> Tensor:
        num_bytes = tensor.untyped_storage().nbytes()
        with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR", "/var/tmp")) as file:
            os.posix_fallocate(
                file.fileno(), 0, num_bytes
            )  # or a full disk would be a SIGBUS later
            pages = mmap.mmap(file.fileno(), num_bytes)
        storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        place = torch.empty(0, dtype=tensor.dtype)
        place.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        place.copy_(tensor)
        self._files[storage.data_ptr()] = pages
        self._release([place])
        return place

    def _release(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if (pages := self._files.get(tensor.untyped_storage().data_ptr())) is not None:
                pages.madvise(mmap.MADV_DONTNEED)
