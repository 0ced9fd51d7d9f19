"""What an exported file says about itself, as JSON."""

from __future__ import annotations

from typing import Any

from linnaeus import __version__
from linnaeus.data.taxonomy import UNKNOWN
from linnaeus.inference.trained import TrainedRun

KEY = "linnaeus"
"""The entry of the description in the metadata of safetensors and ONNX files, and in timm's `config.json`."""
INPUT = "images"
"""The name of the input, unless a level has it."""


def describe(run: TrainedRun, outputs: str | None) -> dict[str, Any]:
    """Classes, taxonomy, input and architecture, as plain values; of weights also how the run computes.

    Unknown parents are None in `levels`, which is for other programs, and -1 in `spec`, which is what a
    checkpoint holds and Linnaeus reads.

    Args:
        run: the run.
        outputs: `probabilities`, `logits` or `log-probabilities`; None where the file holds weights alone.
    """
    spec = run.spec
    preprocessing = spec.preprocessing
    height, width = spec.img_size or (None, None)
    weights_alone = {"precision": {"AMP": run.amp, "CHANNELS_LAST": run.is_channels_last}}
    return {
        "version": __version__,
        "input": {
            "name": input_name(run),
            "channels": spec.in_chans,
            "height": height,
            "width": width,
            "mean": None if preprocessing is None else list(preprocessing.mean),
            "std": None if preprocessing is None else list(preprocessing.std),
            "crop_fraction": None if preprocessing is None else preprocessing.crop_fraction,
        },
        "outputs": outputs,
        **(weights_alone if outputs is None else {}),
        "levels": _levels(run),
        "spec": spec.as_dict(),
    }


def input_name(run: TrainedRun) -> str:
    """The name of the input."""
    return INPUT if INPUT not in run.classes else f"{INPUT}_"


def _levels(run: TrainedRun) -> list[dict[str, Any]]:
    """Name, classes and parents of each level, coarse to fine; None for an unknown parent."""
    taxonomy = run.taxonomy
    if taxonomy is None:
        return []
    rows: list[Any] = [None, *taxonomy.parents]
    return [
        {
            "name": level.name,
            "classes": list(level.classes),
            "parents": None if row is None else [None if label == UNKNOWN else label for label in row],
        }
        for level, row in zip(taxonomy.levels, rows, strict=True)
    ]
