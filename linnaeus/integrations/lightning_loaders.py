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
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from linnaeus.autobatch.attributes import restore_of_generator
from linnaeus.autobatch.errors import AutoBatchError

PROBES = (4, 8)
"""Sizes with which a `*_dataloader` hook is called, to see which of its loaders follow the attribute."""
POOL_SAMPLES = 64
"""Samples that trials make batches from, spread over the dataset, where loading them is not measured. Where
samples differ in length the longest need not be among them: `make_batch` gives those."""
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


@dataclass(frozen=True)
class Epoch:
    """What one rank takes of a loader in an epoch; every rank can know that of the others.

    Attributes:
        share: the loader's batch size divided by the size searched; None if it does not follow that.
        num_samples: samples of this rank; None where that is not known.
        keeps_rest: whether the samples left at the end make a smaller batch.
    """

    share: Fraction | None
    num_samples: int | None
    keeps_rest: bool

    @property
    def most(self) -> int | None:
        """The largest size with a full batch; None if there is no limit.

        >>> Epoch(Fraction(1, 2), 48, True).most
        96
        """
        if self.share is None or self.num_samples is None:
            return None
        return max(1, math.floor(self.num_samples / self.share))

    @property
    def least(self) -> int:
        """The smallest size that leaves it two samples, where it takes a fraction of it; else 1."""
        return 1 if self.share is None or self.share >= 1 else math.ceil(2 / self.share)

    def last_batch(self, size: int) -> int | None:
        """Samples of the last batch; None where that is not known, or left out.

        >>> Epoch(Fraction(1), 96, True).last_batch(19)
        1
        """
        if self.share is None or self.num_samples is None or not self.keeps_rest:
            return None
        part = part_of(size, self.share)
        return self.num_samples % part or part


def part_of(size: int, share: Fraction) -> int:
    """The batch size of a loader that takes this share of the size searched."""
    return max(1, int(size * share))


class SizedLoader:
    """One loader, and the part of the batch size that it takes.

    Args:
        loader: batches samples of a dataset.
        share: its batch size divided by the size searched; None if it does not follow that.
        searches_cpu: whether the memory searched is that of the host, in which samples are loaded.
    """

    def __init__(self, loader: DataLoader[Any], share: Fraction | None, *, searches_cpu: bool) -> None:
        self.loader = loader
        self.share = share
        self._is_fresh = searches_cpu and loader.num_workers == 0 and not self.is_iterable
        self._samples: list[Any] = []

    @property
    def is_iterable(self) -> bool:
        """Whether its dataset gives samples in an order of its own."""
        return isinstance(self.loader.dataset, IterableDataset)

    def size(self, size: int) -> int:
        """Its own batch size."""
        assert self.loader.batch_size is not None
        return self.loader.batch_size if self.share is None else part_of(size, self.share)

    def epoch(self, num_ranks: int) -> Epoch:
        """What this rank takes of it.

        Args:
            num_ranks: the ranks that Lightning divides the samples among.
        """
        num_samples = None if self.share is None or self.is_iterable else self._num_samples(num_ranks)
        return Epoch(self.share, num_samples, not self.loader.drop_last)

    def _num_samples(self, num_ranks: int) -> int:
        """Samples of each rank."""
        sampler: Any = self.loader.sampler
        num_samples = len(sampler) if hasattr(sampler, "__len__") else len(self._dataset)
        return num_samples if isinstance(sampler, DistributedSampler) else -(-num_samples // num_ranks)

    def batch(self, size: int) -> Any:
        """A batch of real samples, made as the loader makes it."""
        count = self.size(size)
        if self._is_fresh:
            return self.loader.collate_fn(self._fetched(count))
        if not self._samples:
            self._samples = self._streamed() if self.is_iterable else self._fetched(POOL_SAMPLES)
        # Shallow copies: a collate function may take items out of its samples.
        samples = [self._samples[index % len(self._samples)] for index in range(count)]
        return self.loader.collate_fn([copy.copy(sample) for sample in samples])

    @property
    def _dataset(self) -> Any:
        return self.loader.dataset

    def _fetched(self, count: int) -> list[Any]:
        """So many samples, from the whole dataset; each more than once if there are fewer."""
        indices = self._indices(count)
        chosen = [indices[position % len(indices)] for position in range(count)]
        if hasattr(self._dataset, "__getitems__") and self._dataset.__getitems__:
            return list(self._dataset.__getitems__(chosen))
        return [self._dataset[index] for index in chosen]

    def _indices(self, count: int) -> list[Any]:
        sampler: Any = self.loader.sampler
        if not isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler):
            found = list(islice(sampler, count))  # it may give other things than numbers
        else:
            length = len(self._dataset)
            found = [position * length // min(count, length) for position in range(min(count, length))]
        if not found:
            raise AutoBatchError("AutoBatch: a loader has no samples")
        return found

    def _streamed(self) -> list[Any]:
        kind = type(self._dataset).__name__
        try:
            dataset = copy.deepcopy(self._dataset)  # training still gets the samples that trials read
        except Exception as error:
            raise AutoBatchError(
                f"AutoBatch: the iterable dataset {kind} cannot be copied ({error}), and reading from it "
                "would take samples from training. Give a function that makes a batch of n samples: "
                "AutoBatch(make_batch=...)"
            ) from None
        samples = list(islice(iter(dataset), POOL_SAMPLES))
        if not samples:
            raise AutoBatchError(f"AutoBatch: the iterable dataset {kind} has no samples")
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
            self.combined, shares = self._request(), None
        else:
            set_size(PROBES[0])
            self.combined = self._request()
            set_size(PROBES[1])
            shares = self._shares(self._sizes(self.combined), self._sizes(self._request()))
        if shares is None:
            sizes = self._sizes(self.combined)
            if len(set(sizes)) > 1:
                raise AutoBatchError(
                    f"AutoBatch: {self._where} have different batch sizes, {sizes}. Return them from a "
                    f"{self.source.name} hook that makes them from self.{name}"
                )
            shares = [Fraction(1)] * len(sizes)
        searches_cpu = trainer.strategy.root_device.type == "cpu"
        self.sized = [
            SizedLoader(loader, share, searches_cpu=searches_cpu)
            for loader, share in zip(self.combined.flattened, shares, strict=True)
        ]

    @property
    def follow(self) -> bool:
        """Whether any of them follows the size."""
        return any(sized.share is not None for sized in self.sized)

    @property
    def epochs(self) -> list[Epoch]:
        """What this rank takes of each."""
        return [sized.epoch(self._num_ranks) for sized in self.sized]

    @property
    def _num_ranks(self) -> int:
        """The ranks that Lightning divides the samples among."""
        connector = self._trainer._accelerator_connector
        is_divided = connector.is_distributed and connector.use_distributed_sampler
        return int(self._trainer.world_size) if is_divided else 1

    def batch(self, size: int) -> Any:
        """What the loaders of a training step give together: one batch, or the user's structure of them."""
        unflatten = self._library("utilities.combined_loader").tree_unflatten
        return unflatten([sized.batch(size) for sized in self.sized], self.combined._spec)

    def check(self, size: int, *, may_be_smaller: bool) -> None:
        """Check that loaders made by a hook have, at the size found, the sizes that were measured.

        Args:
            size: what was found.
            may_be_smaller: whether a loader may have fewer samples than were measured.

        Raises:
            AutoBatchError: one has another size: the hook limits or rounds what it takes.
        """
        if self._set_size is None:
            return
        self._set_size(size)
        for sized, given in zip(self.sized, self._sizes(self._request()), strict=True):
            expected = sized.size(size)
            if given == expected or (may_be_smaller and given < expected):
                continue
            raise AutoBatchError(
                f"AutoBatch: {self._where} gives a loader of batch size {given} where {self._name} is "
                f"{size}, not of {expected} as at {PROBES[0]} and {PROBES[1]}: it is neither proportional "
                "nor fixed. Take the size as it is, and limit the search instead, such as with max_batch_size"
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

    def _shares(self, small: Sequence[int], large: Sequence[int]) -> list[Fraction | None]:
        shares = []
        for before, after in zip(small, large, strict=True):
            if after * PROBES[0] != before * PROBES[1] and after != before:
                raise AutoBatchError(
                    f"AutoBatch: {self._where} gives a loader of batch size {before} where the attribute is "
                    f"{PROBES[0]}, and of {after} where it is {PROBES[1]}; its size must be a multiple or a "
                    "fraction of the attribute, or fixed"
                )
            shares.append(None if before == after else Fraction(before, PROBES[0]))
        return shares


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
