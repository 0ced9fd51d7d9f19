import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from linnaeus.inference.export.check import largest_difference
from linnaeus.inference.paths import problem_of
from linnaeus.inference.prediction import log_probabilities_of
from linnaeus.inference.predictor import Predictor
from linnaeus.inference.trained import load_run
from tests.helpers.messages import error_and_code_of
from tests.helpers.trained import (
    ONE_LEVEL,
    Flat,
    Untraceable,
    picture,
    save_checkpoint,
    save_run,
    spec_of,
)

PLAIN = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
NESTED = {"_target_": f"{Flat.__module__}.Flat", "extra": {"_target_": "torch.nn.GELU"}}


def run_of(name, spec):
    folder = Path(name) if Path(name).exists() else save_run(Path(name), spec)
    return load_run(folder, device="cpu", trust_code=True)


def birds():
    return run_of("birds", spec_of())


def load(name, checkpoint="best", trust_code=False):
    return load_run(name, checkpoint=checkpoint, device="cpu", trust_code=trust_code)


def checkpoint(name, spec=None, state=None, **content):
    save_checkpoint(Path(name), spec, state or {}, **content)
    return load(name, trust_code=True)


def described(entry, trust_code=True):
    save_file({"weight": torch.ones(1)}, "model.safetensors", metadata={"linnaeus": entry})
    return load("model.safetensors", trust_code=trust_code)


def written(name, text="no checkpoint"):
    Path(name).write_text(text)
    return name


def named(node, trust_code=True):
    save_checkpoint(Path("named.pt"), spec_of(node=node), {})
    return load("named.pt", trust_code=trust_code)


def tensors():
    return run_of("tensors", spec_of(is_of_files=False))


def untraceable():
    node = {"_target_": f"{Untraceable.__module__}.{Untraceable.__name__}"}
    return run_of("own", spec_of(node=node, size=(4, 4)))


levels = functools.partial(log_probabilities_of, taxonomy=ONE_LEVEL, are_logs=False)


def difference(factor, name="a"):
    expected = torch.tensor([[0.7, 0.2999, 0.0001]])
    outputs = (lambda batch: {name: expected * factor}), (lambda batch: {"a": expected})
    return largest_difference(*outputs, torch.zeros(1, 1), probabilities=True)


MISTAKES = {
    "run is misspelled": lambda: [birds(), load("brids")],
    "no checkpoints": lambda: [Path("empty").mkdir(), load("empty")],
    "no such checkpoint": lambda: [birds(), load("birds", "epoch7.pt")],
    "a part of a checkpoint": lambda: [birds(), load("birds/checkpoints/best.pt", "last")],
    "text": lambda: load(written("text.pt")),
    "weights alone": lambda: [torch.save({"weight": torch.ones(2)}, "state.pt"), load("state.pt")],
    "whole module": lambda: [torch.save(nn.Linear(2, 2), "whole.pt"), load("whole.pt")],
    "no weights": lambda: checkpoint("bare.pt", spec_of()),
    "odd spec": lambda: checkpoint("odd.pt", model_spec={"model": 1}),
    "other weights": lambda: checkpoint(
        "x.pt", spec_of(taxonomy=None, node=PLAIN), {"model": {"weight": torch.ones(3)}}
    ),
    "device": lambda: [birds(), load_run("birds", device="abacus")],
    "description is no JSON": lambda: described("no JSON"),
    "description with an odd spec": lambda: described('{"spec": 1}'),
    "number format": lambda: described('{"spec": {}, "precision": {"AMP": "fp4"}}'),
    "code": lambda: named(PLAIN, trust_code=False),
    "code of Python": lambda: named({"_target_": "subprocess.run", "args": "ls"}),
    "code that is no module": lambda: named({"_target_": "psutil.Popen", "args": "ls"}),
    "code in an argument of safetensors": lambda: described(
        json.dumps({"spec": spec_of(node=NESTED).as_dict()})
    ),
    "a place to fetch a model from": lambda: named({"NAME": "hf-hub:timm/resnet18"}),
    "no file": lambda: birds().predict("missing.jpg"),
    "array of float": lambda: birds().predict(np.zeros((4, 4, 3))),
    "tensor of two": lambda: birds().predict(torch.zeros(2, 4, 4, dtype=torch.uint8)),
    "int64": lambda: birds().predict(torch.zeros(3, 4, 4, dtype=torch.int64)),
    "a number": lambda: birds().predict([7]),
    "outputs not finite": lambda: levels(torch.full((2, 3), math.nan)),
    "outputs of another size": lambda: levels(torch.zeros(2, 4)),
    "an image for a run on tensors": lambda: tensors().predict(picture(0)),
    "a tensor of another shape": lambda: tensors().predict(torch.zeros(3, 8, 8)),
    "a run without classes": lambda: run_of("none", spec_of(taxonomy=None, node=PLAIN)).predict(
        picture(0)
    ),
    "an ensemble of other classes": lambda: Predictor(
        [birds(), run_of("other", spec_of(taxonomy=ONE_LEVEL))]
    ),
    "mirror images of tensors": lambda: tensors().predict(torch.zeros(3, 32, 32), tta="flip"),
    "features of a model of one's own": lambda: untraceable().predict(picture(0), features=True),
    "export: opset of another format": lambda: birds().export("torch-export", opset=18),
    "export: half of weights": lambda: birds().export("safetensors", half=True),
    "export: pixels and logits": lambda: birds().export(
        "torch-export", preprocessing=True, outputs="logits"
    ),
    "export: pixels of tensors": lambda: tensors().export("torch-export", preprocessing=True),
    "export: format": lambda: birds().export("tflite"),
    "export: ending": lambda: birds().export("safetensors", "model.pt"),
    "export: folder in use": lambda: [
        Path("full.pt2").mkdir(),
        birds().export("torch-export", "full.pt2"),
    ],
    "export: code in an argument of safetensors": lambda: run_of(
        "nested", spec_of(node=NESTED, size=(4, 4))
    ).export("safetensors"),
    "export: not traceable": lambda: untraceable().export("torch-export"),
    "export: no shape": lambda: run_of(
        "linear",
        replace(
            spec_of(taxonomy=None, node={**PLAIN, "in_features": 4}, is_of_files=False),
            in_chans=None,
        ),
    ).export("torch-export"),
    "export: other outputs": lambda: difference(1.01),
    "export: other levels": lambda: difference(1, "b"),
}
"""By a title: what raises an error."""


def test_messages(golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {title: error_and_code_of(mistake) for title, mistake in MISTAKES.items()}
    found["paths"] = "\n".join(
        f"{word}: {problem_of(word)}" for word in ("nowhere", "nowhere/*.gif")
    )
    golden(
        "inference",
        {
            title: re.sub(r"(?<=torch\.export )\(.*\)", "(CAUSE)", text)
            for title, text in found.items()
        },
    )
