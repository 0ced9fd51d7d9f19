"""Batch sizes of fine-tuning a language model, from its configuration alone: `--hf`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from linnaeus.autobatch.predict.prediction import largest_within
from linnaeus.autobatch.search import Candidates
from linnaeus.cli.analyze.options import Options
from linnaeus.cli.analyze.predict import LARGEST, PredictedStep, Target, describe, fill, rows_of
from linnaeus.cli.analyze.results import Analysis, Breakdown, Remedy
from linnaeus.errors import ConfigError
from linnaeus.integrations.language import LanguagePrediction, predict_language_model
from linnaeus.training.out_of_memory import StateBytes


def predict_language_sizes(
    target: Target, options: Options, analysis: Analysis, status: Callable[[str], object]
) -> None:
    """Predict the size for every device and fraction, its parts, and the effect of each remedy.

    Raises:
        ConfigError: a library is not installed, or the model cannot be built or traced.
    """
    status("tracing the step")
    found, step = _predicted(target, options)
    model = f"{options.hf}, {options.method}, {options.sequence} tokens"
    analysis.environment = describe(target, {
        "model": model, "parameters": found.num_parameters, "method": options.method,
        "frozen_parameters": found.num_parameters - found.num_trained, "sequence": options.sequence,
        "precision": f"bf16 autocast over {found.dtype}", "optimizer": "AdamW", "image_size": None,
        "num_classes": None, "gradient_checkpointing": options.checkpointing, "accumulation_steps": 1,
        "ema": False, "memory_limit_gb": None, "world_size": 1,
    })  # fmt: skip
    analysis.rows += rows_of("train", target, options)
    for row in analysis.rows:
        fill(row, step, None)
        row.breakdown = Breakdown(**found.parts(row.batch_size or 1))
    for change in _changes(options):
        status(f"remedies: {' '.join(change)}")
        keys = {f"--{name}": value for name, value in change.items()}
        try:
            _, step = _predicted(target, replace(options, **change))
        except ConfigError:  # a model without checkpointing, or no peft
            continue
        for row in analysis.chosen_rows():
            size, need = row.batch_size or 1, step.prediction.safe_bytes
            fits = largest_within(step.candidates, row.budget_bytes or 0, need)
            peaks = found.prediction.peak_bytes(size), step.prediction.peak_bytes(size)
            row.remedies.append(Remedy(keys, size, *peaks, safe_batch_size=fits))


def _predicted(target: Target, options: Options) -> tuple[LanguagePrediction, PredictedStep]:
    try:
        found = predict_language_model(
            str(options.hf), method=options.method, sequence=options.sequence, dtype=options.dtype,
            checkpointing=options.checkpointing, base_bytes=target.base_bytes,
        )  # fmt: skip
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--hf: {error}") from error
    return found, PredictedStep(
        "train", found.prediction, StateBytes(), Candidates(1, LARGEST, 1), "", has_buckets=False
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
