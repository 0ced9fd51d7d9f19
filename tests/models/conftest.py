"""A hub that gives nothing, and a folder as a hub has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub has it, of a model for one channel."""
    path = tmp_path_factory.mktemp("hub") / "model"
    torch.manual_seed(3)
    timm.models.save_for_hf(timm.create_model("test_resnet", in_chans=1), path)
    return path
