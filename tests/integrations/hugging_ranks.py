"""Searches of trainers on several ranks, for `tests.helpers.processes`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

pytest.importorskip("transformers")

from transformers import Trainer

from linnaeus.autobatch.group import together
from linnaeus.integrations.transformers import autobatch
from tests.helpers.ledger import limit_with_room_for
from tests.integrations.hugging import differences, outcome, trainer


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


class Collective(Trainer):
    """Adds up something over the ranks in each step."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        torch_dist.all_reduce(torch.ones(1))
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


def room(rank: int, extra_mib: float = 50) -> dict[str, Any]:
    """Rank 1 has less."""
    limit_gb = limit_with_room_for(extra_mib * (1 if rank == 0 else 0.7))
    return {
        "target_memory_fraction": 1.0, "memory_limit_gb": limit_gb, "max_batch_size": 64, "tolerance": 0.25
    }  # fmt: skip


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
        "steps": args.gradient_accumulation_steps,
        "differences": differences(ours, outcome(other)),
        "weights": [float(value.double().sum()) for value in ours["weights"]],
        "shapes": getattr(found, "shapes", []),
        "limited_by": result.limited_by,
        "ran": list(result.ran_on_every_rank),
        "log": found.state.log_history[0]["loss"],
    }


def failure(kind: type, rank: int) -> str:
    try:
        autobatch(trainer(kind), max_batch_size=2).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def resumed(rank: int, folder: str) -> list[int]:
    """The sizes tried and used where rank 0 alone sees a checkpoint with batch size 5."""
    checkpoint = Path(folder) / f"checkpoint of rank {rank}"
    checkpoint.mkdir()
    if rank == 0:
        (checkpoint / "trainer_state.json").write_text('{"train_batch_size": 5}')
    made = trainer()
    autobatch(made, max_batch_size=6)
    search = vars(made)["_inner_training_loop"]
    with together() as control:
        search._find(str(checkpoint), control)
    return [*(trial.size for trial in made.autobatch_results["train"].trials), made._train_batch_size]


def work(rank: int, folder: str) -> dict[str, Any]:
    """Trainers of transformers."""
    join(rank, folder)
    mixed = {"bf16": True, "gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    few = {**room(rank, 300), "max_batch_size": 4}
    return {
        "plain": compared(lambda **own: trainer(Recorder, **own), rank, room(rank)),
        "mixed": compared(lambda **own: trainer(Recorder, **{**mixed, **own}), rank, few),
        "broken": failure(Broken, rank),
        "broken data": failure(BrokenData, rank),
        "resumed": resumed(rank, folder),
        "collective": failure(Collective, rank),
    }
