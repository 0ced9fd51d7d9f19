"""Shards: the sharded tensors of a checkpoint, in a folder of `torch.distributed.checkpoint`.

The checkpoint's file holds everything else. Its entry `shards` names the folder beside it, and in its `state`
a tensor on `meta` stands for each sharded one. In the folder, that tensor is named by its path in the state.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"

_CLASSES = {
    "Metadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
    "_get_layout",
    "PosixPath",
    "WindowsPath",
}
"""Classes that `.metadata` may hold beside plain values and dtypes; unpickling others could run code."""


def named(state: Any, name: str = "") -> dict[str, Any]:
    """Return the values of nested dicts, by dotted path.

    >>> named({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    if not isinstance(state, dict):
        return {name: state}
    parts = (named(value, f"{name}.{key}".lstrip(".")) for key, value in state.items())
    return {path: value for part in parts for path, value in part.items()}


def replaced(state: Any, values: Mapping[str, Any], name: str = "") -> Any:
    """Return a copy of nested dicts that has the `values` of some paths."""
    if not isinstance(state, dict):
        return values.get(name, state)
    result = copy(state)  # a module's state dict has versions in its `_metadata`
    result.update(
        {key: replaced(v, values, f"{name}.{key}".lstrip(".")) for key, v in state.items()}
    )
    return result


def is_placeholder(value: Any) -> bool:
    """Return whether it stands for a tensor in the shards."""
    return isinstance(value, Tensor) and value.is_meta


class ShardsReader(FileSystemReader):
    """Reads a folder of shards without running code from it.

    Args:
        file: the checkpoint.
        entry: its entry `shards`: the folder's name, and the checksum of `.metadata` in it.

    Raises:
        BadZipFile: the folder, or a file that its `.metadata` names, lies elsewhere.
    """

    def __init__(self, file: Path, entry: dict[str, Any]) -> None:
        self.folder = _member(file.resolve().parent, entry["folder"])
        self._checksum = entry["checksum"]
        super().__init__(self.folder)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the list of the tensors and of the places of their parts."""
        data = (self.folder / METADATA).read_bytes()
        if zlib.crc32(data) != self._checksum:
            raise zipfile.BadZipFile(f"the checksum of {self.folder.name}/{METADATA} is wrong")
        metadata: Metadata = _Unpickler(io.BytesIO(data)).load()
        for name in {place.relative_path for place in metadata.storage_data.values()}:
            _member(self.folder, name)
        return metadata

    def read_whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with whole tensors on the CPU in place of those on `meta`."""
        found = named(state).items()
        tensors = {
            name: torch.empty_like(v, device="cpu") for name, v in found if is_placeholder(v)
        }
        self.check(tensors)
        return replaced(state, tensors)  # type: ignore[no-any-return]

    def check(self, tensors: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Compare the checksums of all tensors, and fill those that are given, by name."""

        def read(index: Any, place: Any) -> None:
            with (self.folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data = io.BytesIO(file.read(place.length))
            if not zipfile.is_zipfile(data) or zipfile.ZipFile(data).testzip() is not None:
                raise zipfile.BadZipFile(
                    f"{index.fqn} in {self.folder.name}/{place.relative_path} is damaged"
                )
            if index.fqn in tensors:
                data.seek(0)
                part = torch.load(data, weights_only=True)
                spans = zip(index.offset, part.shape, strict=True)
                tensors[index.fqn][
                    tuple(slice(start, start + length) for start, length in spans)
                ] = part

        with ThreadPoolExecutor(8) as pool:  # checksums do not hold the GIL
            list(pool.map(read, *zip(*self.read_metadata().storage_data.items(), strict=True)))


class ShardsWriter(FileSystemWriter):
    """Writes a folder of shards."""

    def write_data(self, *arguments: Any) -> Any:
        """Write this rank's tensors; raises the disk's error, which torch hides in its own error."""
        try:
            return super().write_data(*arguments)
        except RuntimeError as error:
            raise error.__context__ or error from None


def _member(folder: Path, name: str) -> Path:
    """Return the path of a file or folder directly in a folder, given by name; links may not lead out."""
    path = folder / name
    if path.resolve().parent != folder.resolve():
        raise zipfile.BadZipFile(f"it names {name!r}, which is not in {folder}")
    return path


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_known = module.split(".")[0] in ("torch", "pathlib") and name in _CLASSES
        if is_known or (
            module == "torch" and (name == "Size" or isinstance(getattr(torch, name), torch.dtype))
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")
