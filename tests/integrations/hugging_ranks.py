"""Searches of trainers on several ranks, for `tests.helpers.processes`."""

from functools import partial

import pytest
import torch.distributed as torch_dist

pytest.importorskip("transformers")

from transformers import Trainer

from linnaeus.integrations.transformers import autobatch
from tests.helpers.ledger import room
from tests.helpers.processes import join_as_torchrun
from tests.integrations.hugging import Recorder, compared, trainer


class BrokenData(Trainer):
    """Cannot make its loader on rank 1, before any search."""

    def get_train_dataloader(self):
        if torch_dist.get_rank() == 1:
            raise FileNotFoundError("rank 1 has no data")
        return super().get_train_dataloader()


def trained(rank):
    """What a search and training give, beside training with the size given by hand."""
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    search = room(50 if rank == 0 else 35, max_batch_size=64, tolerance=0.25)
    found, differing = compared(partial(trainer, Recorder), search, **options)
    return {
        "size": found.args.per_device_train_batch_size,
        "differences": differing,
        "weights": [value.double().sum().item() for value in found.model.state_dict().values()],
        "shapes": found.shapes,
        "limited_by": found.autobatch_results["train"].limited_by,
    }


def with_budget():
    """The budget, and the batches of an epoch."""
    made = trainer(Recorder, max_steps=-1, num_train_epochs=1)
    autobatch(made, budget="tokens", max_batch_size=1000).train()
    num_batches = len(made.get_train_dataloader())
    return made.args.per_device_train_batch_size, made.shapes[-num_batches:]


def broken_data():
    try:
        autobatch(trainer(BrokenData), max_batch_size=2).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(rank, folder):
    """Trainers of transformers."""
    join_as_torchrun(rank, 2, folder)
    autobatch(
        trainer(), max_batch_size=2
    ).train()  # loads what would count as memory of the next search
    return {
        "compared": trained(rank),
        "budget": with_budget(),
        "broken data": broken_data(),
    }
