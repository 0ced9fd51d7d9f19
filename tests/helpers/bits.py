"""Copies of states that are equal only where every bit is."""

import copy

import torch
from torch import Tensor


def bits(value):
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


def differences(one, other):
    """The parts of two outcomes that differ in a bit."""
    return [name for name in one if bits(one[name]) != bits(other[name])]
