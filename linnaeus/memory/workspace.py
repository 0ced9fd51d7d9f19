"""Bytes that the kernels of cuDNN borrow while a convolution runs.

cuDNN chooses its kernels by rules that are not public, and their workspaces with them. What is here is a model
with one factor for each kind of convolution.
"""

from __future__ import annotations

from math import prod

from linnaeus.memory.trace import ConvFacts

GRADIENT_FACTORS = {"3x3": 1.5, "other": 0.5, "1x1": 0.0, "grouped": 1.0}
"""Workspace of a gradient's kernel, as a multiple of the bytes of input and output together."""

WEIGHT_FACTOR = 1.0
"""The same as a multiple of the bytes of the weight, for kernels larger than 1x1."""


def workspace_bytes(facts: ConvFacts) -> int:
    """What the kernel of one convolution, or of one of its gradients, borrows."""
    if facts.kind == "forward" or facts.is_depthwise:
        return 0
    size = prod(facts.w[2:])
    if facts.groups > 1:
        kind = "grouped"
    elif size == 1:
        kind = "1x1"
    else:
        kind = "3x3" if size == 9 and facts.x[-1] == facts.y[-1] else "other"
    elements = GRADIENT_FACTORS[kind] * (prod(facts.x) + prod(facts.y))
    if size > 1:
        elements += WEIGHT_FACTOR * prod(facts.w)
    return int(facts.itemsize * elements)
