"""Copies of states that are equal only where every bit is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


def bits(value: Any) -> Any:
    """A copy that compares equal only if every bit does."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense().contiguous()
        raw = dense.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), value.layout, raw)
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [bits(part) for part in value]
    return copy.deepcopy(value)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The parts of two outcomes that differ in a bit."""
    return [name for name in one if bits(one[name]) != bits(other[name])]
