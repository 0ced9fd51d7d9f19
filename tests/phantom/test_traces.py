"""Predicted against reserved bytes of a phantom GPU; `compare.py` shows them for any model."""

from __future__ import annotations

import re

import pytest
import torch

from linnaeus.autobatch.predict.reductions import Reduction
from tests.phantom.build import on_phantoms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

CASES = {
    "residual connections": ("resnet18 24 97", 0.0),
    "cross-entropy under autocast": ("gpt 16 --amp bf16", 0.001),
    "channels-last convolutions": ("resnet50 97 --amp fp16 --channels-last", 0.001),
    "bias gradients of wide layers": ("vit_small_patch16_224 24", 0.005),
    "gathered parameters and their streams": ("vit_small_patch16_224 24 --shards 4", 0.001),
    "autocast over gathered parameters": ("vit_small_patch16_224 16 --amp fp16 --shards 4", 0.001),
    "gathered parameters in bf16": ("gpt 16 --amp bf16 --shards 64", 0.001),
}
"""What the trace once missed: model and size, and the largest error."""


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_what_torch_reserves(case: str) -> None:
    arguments, most = CASES[case]
    shown = on_phantoms("-m", "tests.phantom.compare", *arguments.split(), total_gib=80)
    errors = [float(error) / 100 for error in re.findall(r"\(([+-].*)%\)", shown)]
    assert errors, shown
    assert all(abs(error) <= most for error in errors), shown


def borrowed(x: torch.Tensor, dims: tuple[int, ...]) -> int:
    """The second of the blocks that a sum asks for: its output, scratch, semaphores."""
    torch.cuda.memory._record_memory_history(stacks="python", context=None)
    x.sum(dims)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    sizes = [event["size"] for event in events if event["action"] == "alloc"]
    return sizes[-2] if len(sizes) > 1 else 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((4728, 3072), (0,)),
        ((4728, 768), (0,)),
        ((8192, 8192), (0,)),
        ((1000, 10), (0,)),
        ((10**5, 10), (0,)),
        ((10**6, 3), (0,)),
        ((24, 3, 224, 224), (0, 1, 2, 3)),
        ((24, 3, 224, 224), (0, 2, 3)),
        ((24, 96, 56, 56), (0, 2, 3)),
        ((64, 1000), (1,)),
        ((7, 10**6), (1,)),
    ],
)
def test_scratch_of_reductions(
    shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.empty(shape, dtype=dtype, device="cuda")
    assert borrowed(x, dims) == Reduction.of(x, dims).scratch_bytes()
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
        assert borrowed(x, dims) == Reduction.of(x, dims).scratch_bytes()
