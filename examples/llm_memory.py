"""Predict the memory of fine-tuning a language model from its `config.json`, without weights, network or GPU.

    pip install 'linnaeus[transformers]' peft
    python examples/llm_memory.py config.json --lora --sequence 2048 --gib 24

The step follows transformers' `Trainer` with `bf16=True`: forward with labels under autocast, backward and
fused AdamW, on batches without padding. Weights are float32; with `--lora` they are bfloat16 and frozen. Edit
`predicted` for another optimizer, data type or adapter.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from linnaeus import predict_memory
from linnaeus.autobatch.predict.prediction import MARGIN

GIB = 1024**3


def predicted(
    config: Any, sequence: int, *, lora: bool = False, checkpointing: bool = False
) -> Any:
    """Predict a training step of a configuration of transformers on samples of `sequence` tokens."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        dtype = torch.bfloat16 if lora else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if lora:
            from peft import LoraConfig, get_peft_model

            options = LoraConfig(r=16, task_type="CAUSAL_LM", target_modules="all-linear")
            model = get_peft_model(model, options)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        trained = [each for each in model.parameters() if each.requires_grad]
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

    return predict_memory(step, make_batch, state=(model, optimizer))


def main(argv: Sequence[str] | None = None) -> int | None:
    """Print the batch size and its peak; return the size, None where not even one sample fits."""
    parser = argparse.ArgumentParser(description="Predict the memory of fine-tuning.")
    parser.add_argument("config", help="config.json of a model, or a folder that has one")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--lora", action="store_true", help="train adapters on a frozen model")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--gib", type=float, default=24, help="memory of the GPU that may be used")
    args = parser.parse_args(argv)
    config = AutoConfig.from_pretrained(args.config, local_files_only=True)
    found = predicted(config, args.sequence, lora=args.lora, checkpointing=args.checkpointing)
    size: int | None = found.largest(int(args.gib * GIB / MARGIN))
    print(f"batch size {size}, with a margin of {MARGIN - 1:.0%}")
    print(f"peak with {size or 1}: {found.peak_bytes(size or 1) / GIB:.2f} GiB")
    return size


if __name__ == "__main__":
    main()
