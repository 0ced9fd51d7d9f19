"""The loaders of a Lightning trainer: which follow the batch size, their batches, and new loaders.

Everything here that is named with an underscore is Lightning's own: it has no public way to do the same.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import count, islice
from typing import Any, Literal

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from linnaeus.autobatch import nest
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.state.rng import restore_of_generator
from linnaeus.integrations.common import look_for_largest
from linnaeus.integrations.samples import PROBED, Largest, copied

PROBE = 3
"""Size with which a `*_dataloader` hook is called, to see which of its loaders follow the attribute."""

Mode = Literal["train", "val"]

_REMEDY = "give a function that makes the worst batch of n samples: make_batch=, or make_val_batch="


def library(trainer: Any, name: str) -> Any:
    """A module, such as `utilities.data`, of the trainer's `lightning.pytorch` or `pytorch_lightning`."""
    roots = ("lightning.pytorch", "pytorch_lightning")
    homes = " ".join(base.__module__ for base in type(trainer).__mro__)
    return importlib.import_module(
        f"{next(root for root in roots if f'{root}.trainer' in homes)}.{name}"
    )


class SizedLoader:
    """One loader.

    Args:
        loader: batches samples of a dataset.
        options: of the search.
        follows: whether it takes the size searched; else it has its own.
        searches_cpu: whether the memory searched is that of the host, in which samples are loaded.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        options: Mapping[str, Any],
        *,
        follows: bool,
        searches_cpu: bool,
    ) -> None:
        self.loader = loader
        self.follows = follows
        self._options = options
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self._is_fresh = searches_cpu and loader.num_workers == 0 and not self._is_iterable
        self._held: dict[int, Any] = {}

    def batch(self, size: int) -> Any:
        """A batch of real samples, made as the loader makes it: of the largest where they differ in size."""
        indices = self.prepare(size)
        if self._is_fresh:  # on the host, what the loader reads for each batch counts
            return self.loader.collate_fn([self._source[index] for index in indices])
        return self.loader.collate_fn([copied(self._held[index]) for index in indices])

    def prepare(self, size: int) -> list[int]:
        """Read the samples of a batch, unless each batch reads its own; gives their indices."""
        indices = self.look.indices(self.count(size))
        if not self._is_fresh:
            self._held |= {index: self._source[index] for index in {*indices} - {*self._held}}
        return indices

    def count(self, size: int) -> int:
        """Samples of a batch where the size searched is this."""
        return size if self.follows else self.loader.batch_size or 1

    @cached_property
    def look(self) -> Largest:
        """Which samples make the largest batches."""
        loader, loading = self.loader, dict[str, Any]()
        if loader.num_workers and not self._is_iterable:
            names = ("num_workers", "multiprocessing_context", "worker_init_fn")
            loading = {name: getattr(loader, name) for name in names}
        look = look_for_largest(
            self._source, loader.collate_fn, self._options, remedy=_REMEDY, **loading
        )
        if self._is_iterable and not look.are_alike:
            raise self._refusal(
                "has samples that differ in size, the largest of which nobody knows"
            )
        return look

    @cached_property
    def _source(self) -> Any:
        """What samples are read from by index: the dataset, or the first samples of a stream."""
        dataset: Any = self.loader.dataset
        if not self._is_iterable:
            if not hasattr(dataset, "__len__"):
                raise self._refusal("has no length")
            return dataset
        held = getattr(dataset, "__dict__", {}).values()
        mapped = {id(each): each for each in held if nest.is_array(each) and nest.is_mapped(each)}
        try:  # a copy, so that training still gets what trials read
            with contextlib.suppress(
                RuntimeError
            ):  # one of Hugging Face fills a cache that it iterates over
                copy.deepcopy(dataset, {**mapped})
            stream = copy.deepcopy(dataset, {**mapped})
        except Exception as error:
            raise self._refusal(f"cannot be copied ({error})") from None
        return list(islice(stream, PROBED))

    def _refusal(self, why: str) -> AutoBatchError:
        return AutoBatchError(
            f"AutoBatch: the dataset {type(self.loader.dataset).__name__} {why}; {_REMEDY}"
        )


class Loaders:
    """All loaders of a mode, in the structure in which Lightning takes their batches.

    Args:
        trainer: the trainer.
        mode: `train` or `val`.
        name: the attribute that the loaders' sizes follow, unless they were handed to `fit`.
        options: of the search.

    Attributes:
        size_before: the batch size that the user has given; None where there is none.

    Raises:
        AutoBatchError: a loader whose batch size cannot be set; the message names it.
    """

    def __init__(self, trainer: Any, mode: Mode, name: str, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._mode = mode
        self._name = name
        loop = trainer.fit_loop if mode == "train" else trainer.fit_loop.epoch_loop.val_loop
        self.source = loop._data_source
        self._is_given = not self.source.is_module()
        self._where = f"{self.source.name}() of {type(self.source.instance).__name__}"
        if self._is_given:
            self._where = f"the {mode} loaders handed to fit"
        held = [
            holder[name] if isinstance(holder, dict) else getattr(holder, name)
            for holder in holders(trainer, name)
        ]
        self.set_size(PROBE)
        self.combined = self._request()
        sizes = self._sizes(self.combined)
        self.size_before = next(iter(sizes if self._is_given else held), None)
        if self._is_given and len(set(sizes)) > 1:
            raise AutoBatchError(
                f"AutoBatch: {self._where} have different batch sizes, {sizes}. Return them from a "
                f"{self.source.name} hook that makes them from self.{name}"
            )
        searches_cpu = trainer.strategy.root_device.type == "cpu"
        self.sized = [
            SizedLoader(
                loader,
                options,
                follows=self._is_given or size == PROBE,
                searches_cpu=searches_cpu,
            )
            for loader, size in zip(self.combined.flattened, sizes, strict=True)
        ]
        self.check(PROBE + 1, may_be_smaller=False)

    @property
    def follow(self) -> bool:
        """Whether any of them follows the size."""
        return any(sized.follows for sized in self.sized)

    @property
    def num_batches(self) -> int:
        """The fewest batches of an epoch with which Lightning's limits leave one, and validation its turn."""
        trainer, needed = self._trainer, 1
        limit = trainer.limit_train_batches if self._mode == "train" else trainer.limit_val_batches
        if self._mode == "train" and trainer.limit_val_batches and trainer.check_val_every_n_epoch:
            needed = (
                trainer.val_check_interval if isinstance(trainer.val_check_interval, int) else 1
            )
        if not isinstance(limit, float):
            return needed
        # Lightning rounds this share of the batches down.
        return next(number for number in count(needed) if int(number * limit) >= needed)

    @property
    def most(self) -> int | None:
        """The largest size with a full batch and `num_batches` of them; None if there is no limit."""
        needed = self.num_batches
        limits = []
        for sized in self.sized:
            if sized.follows and (num_samples := self._num_samples(sized)) is not None:
                most = num_samples // needed
                if needed > 1 and not sized.loader.drop_last:
                    most = (num_samples - 1) // (needed - 1)
                limits.append(max(most, 1))
        return min(limits, default=None)

    @property
    def loading(self) -> tuple[int, int | None, bool]:
        """The most workers of a loader, the batches that they make ahead, and whether any pins them."""
        loaders = [sized.loader for sized in self.sized]
        most = max(loaders, key=lambda loader: loader.num_workers)
        return most.num_workers, most.prefetch_factor, any(each.pin_memory for each in loaders)

    def num_rounds(self, size: int) -> int:
        """The most batches that one of the loaders of validation gives; 1 where nobody knows."""
        limit, rounds = self._trainer.limit_val_batches, [1]
        for sized in self.sized:
            if (num_samples := self._num_samples(sized)) is not None:
                num_batches = -(-num_samples // sized.count(size))
                share = int(num_batches * limit) if isinstance(limit, float) else limit
                rounds.append(min(num_batches, share))
        return max(rounds)

    def prepare(self, largest: int) -> None:
        """Read the samples of trials up to a size, whose memory is no part of any."""
        for sized in self.sized:
            sized.prepare(min(largest, self.most or PROBED))

    def batch(self, size: int) -> Any:
        """What the loaders of a training step give together: one batch, or the user's structure of them."""
        unflatten = library(self._trainer, "utilities.combined_loader").tree_unflatten
        return unflatten([sized.batch(size) for sized in self.sized], self.combined._spec)

    def numbered_batches(self, size: int) -> Iterator[tuple[Any, int]]:
        """Batches of validation, made when they are asked for, each with the number of its loader."""
        if self.combined._mode != "sequential":
            yield self.batch(size), 0
            return
        for number, sized in enumerate(self.sized):
            yield sized.batch(size), number

    def check(self, size: int, *, may_be_smaller: bool) -> None:
        """Check that loaders made by a hook have, at this size, the sizes that are measured.

        Args:
            size: of the attribute.
            may_be_smaller: whether a loader may have fewer samples than are measured.

        Raises:
            AutoBatchError: one has another size: the hook divides, limits or rounds what it takes.
        """
        if self._is_given:
            return
        self.set_size(size)
        for sized, given in zip(self.sized, self._sizes(self._request()), strict=True):
            expected = size if sized.follows else sized.loader.batch_size or 0
            if given != expected and not (may_be_smaller and given < expected):
                raise AutoBatchError(
                    f"AutoBatch: {self._where} gives a loader of batch size {given} where {self._name} is "
                    f"{size}, and of {sized.loader.batch_size} where it is {PROBE}: that is neither the size "
                    "itself nor fixed. Take the size as it is, and limit the search instead, such as with "
                    "max_batch_size"
                )

    def set_size(self, size: int) -> None:
        """Set the attribute wherever it is; also in the hyperparameters that loggers write down.

        Raises:
            AutoBatchError: it cannot be set.
        """
        for holder in holders(self._trainer, self._name):
            if isinstance(holder, dict):
                holder[self._name] = size
                continue
            try:
                setattr(holder, self._name, size)
            except AttributeError as error:
                raise AutoBatchError(
                    f"AutoBatch: {self._name} of {type(holder).__name__} cannot be set ({error}); make it an "
                    "attribute"
                ) from None

    def apply(self, size: int) -> None:
        """Set the attribute, and put new loaders of this size in the place of those handed to `fit`."""
        self.set_size(size)
        if not self._is_given:
            return
        data = library(self._trainer, "utilities.data")
        loaders = []
        for sized in self.sized:
            args, kwargs = data._get_dataloader_init_args_and_kwargs(
                sized.loader, sized.loader.sampler
            )
            loaders.append(
                data._reinstantiate_wrapped_cls(
                    sized.loader, *args, **{**kwargs, "batch_size": size}
                )
            )
        combined = copy.copy(self.combined)
        combined.flattened = loaders
        is_combined = isinstance(self.source.instance, type(self.combined))
        self.source.instance = combined if is_combined else combined.iterables

    def _num_samples(self, sized: SizedLoader) -> int | None:
        """Samples of an epoch of this rank; None where nobody knows."""
        sampler: Any = sized.loader.sampler
        connector = self._trainer._accelerator_connector
        is_endless = isinstance(sized.loader.dataset, IterableDataset) or not hasattr(
            sampler, "__len__"
        )
        if is_endless:
            return None
        is_divided = connector.is_distributed and connector.use_distributed_sampler
        is_whole = not is_divided or isinstance(sampler, DistributedSampler)
        return -(-len(sampler) // (1 if is_whole else int(self._trainer.world_size)))

    def _request(self) -> Any:
        given = library(self._trainer, "trainer.connectors.data_connector")._request_dataloader(
            self.source
        )
        kind = library(self._trainer, "utilities.combined_loader").CombinedLoader
        usual = "max_size_cycle" if self._mode == "train" else "sequential"
        return given if isinstance(given, kind) else kind(given, usual)

    def _sizes(self, combined: Any) -> list[int]:
        for loader in combined.flattened:
            is_usual = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
            if not is_usual or loader.batch_size is None:
                raise AutoBatchError(
                    f"AutoBatch: {self._where}: the batch size of this {type(loader).__name__} cannot be "
                    "set; give a DataLoader with a batch_size, and a sampler in place of a batch_sampler"
                )
        return [loader.batch_size for loader in combined.flattened]


def holders(trainer: Any, name: str) -> list[Any]:
    """The module, the data module, and their hyperparameters, as far as they have the attribute."""
    found: list[Any] = []
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and hasattr(owner, name):
            found.append(owner)
        hyperparameters = (getattr(owner, each, None) for each in ("_hparams", "_hparams_initial"))
        found += [each for each in hyperparameters if each is not None and name in each]
    return found


_LONG = 1000
_PLAIN = (bool, int, float, str, bytes, type(None))
_OTHERS = ("_modules", "_parameters", "_buffers", "_iterator", "_trainer", "trainer")


def restores_of_data(roots: Iterable[Any]) -> Iterator[Callable[[], object]]:
    """Put back random number generators and plain values that datasets, samplers and loaders hold.

    Tensors, arrays and containers of `_LONG` entries and more are data, and are not looked into.

    Args:
        roots: the objects to begin with; what their attributes and containers hold is looked into as well.
    """
    seen, waiting = set[int](), list(roots)
    for value in waiting:
        if id(value) in seen or isinstance(value, _PLAIN):
            continue
        seen.add(id(value))
        if restore := restore_of_generator(value):
            yield restore
        elif isinstance(value, list | tuple | set):
            waiting += value if len(value) < _LONG else ()
        elif (content := _attributes_or_items(value)) is not None and len(content) < _LONG:
            plain = {name: held for name, held in content.items() if isinstance(held, _PLAIN)}
            yield partial(_put_back, content, set(content), plain)
            waiting += [held for name, held in content.items() if name not in _OTHERS]


def _attributes_or_items(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, type) or type(value).__module__ == "builtins":  # functions, modules
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _put_back(content: dict[Any, Any], names: set[Any], plain: dict[Any, Any]) -> None:
    for name in [
        name for name, held in content.items() if name not in names and isinstance(held, _PLAIN)
    ]:
        del content[name]
    content.update(plain)
