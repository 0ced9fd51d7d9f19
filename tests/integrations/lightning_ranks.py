"""Cases of the Lightning callback on two ranks. `python -m tests.integrations.lightning_ranks FOLDER CASE...`

runs the cases on one rank, which the environment describes, and writes what they return to FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from linnaeus.integrations import lightning_steps
from linnaeus.integrations.lightning import AutoBatch
from tests.helpers.ledger import Ledger
from tests.integrations.lightning_runs import (
    NUM_VAL,
    Bare,
    Manual,
    Net,
    data,
    differences,
    fit,
    loader,
    room,
    trainer_for,
)

RANK = int(os.environ.get("LOCAL_RANK", "0"))
NO_VAL = {"val": False}
RANKS = {"devices": 2, "strategy": "ddp"}


class Talkative(Net):
    """Each step has collectives: of logging, of a metric, of a gather, and one of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.log("accuracy", self.accuracy.compute())
        gathered = self.all_gather(self.net[0](batch[0]), sync_grads=True)
        assert len(gathered) == self.trainer.world_size
        total = loss.detach().clone()
        torch_dist.all_reduce(total)
        return loss + 0.1 * gathered.mean() + 0 * total

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Partial(Net):
    """In each second step a layer is not used."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__(batch_size)
        self.extra = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.extra(torch.ones(4)).sum() if batch_idx % 2 else loss


def compared(module: Callable[[int], Any], given: Callable[[int], Any], **options: Any) -> dict[str, Any]:
    """The size found, and what differs from the run with that size by hand."""
    callback = AutoBatch(**{"max_batch_size": 12, **options.pop("search", {})})
    options = {**RANKS, "max_epochs": 1, **options}
    seed_everything(1, verbose=False)
    searched = fit(module(4), *given(4), callbacks=[callback], **options)
    size = callback.batch_size
    assert size is not None
    if searched["accumulate"] > 1:
        options["accumulate_grad_batches"] = searched["accumulate"]
    by_hand = fit(module(size), *given(size), **options)
    weights = [
        float(tensor.double().sum()) for name, tensor in searched["weights"].items() if "running" not in name
    ]  # each rank's statistics are its own
    return {
        "size": size,
        "val_size": callback.val_batch_size,
        "sizes": searched["sizes"],
        "accumulate": searched["accumulate"],
        "differences": differences(searched, by_hand),
        "limited_by": callback.results["train"].limited_by,
        "ran_on_every_rank": callback.results["train"].ran_on_every_rank,
        "weights": weights,
    }


def nothing(size: int) -> tuple[Any, ...]:
    return ()


def both(size: int) -> tuple[Any, ...]:
    return loader(size, shuffle=True), DataLoader(data(NUM_VAL), size)


def failing(fault: Callable[[], object], at: int, module: type[Net] = Net) -> dict[str, Any]:
    """The error of a search in which this rank meets a fault when it tries a size of at least `at`."""

    class Faulty(module):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if len(batch[0]) >= at:
                fault()
            return super().training_step(batch, batch_idx)

    callback = AutoBatch(max_batch_size=12, val=False)
    try:
        fit(Faulty(), callbacks=[callback], **RANKS)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"size": callback.batch_size}


def on_rank(rank: int, fault: Callable[[], object]) -> Callable[[], object]:
    return fault if rank == RANK else lambda: None


def break_down() -> None:
    raise ZeroDivisionError("sample")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("out of memory")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unequal() -> dict[str, Any]:
    heavy = partial(Net, mib=1.0)
    return compared(
        heavy, nothing, search={**room(120 if RANK == 0 else 60), "max_batch_size": 90, "val": False}
    )


def uneven(lengths: tuple[int, int], *, val_lengths: tuple[int, int] | None = None) -> dict[str, Any]:
    """Each rank has data of its own, of another length."""

    def given(size: int) -> tuple[Any, ...]:
        loaders = (DataLoader(data(lengths[RANK]), size),)
        return loaders if val_lengths is None else (*loaders, DataLoader(data(val_lengths[RANK]), size))

    return compared(
        lambda size: Bare(), given, search={"val": val_lengths is not None}, use_distributed_sampler=False,
        limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=0,
    )  # fmt: skip


def unprepared() -> dict[str, Any]:
    """The error where rank 1 cannot make its loaders."""

    class NoData(Net):
        def train_dataloader(self) -> Any:
            if RANK == 1:
                break_down()
            return super().train_dataloader()

        def configure_optimizers(self) -> Any:  # estimated_stepping_batches has a barrier of Lightning's own
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    return failing(lambda: None, 1, NoData)


def without_room_for_buckets() -> dict[str, Any]:
    """The error where the memory of DDP's buckets is not there, and what is left on the strategy then."""
    trainer = trainer_for([AutoBatch(max_batch_size=12)], **RANKS)
    before, lightning_steps._bucket_stand_in = lightning_steps._bucket_stand_in, lambda _: run_out_of_memory()
    groups = []
    destroy = torch_dist.destroy_process_group
    torch_dist.destroy_process_group = lambda group=None: (groups.append(group), destroy(group))[0]
    try:
        trainer.fit(Net())
    except Exception as error:
        left = sorted({"all_gather", "own_group"} & set(vars(trainer.strategy)))
        return {"error": type(error).__name__, "left": left, "destroyed": len(groups)}
    finally:
        lightning_steps._bucket_stand_in, torch_dist.destroy_process_group = before, destroy
    return {"error": None}


class Large(Net):
    """With eight MiB of parameters."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__(batch_size, mib=1.0)
        self.layer = torch.nn.Linear(1024, 2048)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(1e-3 * parameter.mean() for parameter in self.layer.parameters())


def memory() -> dict[str, Any]:
    """What training takes, and what the search has measured beside what the process held."""
    callback = AutoBatch(**room(140), max_batch_size=24, val=False)
    fit(Large(), callbacks=[callback], **RANKS)
    result, module = callback.results["train"], Large(24)
    with Ledger() as ledger:
        fit(module, limit_val_batches=0, num_sanity_val_steps=0, **RANKS)
    assert result.peak_bytes is not None
    bucket_bytes = sum(parameter.nbytes for parameter in module.parameters())
    return {"taken": ledger.peak_bytes - bucket_bytes, "measured": result.peak_bytes - result.held_bytes}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "loaders": lambda: compared(lambda size: Bare(), both),
    "manual": lambda: compared(Manual, nothing, search=NO_VAL),
    "collectives": lambda: compared(Talkative, nothing),
    "unused": lambda: compared(Partial, nothing, strategy="ddp_find_unused_parameters_true", search=NO_VAL),
    "views": lambda: compared(
        Net,
        nothing,
        strategy=partial(DDPStrategy, gradient_as_bucket_view=True, static_graph=True),
        search=NO_VAL,
    ),
    "effective": lambda: compared(Net, nothing, search={"effective_batch_size": 48}),
    "unequal": unequal,
    "uneven_data": lambda: uneven((37, 45)),
    "little_data": lambda: uneven((96, 9), val_lengths=(30, 5)),
    "no_room_for_buckets": without_room_for_buckets,
    "raises_in_the_search": lambda: failing(on_rank(0, break_down), 8),
    "raises_in_the_run": lambda: failing(on_rank(1, break_down), 8),
    "out_of_memory": lambda: failing(on_rank(1, run_out_of_memory), 9),
    "nothing_fits": lambda: failing(on_rank(1, run_out_of_memory), 1),
    "memory": memory,
    "again": lambda: compared(Net, nothing),
    "unprepared": unprepared,  # late: an error in a loader's hook leaves Lightning's patch on DataLoader
    "killed": lambda: failing(on_rank(1, die), 8),
}


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fit(Net(), **RANKS)  # loads what later limits count on
    found = {}
    for name in names:
        found[name] = CASES[name]()
        (folder / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
