"""The loaders of a Lightning trainer: which follow the batch size, and the largest batches of their data.

Everything here that is named with an underscore is Lightning's own: it has no public way to do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_setattr
from torch.utils._pytree import tree_unflatten
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.integrations.common import look_for_largest
from linnaeus.integrations.samples import Largest

PROBE = 3
"""Size with which a `*_dataloader` hook is called, to see which of its loaders follow the attribute."""

Mode = Literal["train", "val"]

_USUAL: Any = {"train": "max_size_cycle", "val": "sequential"}
"""How Lightning combines several loaders."""

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
        self._source = source_of(trainer, mode)
        self._where = f"{self._source.name}() of {type(self._source.instance).__name__}"
        self.size_before = lightning_getattr(trainer.lightning_module, name)
        self.set_size(PROBE)
        self.combined, sizes = self._request()
        fixed = [None if size == PROBE else size for size in sizes]
        self.follow = None in fixed
        self._loaders = list(zip(self.combined.flattened, fixed, strict=True))

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
            for loader, _ in self._loaders
        ]

    @property
    def most(self) -> int | None:
        """The largest size with which an epoch has a batch; None if there is no limit."""
        numbers = [self._num_samples(loader) for loader, fixed in self._loaders if fixed is None]
        known = [number for number in numbers if number is not None]
        share = self._limit if isinstance(self._limit, float) else 1
        return max(int(min(known) * share), 1) if known else None

    @property
    def loading(self) -> tuple[int, int | None, bool]:
        """The most workers of a loader, the batches that they make ahead, and whether any pins them."""
        loaders = [loader for loader, _ in self._loaders]
        most = max(loaders, key=lambda loader: loader.num_workers)
        return most.num_workers, most.prefetch_factor, any(each.pin_memory for each in loaders)

    def num_rounds(self, size: int) -> int:
        """The most batches that one of the loaders gives in an epoch; 1 where nobody knows."""
        rounds, limit = [1], self._limit
        for loader, fixed in self._loaders:
            num_batches = -(-(self._num_samples(loader) or 1) // (fixed or size))
            is_share = isinstance(limit, float)
            rounds.append(int(num_batches * limit) if is_share else min(num_batches, limit))
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
        for (_, fixed), given in zip(self._loaders, self._request()[1], strict=True):
            expected = fixed or size
            if given > expected or (given < expected and self._mode == "train"):
                raise AutoBatchError(
                    f"AutoBatch: {self._where} makes batches of {given} samples where {self._name} is {size} "
                    f"and {expected} are searched; let it use self.{self._name} as it is"
                )

    def set_size(self, size: int) -> None:
        """Set the attribute from which the loaders take their size; also what loggers write down of it."""
        module = self._trainer.lightning_module
        lightning_setattr(module, self._name, size)
        for owner in (module, self._trainer.datamodule):
            logged = getattr(owner, "_hparams_initial", {})
            logged.update({self._name: size} if self._name in logged else {})

    def _batches(self, size: int) -> Iterator[Any]:
        pairs = zip(self.looks, self._loaders, strict=True)
        return (look.batch(fixed or size) for look, (_, fixed) in pairs)

    def _num_samples(self, loader: DataLoader[Any]) -> int | None:
        """Samples of an epoch of this rank; None where nobody knows."""
        sampler: Any = loader.sampler
        divides = self._trainer._accelerator_connector.use_distributed_sampler
        is_whole = isinstance(sampler, DistributedSampler) or not divides
        num_ranks = 1 if is_whole else self._trainer.world_size
        return -(-len(sampler) // num_ranks) if hasattr(sampler, "__len__") else None

    def _request(self) -> tuple[CombinedLoader, list[int]]:
        """The loaders that the hook makes now, and their batch sizes."""
        given, usual = self._source.dataloader(), _USUAL[self._mode]
        combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given, usual)
        for loader in combined.flattened:
            is_usual = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
            if not is_usual or loader.batch_size is None:
                raise AutoBatchError(
                    f"AutoBatch: {self._where}: the batch size of this {type(loader).__name__} cannot be "
                    "set; give a DataLoader with a batch_size, and a sampler in place of a batch_sampler"
                )
        return combined, [loader.batch_size for loader in combined.flattened]


def source_of(trainer: Trainer, mode: Mode) -> Any:
    """What gives the loaders of a mode: a hook of the module or the data module, or `fit` itself."""
    loop: Any = trainer.fit_loop if mode == "train" else trainer.fit_loop.epoch_loop.val_loop
    return loop._data_source
