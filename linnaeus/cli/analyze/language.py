"""Batch sizes of fine-tuning a language model, from its configuration alone: `--hf`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from linnaeus.autobatch.predict.gpus import Gpu
from linnaeus.autobatch.search import Candidates
from linnaeus.cli.analyze.options import Options
from linnaeus.cli.analyze.predict import LARGEST, PredictedStep, describe, effect_on, fill, rows_of
from linnaeus.cli.analyze.results import Analysis, Breakdown, Remedy
from linnaeus.errors import ConfigError
from linnaeus.integrations.language import LanguagePrediction, predict_language_model
from linnaeus.training.out_of_memory import StateBytes


def predict_language_sizes(
    gpus: Sequence[Gpu], options: Options, analysis: Analysis, status: Callable[[str], object]
) -> None:
    """Predict the size for every device and fraction, its parts, and the effect of each remedy.

    Raises:
        ConfigError: a library is not installed, or the model cannot be built or traced.
    """
    status("tracing the step")
    found, step = _predicted(options)
    analysis.environment = describe(
        gpus,
        {
            "model": f"{options.hf}, {options.method}, {options.sequence} tokens",
            "method": options.method,
            "sequence": options.sequence,
            "parameters": found.num_parameters,
            "frozen_parameters": found.num_parameters - found.num_trained,
            "image_size": None,
            "precision": f"bf16 autocast over {found.dtype}",
            "optimizer": "AdamW",
            "num_classes": None,
            "gradient_checkpointing": options.checkpointing,
            "accumulation_steps": 1,
            "ema": False,
            "memory_limit_gb": None,
            "world_size": 1,
            "sharding": "none",
        },
    )
    analysis.rows += rows_of("train", gpus, options.fractions)
    for row in analysis.rows:
        fill(row, step, None)
        size = row.batch_size or 1
        peak_bytes = row.peak_bytes or row.base_bytes + step.prediction.reserved_bytes(size)
        row.breakdown = Breakdown(**found.parts(size, peak_bytes))
    for change in _changes(options):
        status(f"remedies: {' '.join(change)}")
        keys = {f"--{name}": value for name, value in change.items()}
        try:
            _, step = _predicted(replace(options, **change))
        except ConfigError:  # a model without checkpointing, or no peft
            continue
        for row in analysis.chosen_rows():
            size, before = row.batch_size or 1, sum(vars(row.breakdown).values())
            row.remedies.append(Remedy(keys, size, before, **effect_on(row, step, size)))


def _predicted(options: Options) -> tuple[LanguagePrediction, PredictedStep]:
    try:
        found = predict_language_model(
            str(options.hf),
            method=options.method,
            sequence=options.sequence,
            dtype=options.dtype,
            checkpointing=options.checkpointing,
            base_bytes=0,
        )
    except (ImportError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"--hf: {error}") from error
    candidates = Candidates(1, LARGEST, 1)
    return found, PredictedStep(
        "train", found.prediction, StateBytes(), candidates, "", has_buckets=False
    )


def _changes(options: Options) -> Iterator[dict[str, Any]]:
    """The remedies that change something, by the names of their options."""
    if not options.checkpointing:
        yield {"checkpointing": True}
    if options.sequence > 1:
        yield {"sequence": options.sequence // 2}
    if options.method == "full":
        if options.dtype != "bfloat16":
            yield {"dtype": "bfloat16"}
        yield {"method": "lora"}
