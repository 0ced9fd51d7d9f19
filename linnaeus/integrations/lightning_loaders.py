"""The loaders of a Lightning trainer: which follow the batch size, their batches, and new loaders.

Everything here that is named with an underscore is Lightning's own: it has no public way to do the same.
"""

from __future__ import annotations

import copy
import importlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.lengths import PROBED, largest_first, stored_lengths
from linnaeus.autobatch.rng import restore_of_generator

PROBE = 3
"""Size with which a `*_dataloader` hook is called, to see which of its loaders follow the attribute."""
MAX_OBJECTS = 10_000
"""Objects in which generators and counters are looked for; a warning says that there are more."""

_LONG = 1000
_PLAIN = (bool, int, float, str, bytes, type(None))

logger = logging.getLogger("linnaeus.autobatch")


class Library:
    """Modules of the package that a trainer comes from: `lightning.pytorch` or `pytorch_lightning`."""

    def __init__(self, trainer: Any) -> None:
        suffix = ".trainer.trainer"
        homes = (base.__module__ for base in type(trainer).__mro__)
        self._root = next(home.removesuffix(suffix) for home in homes if home.endswith(suffix))

    def __call__(self, name: str) -> Any:
        """The module of this name, such as `utilities.data`."""
        return importlib.import_module(f"{self._root}.{name}")


class SizedLoader:
    """One loader.

    Args:
        loader: batches samples of a dataset.
        follows: whether it takes the size searched; else it has its own.
        searches_cpu: whether the memory searched is that of the host, in which samples are loaded.
    """

    def __init__(self, loader: DataLoader[Any], *, follows: bool, searches_cpu: bool) -> None:
        self.loader = loader
        self.follows = follows
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self._is_fresh = searches_cpu and loader.num_workers == 0 and not self._is_iterable
        self._samples: list[Any] = []

    def num_samples(self, num_ranks: int) -> int | None:
        """Samples of an epoch of this rank, where they limit the size; else None.

        Args:
            num_ranks: the ranks that Lightning divides the samples among.
        """
        if not self.follows or self._is_iterable:
            return None
        sampler: Any = self.loader.sampler
        dataset: Any = self.loader.dataset
        num_samples = len(sampler) if hasattr(sampler, "__len__") else len(dataset)
        return num_samples if isinstance(sampler, DistributedSampler) else -(-num_samples // num_ranks)

    def batch(self, size: int) -> Any:
        """A batch of real samples, made as the loader makes it: of the largest where they differ in size."""
        count = size if self.follows else self.loader.batch_size
        assert count is not None
        if self._is_fresh:
            return self.loader.collate_fn(self._fetched(count))
        self.look()
        if not self._is_iterable and len(self._samples) < min(count, len(self._order)):
            self._samples = self._fetched(min(count, len(self._order)))
        # Shallow copies: a collate function may take items out of its samples.
        return self.loader.collate_fn([copy.copy(each) for each in islice(cycle(self._samples), count)])

    def look(self) -> None:
        """Look at the samples, before trials whose memory this is no part of."""
        if not self._is_iterable:
            self._order  # noqa: B018
        elif not self._samples:
            self._samples = self._streamed()

    @cached_property
    def _order(self) -> Sequence[int]:
        """Positions of samples that batches are made of: the largest first, where they differ in size."""
        num_samples = len(self._readable)
        if not num_samples:
            raise AutoBatchError("AutoBatch: a loader has no samples")
        order = largest_first(self._readable, self.loader.collate_fn, stored_lengths(self._readable))
        if order is not None:
            return order  # type: ignore[return-value]
        step = 1 if self._is_fresh else max(num_samples // PROBED, 1)  # any will do
        return range(0, num_samples, step)[: num_samples if self._is_fresh else PROBED]

    def _fetched(self, count: int) -> list[Any]:
        return list(self._readable.__getitems__([*islice(cycle(self._order[:count]), count)]))

    @cached_property
    def _readable(self) -> Subset[Any]:
        """The dataset by position; by what the sampler gives, which need not be numbers, if it is unknown."""
        sampler: Any = self.loader.sampler
        dataset: Any = self.loader.dataset
        usual: Any = RandomSampler | SequentialSampler | WeightedRandomSampler | DistributedSampler
        if isinstance(sampler, usual):
            return Subset(dataset, range(len(dataset)))
        count = len(sampler) if hasattr(sampler, "__len__") else PROBED
        return Subset(dataset, list(islice(sampler, count)))

    def _streamed(self) -> list[Any]:
        kind = type(self.loader.dataset).__name__
        remedy = "Give a function that makes the worst batch of n samples: AutoBatch(make_batch=...)"
        try:
            try:
                dataset = copy.deepcopy(self.loader.dataset)  # training still gets what trials read
            except RuntimeError:  # the first copy of one of Hugging Face fills a cache that it iterates over
                dataset = copy.deepcopy(self.loader.dataset)
        except Exception as error:
            raise AutoBatchError(
                f"AutoBatch: the iterable dataset {kind} cannot be copied ({error}), and reading from it "
                f"would take samples from training. {remedy}"
            ) from None
        samples = list(islice(iter(dataset), PROBED))
        if not samples:
            raise AutoBatchError(f"AutoBatch: the iterable dataset {kind} has no samples")
        if largest_first(samples, self.loader.collate_fn) is not None:
            raise AutoBatchError(
                f"AutoBatch: samples of the iterable dataset {kind} differ in size, and its largest are not "
                f"known before its end. {remedy} (make_val_batch in validation)"
            )
        return samples


class Loaders:
    """All loaders of a mode, in the structure in which Lightning takes their batches.

    Args:
        library: the trainer's package.
        trainer: the trainer.
        mode: `train` or `val`.
        set_size: sets the attribute that the loaders' sizes follow; None for loaders handed to `fit`.
        name: the attribute's name, for messages.

    Raises:
        AutoBatchError: a loader whose batch size cannot be set; the message names it.
    """

    def __init__(
        self, library: Library, trainer: Any, mode: str, set_size: Callable[[int], object] | None, name: str
    ) -> None:
        self._library = library
        self._trainer = trainer
        self._mode = mode
        self._set_size = set_size
        self._name = name
        loop = trainer.fit_loop if mode == "train" else trainer.fit_loop.epoch_loop.val_loop
        self.source = loop._data_source
        self._where = f"{self.source.name}() of {type(self.source.instance).__name__}"
        if set_size is None:
            self._where = f"the {mode} loaders handed to fit"
        else:
            set_size(PROBE)
        self.combined = self._request()
        sizes = self._sizes(self.combined)
        if set_size is None and len(set(sizes)) > 1:
            raise AutoBatchError(
                f"AutoBatch: {self._where} have different batch sizes, {sizes}. Return them from a "
                f"{self.source.name} hook that makes them from self.{name}"
            )
        searches_cpu = trainer.strategy.root_device.type == "cpu"
        self.sized = [
            SizedLoader(loader, follows=set_size is None or size == PROBE, searches_cpu=searches_cpu)
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
            needed = trainer.val_check_interval if isinstance(trainer.val_check_interval, int) else 1
        if not isinstance(limit, float):
            return needed
        fewest = math.floor(needed / limit)  # Lightning rounds this share of the batches down
        return next(number for number in range(fewest, fewest + 3) if int(number * limit) >= needed)

    @property
    def most(self) -> int | None:
        """The largest size with a full batch and `num_batches` of them; None if there is no limit."""
        needed = self.num_batches
        limits = []
        for sized in self.sized:
            if (num_samples := self._num_samples(sized)) is not None:
                most = num_samples // needed
                if needed > 1 and not sized.loader.drop_last:
                    most = (num_samples - 1) // (needed - 1)
                limits.append(max(most, 1))
        return min(limits, default=None)

    def leaves_one(self, size: int) -> bool:
        """Whether the last batch of an epoch has a single sample."""
        rests = (self._num_samples(sized) for sized in self.sized if not sized.loader.drop_last)
        return size > 1 and any(rest is not None and rest % size == 1 for rest in rests)

    def batch(self, size: int) -> Any:
        """What the loaders of a training step give together: one batch, or the user's structure of them."""
        unflatten = self._library("utilities.combined_loader").tree_unflatten
        return unflatten([sized.batch(size) for sized in self.sized], self.combined._spec)

    def check(self, size: int, *, may_be_smaller: bool) -> None:
        """Check that loaders made by a hook have, at this size, the sizes that are measured.

        Args:
            size: of the attribute.
            may_be_smaller: whether a loader may have fewer samples than are measured.

        Raises:
            AutoBatchError: one has another size: the hook divides, limits or rounds what it takes.
        """
        if self._set_size is None:
            return
        self._set_size(size)
        for sized, given in zip(self.sized, self._sizes(self._request()), strict=True):
            expected = size if sized.follows else sized.loader.batch_size or 0
            if given == expected or (may_be_smaller and given < expected):
                continue
            raise AutoBatchError(
                f"AutoBatch: {self._where} gives a loader of batch size {given} where {self._name} is "
                f"{size}, and of {sized.loader.batch_size} where it is {PROBE}: that is neither the size "
                "itself nor fixed. Take the size as it is, and limit the search instead, such as with "
                "max_batch_size"
            )

    def rebuilt(self, size: int) -> Any:
        """The loaders handed to `fit`, with this size and else the same, in their structure."""
        data = self._library("utilities.data")
        loaders = []
        for sized in self.sized:
            args, kwargs = data._get_dataloader_init_args_and_kwargs(sized.loader, sized.loader.sampler)
            loaders.append(
                data._reinstantiate_wrapped_cls(sized.loader, *args, **{**kwargs, "batch_size": size})
            )
        combined = copy.copy(self.combined)
        combined.flattened = loaders
        is_combined = isinstance(self.source.instance, type(self.combined))
        return combined if is_combined else combined.iterables

    def _num_samples(self, sized: SizedLoader) -> int | None:
        connector = self._trainer._accelerator_connector
        is_divided = connector.is_distributed and connector.use_distributed_sampler
        return sized.num_samples(int(self._trainer.world_size) if is_divided else 1)

    def _request(self) -> Any:
        given = self._library("trainer.connectors.data_connector")._request_dataloader(self.source)
        kind = self._library("utilities.combined_loader").CombinedLoader
        usual = "max_size_cycle" if self._mode == "train" else "sequential"
        return given if isinstance(given, kind) else kind(given, usual)

    def _sizes(self, combined: Any) -> list[int]:
        for loader in combined.flattened:
            problem = _why_unsizable(loader)
            if problem is not None:
                raise AutoBatchError(f"AutoBatch: {self._where}: {problem}")
        return [loader.batch_size for loader in combined.flattened]


def _why_unsizable(loader: Any) -> str | None:
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"{kind} is no DataLoader, so its batch size cannot be set; wrap its dataset in a DataLoader"
    sampler = loader.batch_sampler
    if sampler is not None and (loader.batch_size is None or type(sampler) is not BatchSampler):
        return (
            f"the {kind} has a batch sampler of its own, {type(sampler).__name__}, whose batch "
            "size cannot be set; give a sampler and a batch size in its place"
        )
    if loader.batch_size is None:
        return (
            f"the {kind} has batch_size=None: its dataset makes the batches, so their size cannot be set; "
            "let the dataset give samples and the loader batch them"
        )
    return None


class DataState:
    """Random number generators and counters that datasets, samplers and loaders hold, put back by `restore`.

    Tensors, arrays and long containers are data, and are not looked into. After `MAX_OBJECTS` objects it
    stops with a warning.

    Args:
        roots: the objects to begin with; what their attributes hold is looked into as well.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._restores: list[Callable[[], object]] = []
        self._plain: list[tuple[dict[str, Any], set[str], dict[str, Any]]] = []
        seen: set[int] = set()
        waiting = list(roots)
        while waiting and len(seen) < MAX_OBJECTS:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, _PLAIN):
                continue
            seen.add(id(value))
            waiting.extend(self._inside(value))
        if waiting:
            logger.warning(
                "AutoBatch: the module, the data module and the loaders hold more than %d objects; random "
                "number generators and counters beyond these are not put back after the search, so training "
                "may differ from a run with the size by hand",
                MAX_OBJECTS,
            )

    def _inside(self, value: Any) -> Iterator[Any]:
        restore = restore_of_generator(value)
        if restore is not None:
            self._restores.append(restore)
        elif isinstance(value, Mapping):
            yield from value.values() if len(value) < _LONG else ()
        elif isinstance(value, list | tuple | set):
            yield from value if len(value) < _LONG else ()
        elif _is_data_object(value):
            attributes = vars(value)
            plain = {name: held for name, held in attributes.items() if isinstance(held, _PLAIN)}
            self._plain.append((attributes, set(attributes), plain))
            own = ("_modules", "_parameters", "_buffers", "_iterator", "_trainer", "trainer")
            yield from (held for name, held in attributes.items() if name not in own)

    def restore(self) -> None:
        """Put all of them back."""
        for attributes, names, plain in self._plain:
            for name in [name for name in attributes if name not in names]:
                if isinstance(attributes[name], _PLAIN):
                    del attributes[name]
            attributes.update(plain)
        for restore in self._restores:
            restore()


def _is_data_object(value: Any) -> bool:
    """Whether its attributes may hold generators; not a type, a function, a tensor or a part of Lightning."""
    if isinstance(value, type | Tensor) or callable(getattr(value, "__code__", None)):
        return False
    if isinstance(value, Dataset | DataLoader):
        return True
    home = type(value).__module__.partition(".")[0]
    is_library = home in (
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "numpy",
        "builtins",
        "weakref",
    )
    return not is_library and home not in sys.builtin_module_names and hasattr(value, "__dict__")
