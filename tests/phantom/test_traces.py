"""Predicted against reserved bytes of a phantom GPU; `compare.py` shows them for any model."""

import re

import pytest
import torch

from tests.phantom.build import on_phantoms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

SCRATCH = 0.05
"""Bias gradients of wide layers take scratch memory, which no trace counts: at most this.
The margin of a prediction is 0.15."""

CASES = {
    "residual connections": ("resnet18 24 97", 0.0),
    "cross-entropy under autocast": ("gpt 16 --amp bf16", 0.001),
    "channels-last convolutions": ("resnet50 97 --amp fp16 --channels-last", 0.001),
    "bias gradients of wide layers": ("vit_small_patch16_224 24", SCRATCH),
    "gathered parameters and their streams": ("vit_small_patch16_224 24 --shards 4", SCRATCH),
    "autocast over gathered parameters": (
        "vit_small_patch16_224 16 --amp fp16 --shards 4",
        SCRATCH,
    ),
    "gathered parameters in bf16": ("gpt 16 --amp bf16 --shards 64", 0.001),
}
"""What the trace once missed: model and size, and the largest error."""


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_what_torch_reserves(case):
    arguments, most = CASES[case]
    shown = on_phantoms("-m", "tests.phantom.compare", *arguments.split(), total_gib=80)
    errors = [float(error) / 100 for error in re.findall(r"\(([+-].*)%\)", shown)]
    assert errors, shown
    assert all(abs(error) <= most for error in errors), shown
