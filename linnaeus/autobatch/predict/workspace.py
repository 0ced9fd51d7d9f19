"""Bytes that the kernels of cuDNN borrow while a convolution runs.

cuDNN chooses its kernels by rules that are not public, and their workspaces with them. What is here is a
model with one factor for each kind of convolution. The factors are 1 where kernels read and write copies of
input, output and weight in another layout, and 0 where a convolution is a product of matrices.

The constants, without units, come from models of the part `fit` of benchmarks/data/memory_curves.csv (those
whose name has an even SHA-256). `python benchmarks/fit_workspaces.py` minimises the error of all runs, on
every third of these models. By hand, on every second: it would rather have 1.25 for 3x3 and 0.75 for larger
kernels and strides; 1 for both raises the mean error of the runs from 2.1 to 2.2 %, but lowers the median
error at the size that fills 32,000 MiB, where a search starts, from 2.0 to 1.7 %. Tried without a gain:
factors of their own for forward passes and for convolutions of few channels. The workspaces of kernels that
cuDNN times and does not take are left out: at 4 times input and output they decide 2 of 178 models.
"""

from __future__ import annotations

from math import prod

from linnaeus.autobatch.predict.events import ConvFacts

GRADIENT_FACTORS = {
    "larger": 1.0,  # than 1x1
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
    return "larger"
