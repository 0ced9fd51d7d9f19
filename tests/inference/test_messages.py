import functools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from linnaeus.inference.export.check import largest_difference
from linnaeus.inference.paths import problem_of
from linnaeus.inference.prediction import log_probabilities_of
from linnaeus.inference.predictor import Predictor
from linnaeus.inference.trained import load_run
from tests.helpers.messages import error_and_code_of
from tests.helpers.trained import (
    ONE_LEVEL,
    Untraceable,
    picture,
    save_checkpoint,
    save_run,
    spec_of,
)

PLAIN = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}


def run_of(name, spec):
    folder = Path(name) if Path(name).exists() else save_run(Path(name), spec)
    return load_run(folder, device="cpu", trust_code=True)


def birds():
    return run_of("birds", spec_of())


def load(name, checkpoint="best"):
    return load_run(name, checkpoint=checkpoint, device="cpu", trust_code=True)


def checkpoint(name, spec=None, state=None, **content):
    save_checkpoint(Path(name), spec, state or {}, **content)
    return load(name)


def described(entry):
    save_file({"weight": torch.ones(1)}, "model.safetensors", metadata={"linnaeus": entry})
    return load("model.safetensors")


def text_file():
    Path("text.pt").write_text("no checkpoint")
    return load("text.pt")


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
    "text": text_file,
    "weights alone": lambda: [torch.save({"weight": torch.ones(2)}, "state.pt"), load("state.pt")],
    "no weights": lambda: checkpoint("bare.pt", spec_of()),
    "other weights": lambda: checkpoint(
        "x.pt", spec_of(taxonomy=None, node=PLAIN), {"model": {"weight": torch.ones(3)}}
    ),
    "device": lambda: [birds(), load_run("birds", device="abacus")],
    "description is no JSON": lambda: described("no JSON"),
    "number format": lambda: described('{"spec": {}, "precision": {"AMP": "fp4"}}'),
    "no file": lambda: birds().predict("missing.jpg"),
    "array of float": lambda: birds().predict(np.zeros((4, 4, 3))),
    "outputs not finite": lambda: levels(torch.full((2, 3), math.nan)),
    "an image for a run on tensors": lambda: tensors().predict(picture(0)),
    "a tensor of another shape": lambda: tensors().predict(torch.zeros(3, 8, 8)),
    "a run without classes": lambda: run_of("none", spec_of(taxonomy=None, node=PLAIN)).predict(
        picture(0)
    ),
    "an ensemble of other classes": lambda: Predictor(
        [birds(), run_of("other", spec_of(taxonomy=ONE_LEVEL))]
    ),
    "features of a model of one's own": lambda: untraceable().predict(picture(0), features=True),
    "export: pixels of tensors": lambda: tensors().export("torch-export", preprocessing=True),
    "export: ending": lambda: birds().export("safetensors", "model.pt"),
    "export: folder in use": lambda: [
        Path("full.pt2").mkdir(),
        birds().export("torch-export", "full.pt2"),
    ],
    "export: not traceable": lambda: untraceable().export("torch-export"),
    "export: no shape": lambda: run_of(
        "linear",
        replace(
            spec_of(taxonomy=None, node={**PLAIN, "in_features": 4}, is_of_files=False),
            in_chans=None,
        ),
    ).export("torch-export"),
    "export: other outputs": lambda: difference(1.01),
    "tensor of two": lambda: birds().predict(torch.zeros(2, 4, 4, dtype=torch.uint8)),
    "outputs of another size": lambda: levels(torch.zeros(2, 4)),
    "mirror images of tensors": lambda: tensors().predict(torch.zeros(3, 32, 32), tta="flip"),
    "export: pixels and logits": lambda: birds().export(
        "torch-export", preprocessing=True, outputs="logits"
    ),
    "export: other levels": lambda: difference(1, "b"),
    "a number": lambda: birds().predict([7]),
}
"""By a title: what raises an error."""


def test_messages(golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {title: error_and_code_of(mistake) for title, mistake in MISTAKES.items()}
    found["paths"] = f"nowhere/*.gif: {problem_of('nowhere/*.gif')}"
    title = "export: not traceable"
    found[title] = re.sub(r"(?<=torch\.export )\(.*\)", "(CAUSE)", found[title])
    golden("inference", found)
