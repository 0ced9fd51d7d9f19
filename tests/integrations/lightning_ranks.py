"""Cases of the Lightning callback on two ranks, for `tests.helpers.processes`."""

import os
import warnings

import torch
import torch.distributed as torch_dist
from lightning.pytorch import seed_everything

from linnaeus.integrations.lightning import AutoBatch
from tests.helpers.ledger import room
from tests.integrations.lightning_runs import (
    COSTS,
    Bare,
    Made,
    Net,
    Single,
    compared,
    fit,
    loader,
)

RANK = 0
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


def found_by_both(module, search, **options):
    """What a rank finds, and what differs from the run with that size by hand."""
    seed_everything(1, verbose=False)
    callback, searched, differing = compared(module, search, max_epochs=1, **RANKS, **options)
    weights = searched["weights"].items()
    return {
        "size": callback.batch_size,
        "sizes": searched["sizes"],
        "accumulate": searched["accumulate"],
        "differences": differing,
        "limited_by": callback.results["train"].limited_by,
        # Each rank's statistics are its own.
        "weights": [tensor.tolist() for name, tensor in weights if "running" not in name],
    }


class NoData(Net):
    """Rank 1 cannot make its loaders."""

    def train_dataloader(self):
        if RANK == 1:
            raise ZeroDivisionError("sample")
        return super().train_dataloader()

    def configure_optimizers(self):  # estimated_stepping_batches has a barrier of Lightning's own
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def unprepared():
    """The error of a search."""
    try:
        fit(NoData(), callbacks=[AutoBatch(max_batch_size=12, val=False)], **RANKS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def uneven_data():
    """Each rank has data of its own, of another length."""
    length = (37, 8)[RANK]
    return found_by_both(
        lambda size: Bare(),
        {"max_batch_size": 12, "val": False},
        given=lambda size, *_: Made(lambda size: loader(size, length), size),
        use_distributed_sampler=False,
        limit_train_batches=1,
    )


def budget():
    """The budget, and the batches of two epochs."""
    callback = AutoBatch(cost=COSTS, max_batch_size=9)
    found = fit(Single(), callbacks=[callback], **RANKS)
    return callback.batch_size, found["sizes"]


def work(rank, folder):
    """What each case gives."""
    global RANK
    RANK = rank
    own = {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= own
    warnings.simplefilter("ignore")
    fit(Net(), **RANKS)  # loads what later limits count on
    return {
        "budget": budget(),
        "collectives": found_by_both(Talkative, {"max_batch_size": 12, "effective_batch_size": 48}),
        "unequal": found_by_both(
            lambda size: Net(size, mib=1.0),
            room(120 if rank == 0 else 60, max_batch_size=90, val=False),
        ),
        "uneven_data": uneven_data(),
        "unprepared": unprepared(),
    }
