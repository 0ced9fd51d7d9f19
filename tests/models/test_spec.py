"""What a checkpoint says about its model is enough to build it elsewhere."""

from __future__ import annotations

from pathlib import Path

import timm
import torch
from torch.utils.data import TensorDataset

from linnaeus.config.schema import ModelConfig
from linnaeus.data.builtin import TAXONOMY
from linnaeus.data.bundle import DataBundle, collate_pairs
from linnaeus.models.build import build_model
from linnaeus.models.model_spec import ModelSpec


def test_a_model_of_a_folder_is_built_without_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    source = timm.create_model("test_vit", pretrained=False, img_size=32, in_chans=1)
    timm.models.save_for_hf(source, folder, model_args={"img_size": 32, "in_chans": 1, "qkv_bias": False})
    node = ModelConfig(NAME=f"local-dir:{folder}")
    nothing = TensorDataset(torch.empty(0))
    data = DataBundle(nothing, nothing, TAXONOMY, in_chans=1, img_size=(32, 32), collate=collate_pairs)
    model, _ = build_model(node, taxonomy=TAXONOMY, in_chans=1, img_size=(32, 32))
    spec = ModelSpec.from_dict(ModelSpec.of(node, data).as_dict())
    folder.rename(tmp_path / "moved")
    again = spec.build()
    again.load_state_dict(model.state_dict())
    images = torch.rand(2, 1, 32, 32)
    for one, two in zip(model.eval()(images), again.eval()(images), strict=True):
        assert torch.equal(one, two)
