"""Pretrained weights of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor

from tests.helpers.small_models import build


@pytest.mark.parametrize("in_chans", [1, 3])
def test_weights_of_a_folder_are_adapted_to_the_channels(folder: Path, in_chans: int) -> None:
    model = build(f"local-dir:{folder}", PRETRAINED=True, in_chans=in_chans)
    torch.manual_seed(3)
    source = timm.create_model("test_resnet", in_chans=1)
    expected, found = source.state_dict(), model.backbone.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found if name != "conv1.0.weight")
    first: Tensor = found["conv1.0.weight"]
    torch.testing.assert_close(first.sum(1, keepdim=True), expected["conv1.0.weight"])
    random = build(f"local-dir:{folder}", in_chans=in_chans)  # the same random numbers for the heads
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(model.heads, random.heads, strict=True))
    assert not torch.equal(random.backbone.state_dict()["conv1.0.weight"], first)
