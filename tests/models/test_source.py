"""Pretrained weights by name: those of timm's list, of a folder, and of a hub that cannot be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from linnaeus.errors import ConfigError
from tests.helpers.small_models import build, built


def said(name: str = "test_resnet", **keys: Any) -> str:
    """The line that says which weights a model has."""
    return built(name, **keys)[1]


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


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("name", "key", "place"),
    [
        ("test_resnet", "MODEL.PRETRAINED", "timm/test_resnet.r160_in1k"),
        ("hf-hub:someone/model", "MODEL.NAME", "someone/model"),
    ],
)
def test_without_a_network_one_error_says_how_to_bring_the_weights(name: str, key: str, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        said(name, PRETRAINED=True)
    [problem] = error.value.problems
    for word in (key, place, "HF_HOME", "local-dir:FOLDER", "MODEL.WEIGHTS FILE"):
        assert word in problem
