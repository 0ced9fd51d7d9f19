"""Rank 0's tensors on every rank, bit for bit, for state that only rank 0 has read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from linnaeus.autobatch import nest
from linnaeus.dist import World

CHUNK_BYTES = 32 * 1024**2
"""Bytes of the buffer that each broadcast sends."""


@dataclass(frozen=True)
class _Description:
    """How to make an empty tensor like another one.

    Attributes:
        shape: with the dimensions in the order of memory, the slowest first.
        order: the dimensions of the tensor, by their place in `shape`.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype


def broadcast_state(state: Any, world: World) -> Any:
    """Rank 0's nest on every rank. Every rank must call this.

    The tensors go in chunks through one small buffer on the ranks' devices, and arrive on the host.

    Args:
        state: nest of dense tensors on the host and of values that can be pickled; used on rank 0 alone.
        world: the processes.

    Returns:
        The nest: on rank 0 `state` itself, on the other ranks a copy of it.
    """
    if not world.is_distributed:
        return state
    described = world.broadcast(nest.map_leaves(_describe, state) if world.is_main else None)
    if world.is_main:
        contents = [_in_memory_order(tensor) for tensor in nest.tensors(state)]
    else:
        contents = [
            torch.empty(leaf.shape, dtype=leaf.dtype)
            for leaf in nest.leaves(described)
            if isinstance(leaf, _Description)
        ]
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=world.device)
    for chunk in _chunks(contents, CHUNK_BYTES):
        _broadcast(chunk, buffer, sends=world.is_main)
    if world.is_main:
        return state
    received = iter(contents)

    def fill(leaf: Any) -> Any:
        return next(received).permute(leaf.order) if isinstance(leaf, _Description) else leaf

    return nest.map_leaves(fill, described)


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    order = _memory_order(leaf)
    return _Description(
        tuple(leaf.shape[dim] for dim in order),
        tuple(order.index(dim) for dim in range(leaf.dim())),
        leaf.dtype,
    )


def _memory_order(tensor: Tensor) -> list[int]:
    """The dimensions, the slowest first: channels last stays channels last."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions in the order of memory, contiguous."""
    return tensor.detach().permute(_memory_order(tensor)).contiguous()


def _chunks(tensors: Iterable[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    """The bytes of contiguous tensors, in lists of views of `num_bytes` together, the last list of fewer."""
    chunk: list[Tensor] = []
    room = num_bytes
    for tensor in tensors:
        content = tensor.reshape(-1).view(torch.uint8)
        while len(content):
            part, content = content[:room], content[room:]
            chunk.append(part)
            room -= len(part)
            if room == 0:
                yield chunk
                chunk, room = [], num_bytes
    if chunk:
        yield chunk


def _broadcast(chunk: list[Tensor], buffer: Tensor, *, sends: bool) -> None:
    """Send a list of byte views from rank 0, or fill it on another rank."""
    sizes = [len(part) for part in chunk]
    used = buffer[: sum(sizes)]
    if sends:
        used.copy_(torch.cat(chunk))
    torch_dist.broadcast(used, src=0)
    if not sends:
        for part, received in zip(chunk, used.cpu().split(sizes), strict=True):
            part.copy_(received)
