"""Cases of the Lightning callback on two ranks, for `tests.helpers.processes`."""

import os
import warnings

import torch
import torch.distributed as torch_dist
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from linnaeus.integrations.lightning import AutoBatch
from tests.helpers.bits import differences
from tests.helpers.ledger import room
from tests.integrations.lightning_runs import COSTS, Bare, Made, Net, Single, data, fit, nothing

RANK = 0
NO_VAL = {"val": False}
RANKS = {"devices": 2, "strategy": "ddp"}


class Talkative(Net):
    """Each step has collectives: of logging, of a metric, of a gather, and one of its own."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.log("accuracy", self.accuracy.compute())
        gathered = self.all_gather(self.net[0](batch[0]), sync_grads=True)
        assert len(gathered) == self.trainer.world_size
        total = loss.detach().clone()
        torch_dist.all_reduce(total)
        return loss + 0.1 * gathered.mean() + 0 * total

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


def compared(module, given, **options):
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
        float(tensor.double().sum())
        for name, tensor in searched["weights"].items()
        if "running" not in name
    ]  # each rank's statistics are its own
    return {
        "size": size,
        "sizes": searched["sizes"],
        "accumulate": searched["accumulate"],
        "differences": differences(searched, by_hand),
        "limited_by": callback.results["train"].limited_by,
        "ran_on_every_rank": callback.results["train"].ran_on_every_rank,
        "weights": weights,
    }


def failing(module):
    """The error of a search."""
    try:
        fit(module(), callbacks=[AutoBatch(max_batch_size=12, val=False)], **RANKS)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


class NoData(Net):
    """Rank 1 cannot make its loaders."""

    def train_dataloader(self):
        if RANK == 1:
            raise ZeroDivisionError("sample")
        return super().train_dataloader()

    def configure_optimizers(
        self,
    ):  # estimated_stepping_batches has a barrier of Lightning's own
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def unequal():
    return compared(
        lambda size: Net(size, mib=1.0),
        nothing,
        search={**room(120 if RANK == 0 else 60), "max_batch_size": 90, "val": False},
    )


def uneven_data():
    """Each rank has data of its own, of another length."""
    length = (37, 8)[RANK]
    return compared(
        lambda size: Bare(),
        lambda size: (Made(lambda own_size: DataLoader(data(length), own_size), size),),
        search=NO_VAL,
        use_distributed_sampler=False,
        limit_train_batches=1,
    )


def budget():
    """The budget, and the batches of two epochs."""
    callback = AutoBatch(cost=COSTS, max_batch_size=9)
    found = fit(Single(), callbacks=[callback], **RANKS)
    return callback.batch_size, found["sizes"]


CASES = {
    "budget": budget,
    "loaders": lambda: compared(Net, nothing),
    "collectives": lambda: compared(Talkative, nothing, search={"effective_batch_size": 48}),
    "unequal": unequal,
    "uneven_data": uneven_data,
    "unprepared": lambda: failing(NoData),
}


def work(rank, folder):
    """What each case gives."""
    global RANK
    RANK = rank
    own = {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= own
    warnings.simplefilter("ignore")
    fit(Net(), **RANKS)  # loads what later limits count on
    return {name: case() for name, case in CASES.items()}
