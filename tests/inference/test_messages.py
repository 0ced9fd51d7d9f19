"""Mistakes with trained runs: what must be in each message, and in one file the whole sentences."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from linnaeus.errors import LinnaeusError
from linnaeus.inference.export.check import largest_difference, samples_of
from linnaeus.inference.paths import problem_of
from linnaeus.inference.prediction import log_probabilities_per_level
from linnaeus.inference.trained import TrainedRun, load_run
from tests.helpers.messages import Golden
from tests.helpers.trained import ONE_RANK, Untraceable, picture, save_checkpoint, save_run, spec_of

PLAIN = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}


@functools.cache
def birds() -> TrainedRun:
    return run_of("birds", spec_of())


def run_of(name: str, spec: Any) -> TrainedRun:
    return load_run(Path(name) if Path(name).exists() else save_run(Path(name), spec), device="cpu")


def load(name: str, checkpoint: str = "best") -> TrainedRun:
    return load_run(name, checkpoint=checkpoint, device="cpu")


def checkpoint(
    name: str, spec: Any = None, state: dict[str, Any] | None = None, **content: Any
) -> TrainedRun:
    save_checkpoint(Path(name), spec, state or {}, **content)
    return load(name)


def saved(name: str, content: Any) -> TrainedRun:
    torch.save(content, name)
    return load(name)


def described(entry: str) -> TrainedRun:
    save_file({"weight": torch.ones(1)}, "model.safetensors", metadata={"linnaeus": entry})
    return load("model.safetensors")


def written(name: str, text: str = "no checkpoint") -> str:
    Path(name).write_text(text)
    return name


def tensors() -> TrainedRun:
    return run_of("tensors", spec_of(is_of_files=False))


def untraceable() -> TrainedRun:
    node = {"_target_": f"{Untraceable.__module__}.{Untraceable.__name__}"}
    return run_of("own", spec_of(node=node, size=(4, 4)))


def without_shape() -> TrainedRun:
    spec = spec_of(taxonomy=None, node={**PLAIN, "in_features": 4}, is_of_files=False)
    return run_of("linear", type(spec)(**{**vars(spec), "in_chans": None, "img_size": None}))


def other_head() -> TrainedRun:
    run = run_of("heads", spec_of())
    run.model.heads = nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 5))
    return run


levels = functools.partial(log_probabilities_per_level, taxonomy=ONE_RANK, are_logs=False)


def difference(factor: float, name: str = "a") -> float | None:
    expected = torch.tensor([[0.7, 0.2999, 0.0001]])
    outputs = (lambda batch: {name: expected * factor}), (lambda batch: {"a": expected})
    return largest_difference(*outputs, torch.zeros(1, 1), probabilities=True)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "run is misspelled": (lambda: [birds(), load("brids")], "1 brids birds"),
    "no checkpoints": (lambda: [Path("empty").mkdir(), load("empty")], "1 empty"),
    "no such checkpoint": (lambda: [birds(), load("birds", "epoch7.pt")], "1 'epoch7.pt' best.pt last.pt"),
    "a part of a checkpoint": (lambda: [birds(), load("birds/checkpoints/best.pt", "last")], "1 best.pt"),
    "text": (lambda: load(written("text.pt")), "1 text.pt"),
    "weights alone": (lambda: saved("state.pt", {"weight": torch.ones(2)}), "1 state.pt MODEL.WEIGHTS"),
    "whole module": (lambda: saved("whole.pt", nn.Linear(2, 2)), "1 whole.pt"),
    "old": (lambda: checkpoint("old.pt"), "1 old.pt"),
    "no weights": (lambda: checkpoint("bare.pt", spec_of()), "1 bare.pt"),
    "odd spec": (lambda: checkpoint("odd.pt", model_spec={"model": 1}), "1 odd.pt model_spec"),
    "other weights": (
        lambda: checkpoint("x.pt", spec_of(taxonomy=None, node=PLAIN), {"model": {"weight": torch.ones(3)}}),
        "1 x.pt",
    ),
    "device": (lambda: [birds(), load_run("birds", device="abacus")], "2 device 'abacus'"),
    "description is no JSON": (lambda: described("no JSON"), "1 model.safetensors linnaeus"),
    "description of nothing": (lambda: described("{}"), "1 model.safetensors"),
    "description with an odd spec": (lambda: described('{"spec": 1}'), "1 model.safetensors model_spec"),
    "number format": (lambda: described('{"spec": {}, "precision": {"AMP": "fp4"}}'), "1 model.safetensors"),
    "no file": (lambda: birds().predict("missing.jpg"), "1 missing.jpg"),
    "array of float": (lambda: birds().predict(np.zeros((4, 4, 3))), "1 [4, 4, 3] float64"),
    "array of two": (lambda: birds().predict(np.zeros((2, 4, 4, 2), dtype=np.uint8)), "1 0 [4, 4, 2]"),
    "tensor of two": (lambda: birds().predict(torch.zeros(2, 4, 4)), "1 [2, 4, 4]"),
    "fractions": (lambda: birds().predict(torch.full((3, 4, 4), 2.0)), "1 [0, 1]"),
    "not a number": (lambda: birds().predict(torch.full((3, 4, 4), math.nan)), "1 [0, 1]"),
    "int64": (lambda: birds().predict(torch.zeros(3, 4, 4, dtype=torch.int64)), "1 torch.int64"),
    "a number": (lambda: birds().predict([7]), "1 int"),
    "outputs not finite": (lambda: levels(torch.full((2, 3), math.nan)), "1"),
    "outputs of another size": (lambda: levels(torch.zeros(2, 4)), "1 3 'class'"),
    "an image for a run on tensors": (lambda: tensors().predict(picture(0)), "1 [3, 32, 32]"),
    "a tensor of another shape": (lambda: tensors().predict(torch.zeros(3, 8, 8)), "1 [3, 32, 32]"),
    "a run without classes": (
        lambda: run_of("none", spec_of(taxonomy=None, node=PLAIN)).predict(picture(0)), "1 classes"
    ),
    "export: format": (lambda: birds().export("tflite"), "2 'tflite' safetensors onnx torch-export timm"),
    "export: rank": (lambda: birds().export("timm", level="genus"), "2 'genus' order species"),
    "export: rank of another format": (lambda: birds().export("onnx", level="order"), "2 timm"),
    "export: a file for a folder": (lambda: birds().export("timm", written("file")), "2 file timm"),
    "export: ending": (lambda: birds().export("safetensors", "model.pt"), "2 .safetensors"),
    "export: folder in use": (
        lambda: [Path("full").mkdir(), written("full/notes.txt"), birds().export("timm", "full")], "2 full"
    ),
    "export: own class with timm": (lambda: untraceable().export("timm"), "1 timm"),
    "export: not traceable": (lambda: untraceable().export("torch-export"), "1"),
    "export: head": (lambda: other_head().export("timm"), "1 Sequential"),
    "export: no shape": (lambda: without_shape().export("torch-export"), "1"),
    "export: other outputs": (lambda: difference(1.01), "1 'a'"),
    "export: other ranks": (lambda: difference(1, "b"), "1 a b"),
    "export: damaged image": (lambda: samples_of(birds(), [written("x.png")]), "1 --images x.png"),
}  # fmt: skip
"""By a title: what raises an error; its exit code, and words that it holds."""


@pytest.fixture(scope="module")
def error_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LinnaeusError]:
    """The error of a mistake. All are made in one folder."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def find(title: str) -> LinnaeusError:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            with pytest.raises(LinnaeusError) as caught:
                MISTAKES[title][0]()
        return caught.value

    return find


@pytest.mark.parametrize("title", MISTAKES)
def test_a_mistake_is_named(error_of: Callable[[str], LinnaeusError], title: str) -> None:
    code, *words = MISTAKES[title][1].split()
    error = error_of(title)
    assert [word for word in words if word not in str(error)] == []
    assert error.exit_code == int(code), error


def test_messages(golden: Golden, error_of: Callable[[str], LinnaeusError]) -> None:
    found = {title: str(error_of(title)) for title in MISTAKES}
    found["paths"] = "\n".join(f"{word}: {problem_of(word)}" for word in ("nowhere", "nowhere/*.gif"))
    golden(
        "inference",
        {title: re.sub(r"(?<=torch\.export )\(.*\)", "(CAUSE)", text) for title, text in found.items()},
    )
