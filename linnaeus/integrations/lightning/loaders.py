"""The loaders of a Lightning trainer: which follow the batch size, and the largest batches of their data.

Everything here that is named with an underscore is Lightning's own: it has no public way to do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.parsing import (
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
)
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.integrations.budget import Ends, with_budget
from linnaeus.integrations.samples import Largest, copied, loading_of, shapes_in

PROBE = 3
"""Size with which a `*_dataloader` hook is called, to see which of its loaders follow the attribute."""

Mode = Literal["train", "val"]

_NUM_TRANSFERS = 8
"""Transfers of a batch whose shapes are compared."""
_REMEDY = "pass a function that makes the largest batch of n samples: make_batch="


class Loaders:
    """The loaders that a hook makes for a mode.

    Args:
        trainer: the trainer.
        mode: `train` or `val`.
        name: the attribute that the loaders' sizes follow.
        options: of the search.
        make_batch: makes a batch in the place of samples of the loaders.

    Attributes:
        size_before: the batch size that the user has given.
        follow: whether any of them follows the size.

    Raises:
        AutoBatchError: a loader whose batch size cannot be set; the message names it.
    """

    def __init__(
        self,
        trainer: Trainer,
        mode: Mode,
        name: str,
        options: Mapping[str, Any],
        make_batch: Callable[[int], Any] | None,
    ) -> None:
        self._trainer, self._mode, self._name, self._options = trainer, mode, name, options
        self._make_batch, self._limit = make_batch, getattr(trainer, f"limit_{mode}_batches")
        loop: Any = trainer.fit_loop if mode == "train" else trainer.fit_loop.epoch_loop.val_loop
        self._source, module = loop._data_source, trainer.lightning_module
        self._where = f"{self._source.name}() of {type(self._source.instance).__name__}"
        if not self._source.is_module():
            raise AutoBatchError(
                f"AutoBatch: fit was given the {mode} loaders, so their batch size cannot be set. Return "
                f"them from {self._source.name}() of {type(module).__name__} or a LightningDataModule, with "
                f"batch_size=self.{name}"
            )
        if not lightning_hasattr(module, name):
            raise AutoBatchError(
                f"AutoBatch: neither {type(module).__name__} nor its data module nor their hparams have "
                f"{name}. Let {self._source.name} take its batch size from such an attribute, or name "
                "another one with batch_arg_name"
            )
        self.size_before = lightning_getattr(module, name)
        self.set_size(PROBE)
        loop._combined_loader, sizes = combined, _ = self._request()
        self.set_size(PROBE + 1)
        pairs = list(zip(sizes, self._request()[1], strict=True))
        if wrong := {*pairs} - {(PROBE, PROBE + 1), *((size, size) for size in sizes)}:
            raise AutoBatchError(
                f"AutoBatch: {self._where} makes batches of {wrong.pop()[0]} samples where {name} is "
                f"{PROBE}; let it use self.{name} unchanged"
            )
        fixed = [None if one != other else one for one, other in pairs]
        self.follow = None in fixed
        self._loaders = list(zip(combined.flattened, fixed, strict=True))

    @cached_property
    def looks(self) -> list[Largest]:
        """Which samples of each loader make the largest batches; nothing where a function makes batches."""
        if self._make_batch is not None:
            return []
        return [
            Largest(
                loader.dataset,
                loader.collate_fn,
                remedy=_REMEDY,
                timeout_minutes=self._options["timeout_minutes"],
                device=self._trainer.strategy.root_device,
                **loading_of(loader),
            )
            for loader, _ in self._loaders
        ]

    @property
    def most(self) -> int | None:
        """The largest size with which an epoch has a batch; None if there is no limit."""
        numbers = [self._num_samples(loader) for loader, fixed in self._loaders if fixed is None]
        known = [number for number in numbers if number is not None]
        share = self._limit if isinstance(self._limit, float) else 1
        return max(int(min(known) * share), 1) if known else None

    def num_rounds(self, size: int) -> int:
        """The most batches that one of the loaders gives in an epoch; 1 if unknown."""
        rounds, limit = [1], self._limit
        for loader, fixed in self._loaders:
            num_batches = -(-(self._num_samples(loader) or 1) // (fixed or size))
            is_share = isinstance(limit, float)
            rounds.append(int(num_batches * limit) if is_share else min(num_batches, limit))
        return max(rounds)

    def batches(self, size: int) -> Iterator[tuple[Any, int]]:
        """A batch of each loader, made on request, with the number of the loader."""
        if self._make_batch is not None:
            yield self._make_batch(size), 0
        for number, (look, (_, fixed)) in enumerate(zip(self.looks, self._loaders, strict=False)):
            yield look.batch(fixed or size), number

    def check_transfer(self) -> None:
        """Refuse hooks that draw the size of a batch when it is transferred to the device.

        Raises:
            AutoBatchError: transfers of the same batch differ in shape.
        """
        transfer = self._trainer.strategy.batch_to_device
        for batch, number in self.batches(2):
            moved = (transfer(copied(batch), dataloader_idx=number) for _ in range(_NUM_TRANSFERS))
            if len(set(map(shapes_in, moved))) == 1:
                continue
            raise AutoBatchError(
                "AutoBatch: on_after_batch_transfer or another hook of the transfer gives the same batch two "
                "sizes, so the largest batch is unknown; draw the size in the collate function, and give "
                "make_batch="
            )

    def set_size(self, size: int) -> None:
        """Set the attribute from which the loaders take their size, also in the logged hyperparameters."""
        module = self._trainer.lightning_module
        lightning_setattr(module, self._name, size)
        for owner in (module, self._trainer.datamodule):
            logged = getattr(owner, "_hparams_initial", {})
            logged.update({self._name: size} if self._name in logged else {})

    def _num_samples(self, loader: DataLoader[Any]) -> int | None:
        """Samples of an epoch of this rank; None if unknown."""
        sampler: Any = loader.sampler
        divides = self._trainer._accelerator_connector.use_distributed_sampler
        is_whole = isinstance(sampler, DistributedSampler) or not divides
        num_ranks = 1 if is_whole else self._trainer.world_size
        return -(-len(sampler) // num_ranks) if hasattr(sampler, "__len__") else None

    def _request(self) -> tuple[CombinedLoader, list[int]]:
        """The loaders that the hook makes now, and their batch sizes."""
        given: Any = self._source.dataloader()
        is_list = self._mode == "val" and isinstance(given, list | tuple)
        for loader in given if is_list else [given]:
            is_usual = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
            if not is_usual or loader.batch_size is None:
                raise AutoBatchError(
                    f"AutoBatch: {self._where}: the batch size of this {type(loader).__name__} cannot be "
                    "set. Return one DataLoader, or a list of them for validation, with a batch_size, and a "
                    "sampler instead of a batch_sampler"
                )
        combined = CombinedLoader(given, "sequential")
        return combined, [loader.batch_size for loader in combined.flattened]


class _OwnShare:
    """A loader of this rank's batches, which is no `DataLoader`: Lightning would divide that once more."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self.sampler = loader, loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader  # draws when it is read: Lightning calls `iter` once more, as a check

    def __len__(self) -> int:
        return len(self._loader)


def train_within(trainer: Trainer, ends: Ends, budget: int) -> None:
    """Let this `fit` train on its loader with batches within a budget."""
    source: Any = trainer.fit_loop._data_source
    ranks = {"num_replicas": trainer.world_size, "rank": trainer.global_rank}
    source.instance = _OwnShare(with_budget(source.dataloader(), ends, budget, **ranks))
