"""Memory of fine-tuning a language model, from its configuration alone: no weights, no network, no GPU.

found = predict_language_model("Llama-3.2-3B/config.json", method="lora", sequence=2048)
found.prediction.largest(24 * 2**30), found.parts(1)

The step is that of `transformers.Trainer` with `bf16=True`: forward with labels under autocast, backward and
the fused AdamW, on batches without padding.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from linnaeus.autobatch.arguments import check_choice, check_count, kind_of
from linnaeus.autobatch.predict.prediction import BATCH_SIZES, Prediction, predict

Method = Literal["full", "lora"]
Dtype = Literal["float32", "bfloat16"]
_PARTS = ("parameters", "gradients", "optimizer_state", "weight_copies", "logits", "activations")


@dataclasses.dataclass(frozen=True)
class LanguagePrediction:
    """Peak memory of a step, and its parts.

    Attributes:
        num_parameters, num_trained: numbers of all parameters and of those that are trained.
        dtype: of the weights.
    """

    prediction: Prediction
    num_parameters: int
    num_trained: int
    dtype: Dtype
    _num_logits: int = dataclasses.field(repr=False)

    def parts(self, n: int, peak_bytes: int | None = None) -> dict[str, int]:
        """Bytes of each part when tensors take most memory in a step with n samples; they sum to the peak.

        `logits` are those and what the loss makes of them, `weight_copies` all else that does not grow with
        the batch: weights and gradients in bf16 under autocast. `rest` is the base and what the allocator
        reserves beyond the tensors. Gradients are 0 where the peak comes before there are any.
        """
        first, second = (each.events for each in self.prediction.traces)
        low, high = BATCH_SIZES
        first_end, end = (index for index, event in enumerate(first) if event.kind == "mark")
        ends = {
            event.storage: index
            for index, event in enumerate(first[:end])
            if event.kind == "release"
        }
        changes, tensors = [0] * (end + 1), []
        for begin, (one, other) in enumerate(zip(first[:end], second[:end], strict=True)):
            if one.kind == "allocate" and one.label != "cublas":  # a part of the rest
                growth, until = other.num_bytes - one.num_bytes, ends.get(one.storage, end)
                size = one.num_bytes + growth * (n - low) // (high - low)
                changes[begin] += size
                changes[until] -= size
                tensors.append((begin, until, size, growth, one.label))
        live = [*accumulate(changes)]
        peak = max(range(first_end, end), key=live.__getitem__)
        # The first step allocates the optimizer's state when it updates; the second updates as late.
        num_state = sum(label == "state" for *_, label in tensors)
        kept = [begin for begin, until, *_ in tensors if until == end][num_state]
        update = first_end + 1 + kept - num_state
        parts = Counter(dict.fromkeys(_PARTS, 0))
        for begin, until, size, growth, label in tensors:
            if not begin <= peak < until:
                continue
            if begin < first_end:
                kind = "parameters" if label == "state" else "optimizer_state"
            elif growth:
                is_of_logits = size in (2 * n * self._num_logits, 4 * n * self._num_logits)
                kind = "logits" if is_of_logits else "activations"
            else:
                kind = "gradients" if begin < update <= until else "weight_copies"
            parts[kind] += size
        peak_bytes = self.prediction.peak_bytes(n) if peak_bytes is None else peak_bytes
        return {**parts, "rest": peak_bytes - parts.total()}


def predict_language_model(
    config: Any,
    *,
    method: Method = "full",
    sequence: int = 2048,
    dtype: Dtype | None = None,
    checkpointing: bool = False,
    lora_rank: int = 16,
    base_bytes: int | None = None,
) -> LanguagePrediction:
    """Predict the memory of fine-tuning a model of transformers on a CUDA device.

    Args:
        config: a configuration of transformers, a folder or JSON file with one, the name of a model in the
            local cache of the hub, or a type of model, such as `llama`, for its defaults.
        method: `full` trains all parameters; `lora` adapters on a frozen model, by peft, on the layers that
            it chooses for the model, else on all linear ones.
        sequence: tokens of each sample.
        dtype: of the weights, the frozen ones with LoRA; by default float32 for `full`, bfloat16 for `lora`.
        checkpointing: whether activations are computed again in backward.
        lora_rank: rank of the adapters.
        base_bytes: as for `Prediction`.

    Raises:
        ImportError: transformers, or peft for LoRA, is not installed.
        UntraceableError: the model's step needs the values of tensors, as a mixture of experts may.
        TypeError, ValueError: there is no such configuration, or transformers has no model for it that
            writes text; an argument of the wrong type, or out of its range.
    """
    check_choice("method", method, get_args(Method))
    check_count("sequence", sequence)
    dtype = dtype or ("bfloat16" if method == "lora" else "float32")
    check_choice("dtype", dtype, get_args(Dtype))
    transformers = _library("transformers")
    config = _configuration(transformers, config)
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and sequence > most:
        raise ValueError(
            f"sequence is {sequence}; the model has {most} positions (max_position_embeddings)"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("quantised weights are not predicted: take quantization_config out")
    kind, task = (
        ("Seq2SeqLM", "SEQ_2_SEQ_LM") if config.is_encoder_decoder else ("CausalLM", "CAUSAL_LM")
    )
    with (
        torch.device("meta"),
        warnings.catch_warnings(action="ignore"),
    ):  # peft uses what is deprecated
        try:
            auto = getattr(transformers, f"AutoModelFor{kind}")
            model = auto.from_config(config, dtype=getattr(torch, dtype))
        except ValueError as error:
            reason = f"of type {config.model_type!r}: {error}".partition("\n")[0]
            raise ValueError(f"transformers cannot build a {kind} {reason}") from error
        if method == "lora":
            peft = _library("peft")
            known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
            targets = None if config.model_type in known else "all-linear"
            lora = peft.LoraConfig(r=lora_rank, task_type=task, target_modules=targets)
            model = peft.get_peft_model(model, lora)
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)

    def make_batch(n: int) -> dict[str, torch.Tensor]:
        ones = torch.ones(n, sequence, dtype=torch.long)
        return {"input_ids": ones, "attention_mask": ones.clone(), "labels": ones.clone()}

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return LanguagePrediction(
        predict(step, make_batch, state=(model, optimizer), base_bytes=base_bytes),
        sum(parameter.numel() for parameter in model.parameters()),
        sum(parameter.numel() for parameter in trained),
        dtype,
        sequence * config.get_text_config().vocab_size,
    )


def _configuration(transformers: Any, config: Any) -> Any:
    """The configuration that `config` is or names; nothing is downloaded."""
    if isinstance(config, transformers.PretrainedConfig):
        return config
    if not isinstance(config, str | Path):
        raise TypeError(
            f"config is {kind_of(config)}; it must be a configuration of transformers or a path"
        )
    if config in transformers.CONFIG_MAPPING and not Path(config).exists():
        return transformers.AutoConfig.for_model(config)
    try:
        return transformers.AutoConfig.from_pretrained(
            config, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the hub's checks of values have errors of their own
        reason = (
            str(error) if Path(config).exists() else "not downloaded: give the path of config.json"
        )
        raise ValueError(f"{str(config)!r}: {' '.join(reason.split())}") from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}): pip install {name}") from error
