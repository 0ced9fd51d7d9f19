"""Bytes that the kernels of cuDNN borrow while a convolution runs.

cuDNN chooses its kernels by rules that are not public, and their workspaces with them. What is here is a
model with one factor for each kind of convolution. The factors are near 1, since most of its kernels read and
write copies of input, output and weight in another layout.

The constants, without units, come from coordinate descent on 77 models of the part `fit` of
benchmarks/data/memory_curves.csv (those whose name has an even SHA-256, every third of them), as `python
benchmarks/fit_workspaces.py` does it; that file says what is minimised and how spikes of cuDNN's are kept
out. By hand: the loss is flat in the factor of 3x3 between 1 and 1.5 (2.31 to 2.36 %), and 1.25 has the
lowest p90; 0.25 for 1x1 and 2 for 1x1 channels-last gained less than 0.1 % and were not taken.
"""

from __future__ import annotations

from math import prod

from linnaeus.memory.trace import ConvFacts

GRADIENT_FACTORS = {
    "3x3": 1.25,  # of stride 1, with an output as large as the input
    "other": 0.75,  # larger kernels, strides
    "1x1": 0.0,  # a product of matrices; these take part as they are
    "1x1 channels-last": 1.0,
    "grouped": 1.0,
}
"""Workspace of a gradient's kernel, as a multiple of the bytes of input and output together."""

WEIGHT_FACTOR = 1.0
"""The same as a multiple of the bytes of the weight, for kernels larger than 1x1."""


def workspace_bytes(facts: ConvFacts) -> int:
    """What the kernel of one convolution, or of one of its gradients, borrows.

    Nothing for a forward pass and for depthwise convolutions: no factor above 0 lowered the error.
    """
    if facts.kind == "forward" or facts.is_depthwise:
        return 0
    size = prod(facts.w[2:])
    elements = GRADIENT_FACTORS[_kind(facts, size)] * (prod(facts.x) + prod(facts.y))
    if size > 1:
        elements += WEIGHT_FACTOR * prod(facts.w)
    return int(facts.itemsize * elements)


def _kind(facts: ConvFacts, size: int) -> str:
    if facts.groups > 1:
        return "grouped"
    if size == 1:
        return "1x1 channels-last" if facts.channels_last else "1x1"
    return "3x3" if size == 9 and facts.x[-1] == facts.y[-1] else "other"
