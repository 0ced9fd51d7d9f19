"""Searches of trainers on several ranks, for `tests.helpers.processes`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as torch_dist

pytest.importorskip("transformers")

from transformers import Trainer

from linnaeus.integrations.transformers import autobatch
from tests.helpers.bits import differences
from tests.helpers.ledger import room
from tests.integrations.hugging import outcome, trainer


class Recorder(Trainer):
    """Remembers the shape of each training batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shapes: list[tuple[int, ...]] = []

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        if model.training:
            self.shapes.append(tuple(inputs["input_ids"].shape))
        return super().compute_loss(model, inputs, *arguments, **options)


class Broken(Trainer):
    """Fails on rank 1."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        if torch_dist.get_rank() == 1:
            raise ValueError("rank 1 is broken")
        return super().compute_loss(*arguments, **options)


class BrokenData(Trainer):
    """Cannot make its loader on rank 1, before any search."""

    def get_train_dataloader(self) -> Any:
        if torch_dist.get_rank() == 1:
            raise FileNotFoundError("rank 1 has no data")
        return super().get_train_dataloader()


def join(rank: int, folder: str) -> None:
    """Join the group of two, as torchrun and accelerate would."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    store = torch_dist.FileStore(f"{folder}/store", 2)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    autobatch(trainer(), max_batch_size=2).train()  # loads what would count as memory of the next search


def compared(make: Any, rank: int, search: dict[str, Any]) -> dict[str, Any]:
    """What a search and training give, beside training with the size given by hand."""
    found = make()
    autobatch(found, **search).train()
    args, result = found.args, found.autobatch_results["train"]
    names = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    ours = outcome(found)
    other = make(**{name: getattr(args, name) for name in names})
    other.train()
    return {
        "size": args.per_device_train_batch_size,
        "differences": differences(ours, outcome(other)),
        "weights": [float(value.double().sum()) for value in ours["weights"]],
        "shapes": found.shapes,
        "limited_by": result.limited_by,
        "ran": list(result.ran_on_every_rank),
    }


def failure(kind: type) -> str:
    try:
        autobatch(trainer(kind), max_batch_size=2).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(rank: int, folder: str) -> dict[str, Any]:
    """Trainers of transformers."""
    join(rank, folder)
    search = room(50 if rank == 0 else 35, max_batch_size=64, tolerance=0.25)
    mixed = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    return {
        "compared": compared(lambda **own: trainer(Recorder, **{**mixed, **own}), rank, search),
        "broken": failure(Broken),
        "broken data": failure(BrokenData),
    }
