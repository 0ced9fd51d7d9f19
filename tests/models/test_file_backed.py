"""Models built without memory for their weights, which are computed later, one by one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from linnaeus.models.file_backed import FileBacked
from tests.helpers.small_models import built

FAMILIES: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 2},
    "cait_xxs24_224": {"depth": 2},
    "eva02_tiny_patch14_224": {"depth": 2},
    "mixer_s32_224": {},
    "regnety_002": {},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2)},
    "swinv2_tiny_window16_256": {"depths": (2, 2)},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_mambaout": {},
    "test_maxvit": {},
    "test_resnet": {},
    "test_vit": {},
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def both(
    build: Callable[[], nn.Module], seeds: tuple[int, int] = (0, 0)
) -> tuple[nn.Module, dict[str, Tensor]]:
    """An ordinary model and the tensors of one in files; both builds leave the same random state."""
    torch.manual_seed(seeds[0])
    model, state = build(), torch.get_rng_state()
    torch.manual_seed(seeds[1])
    with FileBacked(min_bytes=256) as on_disk:
        other = build()
    assert seeds[0] != seeds[1] or torch.equal(torch.get_rng_state(), state)
    return model, {name: on_disk.copy_of(tensor) for name, tensor in tensors(other).items()}


def assert_same(model: nn.Module, values: dict[str, Tensor]) -> None:
    expected = tensors(model)
    assert expected.keys() == values.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(tensor, values[name])]


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_of_the_ordinary_build(name: str) -> None:
    if not timm.is_model(name):
        pytest.skip("this timm lacks it")
    assert_same(*both(lambda: timm.create_model(name, **FAMILIES[name])))


def test_another_seed_gives_other_weights() -> None:
    model, values = both(lambda: nn.Linear(20, 20), seeds=(0, 1))
    assert not torch.equal(model.weight, values["weight"])


class Strange(nn.Module):
    """Does with its weights what initialisers may do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8, padding_idx=3)
        self.tied = nn.Linear(8, 30, bias=False)
        self.tied.weight = self.table.weight
        self.square, self.sparse, self.kernel = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Conv2d(8, 8, 3),
        )
        self.scale = nn.Parameter(0.1 * torch.ones(128))
        self.register_buffer("ramp", torch.linspace(0, 1, 12).outer(torch.arange(12.0)))
        nn.init.orthogonal_(self.square.weight)
        nn.init.sparse_(self.sparse.weight, 0.5)
        nn.init.trunc_normal_(self.kernel.weight, std=2.0)
        generator = torch.Generator().manual_seed(5)
        shift = torch.ones(16)
        with torch.no_grad():
            self.square.weight[2:4].t().add_(torch.rand(16, 1))
            self.square.weight.add_(shift)
            shift.zero_()  # what was recorded needs the value of before
            self.sparse.weight[self.sparse.weight > 0] = torch.randn((), generator=generator)
            self.kernel.weight.data.div_(self.kernel.weight.flatten()[5].item())
            if self.square.weight.sum() > self.square.weight.max():
                self.square.weight.mul_(self.scale.tolist()[0])
            torch.nn.functional.dropout(self.table.weight[:10], inplace=True)
        self.kernel.to(memory_format=torch.channels_last)
        self.copied = deepcopy(self.square)
        self.left, self.right = (nn.Parameter(half) for half in torch.randn(2, 64))


def test_writes_through_views_values_in_python_and_copies() -> None:
    model, values = both(Strange)
    assert_same(model, values)
    assert values["left"].untyped_storage().nbytes() == 4 * 64
    assert values["kernel.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "options", [{}, {"WEIGHTS": "file"}, {"HEAD": "marginal"}, {"LORA": 4}], ids=str
)
def test_the_model_of_a_run(tmp_path: Path, options: dict[str, Any]) -> None:
    name = "test_vit"
    if "WEIGHTS" in options:
        options = {"WEIGHTS": str(tmp_path / "weights.pt")}
        torch.save(built(name, seed=7, img_size=(64, 64))[0].state_dict(), options["WEIGHTS"])
    if "LORA" in options:
        pytest.importorskip("peft")
        from linnaeus.config.schema import LoraConfig

        options = {"LORA": LoraConfig(RANK=4)}
    lines = []

    def build() -> nn.Module:
        seed = torch.initial_seed()
        model, line = built(name, seed=seed, img_size=(96, 96), **options)
        lines.append(line)
        return model

    assert_same(*both(build))
    assert lines[0] == lines[1]


PEAK = """
import re, sys, torch
from pathlib import Path
from torch import nn
from linnaeus.models.file_backed import FileBacked

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(2048, 2048) for _ in range(24)))
        for layer in list(self)[:4]:
            nn.init.trunc_normal_(layer.weight, std=0.02)

with FileBacked() as on_disk:  # torch imports much at first
    warm = nn.Linear(64, 64)
    nn.init.trunc_normal_(warm.weight)
on_disk.copy_of(warm.weight)
before = peak()
with on_disk:
    model = Net()
for parameter in model.parameters():
    on_disk.copy_of(parameter)
print((peak() - before) / sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_more_than_a_few_weights_are_in_memory_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.25
