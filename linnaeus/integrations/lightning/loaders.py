"""The loaders of a Lightning trainer: which follow the batch size, and the largest batches of their data.

Everything here that is named with an underscore is Lightning's own: it has no public way to do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.integrations.common import look_for_largest
from linnaeus.integrations.samples import Largest

PROBE = 3
"""Size with which a `*_dataloader` hook is called, to see which of its loaders follow the attribute."""

Mode = Literal["train", "val"]

_REMEDY = "give a function that makes the worst batch of n samples: make_batch=, or make_val_batch="


class Loaders:
    """The loaders that a hook makes for a mode, in the structure in which Lightning takes their batches.

    Args:
        trainer: the trainer.
        mode: `train` or `val`.
        name: the attribute that the loaders' sizes follow.
        options: of the search.
        make_batch: makes a batch in the place of samples of the loaders.

    Attributes:
        combined: the loaders.
        size_before: the batch size that the user has given.

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
        self._trainer, self._mode, self._options = trainer, mode, options
        self._make_batch, self._limit = make_batch, getattr(trainer, f"limit_{mode}_batches")
        self._source = source_of(trainer, mode)
        self._where = f"{self._source.name}() of {type(self._source.instance).__name__}"
        self._name, self._holders = name, holders(trainer, name)
        first = self._holders[0]
        self.size_before = first[name] if isinstance(first, dict) else getattr(first, name)
        self.set_size(PROBE)
        self.combined = self._request()
        self._loaders: list[DataLoader[Any]] = self.combined.flattened
        self._fixed = [None if size == PROBE else size for size in self._sizes(self.combined)]

    @property
    def follow(self) -> bool:
        """Whether any of them follows the size."""
        return None in self._fixed

    @cached_property
    def looks(self) -> list[Largest]:
        """Which samples of each loader make the largest batches; nothing where a function makes batches."""
        if self._make_batch is not None:
            return []
        names = ("num_workers", "multiprocessing_context", "worker_init_fn")
        return [
            look_for_largest(
                loader.dataset,
                loader.collate_fn,
                self._options,
                self._trainer.strategy.root_device,
                remedy=_REMEDY,
                **{name: getattr(loader, name) for name in names},
            )
            for loader in self._loaders
        ]

    @property
    def most(self) -> int | None:
        """The largest size with which an epoch has a batch; None if there is no limit."""
        numbers = map(self._num_samples, self._loaders)
        limits = [
            number
            for number, fixed in zip(numbers, self._fixed, strict=True)
            if number is not None and fixed is None
        ]
        share = self._limit if isinstance(self._limit, float) else 1
        return max(int(min(limits) * share), 1) if limits else None

    @property
    def loading(self) -> tuple[int, int | None, bool]:
        """The most workers of a loader, the batches that they make ahead, and whether any pins them."""
        most = max(self._loaders, key=lambda loader: loader.num_workers)
        is_pinned = any(loader.pin_memory for loader in self._loaders)
        return most.num_workers, most.prefetch_factor, is_pinned

    def num_rounds(self, size: int) -> int:
        """The most batches that one of the loaders gives in an epoch; 1 where nobody knows."""
        limit, rounds = self._limit, [1]
        for loader, fixed in zip(self._loaders, self._fixed, strict=True):
            if (num_samples := self._num_samples(loader)) is not None:
                num_batches = -(-num_samples // (fixed or size))
                share = int(num_batches * limit) if isinstance(limit, float) else limit
                rounds.append(min(num_batches, share))
        return max(rounds)

    def batch(self, size: int) -> Any:
        """What the loaders of a step give together: one batch, or the user's structure of them."""
        if self._make_batch is not None:
            return self._make_batch(size)
        return tree_unflatten(list(self._batches(size)), self.combined._spec)

    def numbered_batches(self, size: int) -> Iterator[tuple[Any, int]]:
        """Batches of validation, made when they are asked for, each with the number of its loader."""
        if self._make_batch is not None or self.combined._mode != "sequential":
            yield self.batch(size), 0
        else:
            yield from ((batch, number) for number, batch in enumerate(self._batches(size)))

    def check(self, size: int) -> None:
        """Check that the loaders have, at this size, the sizes that were measured; validation, or smaller.

        Raises:
            AutoBatchError: one has another size: the hook divides, limits or rounds what it takes.
        """
        self.set_size(size)
        for fixed, given in zip(self._fixed, self._sizes(self._request()), strict=True):
            expected = fixed or size
            if given > expected or (given < expected and self._mode == "train"):
                raise AutoBatchError(
                    f"AutoBatch: {self._where} makes batches of {given} samples where {self._name} is {size} "
                    f"and {expected} are searched; let it use self.{self._name} as it is"
                )

    def set_size(self, size: int) -> None:
        """Set the attribute from which the loaders take their size."""
        for holder in self._holders:
            if isinstance(holder, dict):
                holder[self._name] = size
            else:
                setattr(holder, self._name, size)

    def _batches(self, size: int) -> Iterator[Any]:
        return (
            look.batch(fixed or size) for look, fixed in zip(self.looks, self._fixed, strict=True)
        )

    def _num_samples(self, loader: DataLoader[Any]) -> int | None:
        """Samples of an epoch of this rank; None where nobody knows."""
        sampler: Any = loader.sampler
        if isinstance(loader.dataset, IterableDataset) or not hasattr(sampler, "__len__"):
            return None
        connector = self._trainer._accelerator_connector
        is_divided = connector.is_distributed and connector.use_distributed_sampler
        is_whole = not is_divided or isinstance(sampler, DistributedSampler)
        return -(-len(sampler) // (1 if is_whole else self._trainer.world_size))

    def _request(self) -> CombinedLoader:
        given = self._source.dataloader()
        usual: Any = "max_size_cycle" if self._mode == "train" else "sequential"
        return given if isinstance(given, CombinedLoader) else CombinedLoader(given, usual)

    def _sizes(self, combined: CombinedLoader) -> list[int]:
        for loader in combined.flattened:
            is_usual = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
            if not is_usual or loader.batch_size is None:
                raise AutoBatchError(
                    f"AutoBatch: {self._where}: the batch size of this {type(loader).__name__} cannot be "
                    "set; give a DataLoader with a batch_size, and a sampler in place of a batch_sampler"
                )
        return [loader.batch_size for loader in combined.flattened]


def source_of(trainer: Trainer, mode: Mode) -> Any:
    """What gives the loaders of a mode: a hook of the module or the data module, or `fit` itself."""
    loop: Any = trainer.fit_loop if mode == "train" else trainer.fit_loop.epoch_loop.val_loop
    return loop._data_source


def holders(trainer: Any, name: str) -> list[Any]:
    """The module, the data module, and their hyperparameters, as far as they have the attribute."""
    found: list[Any] = []
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and hasattr(owner, name):
            found.append(owner)
        hyperparameters = (getattr(owner, each, None) for each in ("_hparams", "_hparams_initial"))
        found += [each for each in hyperparameters if each is not None and name in each]
    return found
