"""Loaders whose samples depend on (seed, epoch, index) alone, not on workers or on where a run resumes."""

from __future__ import annotations

import bisect
import logging
import multiprocessing
import os
import re
import signal
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import repeat
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from linnaeus.config.schema import DataConfig
from linnaeus.data.batch import Batch, CopiedAhead
from linnaeus.data.bundle import (
    Collate,
    DataBundle,
    Resized,
    dataset_length,
    training_targets,
)
from linnaeus.data.image_files import ImageFiles
from linnaeus.data.mixing import DeviceTransform
from linnaeus.data.sampler import (
    ClassSampler,
    EpochSampler,
    PlannedBatches,
    SampleKey,
    Sizes,
    ValSampler,
)
from linnaeus.data.sharing import reason_against_sharing
from linnaeus.data.user_dataset import UserDataset
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import DataError
from linnaeus.runtime.rng import LentGenerators, derive_seed, seed_generators
from linnaeus.runtime.signals import SIGNALS, blocked

logger = logging.getLogger("linnaeus.data")
MOST_WORKERS = 8
"""Bound on the loader processes that `DATA.NUM_WORKERS null` starts for each rank."""
_WORKER_DIED = re.compile(r"DataLoader worker.*(exited unexpectedly|killed by)", re.DOTALL)


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _Loader(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """Suppress torch's warning: `build_val_loader` logs a shorter one."""


@dataclass(eq=False)
class SeededBatches(Dataset[Any]):
    """Reads and collates whole batches, with the global generators seeded for each sample.

    Collating draws on from the generators' state after the last sample, and so do the choices for the device.
    Batches are mixed in the first `mixed_epochs` epochs. Where training images change their
    size, `resized` holds the dataset from each epoch on, so that workers need not restart.

    Seeding takes longer than a small sample in memory. The training process therefore does without it while
    no sample draws a number. The first batch that draws one is read again, and all later ones are seeded.
    """

    dataset: Dataset[Any]
    collate: Collate
    seed: int
    on_device: DeviceTransform | None = None
    mixed_epochs: int = 0
    resized: Sequence[Resized] = ()
    _draws: bool = field(default=False, init=False)
    """Whether a sample has drawn a number."""

    def __getitems__(self, keys: list[SampleKey]) -> Batch | DataError:
        """The batch of these samples; torch's loader calls this with all keys of a batch at once.

        A worker returns a `DataError`, because a raised one would arrive as the text of a traceback.
        """
        if get_worker_info() is None:
            return self.read(keys)
        try:
            return self._read_seeded(keys)
        except DataError as error:
            return error

    def read(self, keys: list[SampleKey]) -> Batch:
        """The batch of these samples, in the training process, which uses the global generators too."""
        with self._generators as generators:
            if not self._draws:
                dataset = self._dataset(keys)
                batch = self._collated([dataset[key[1]] for key in keys], keys)
                if generators.are_untouched():
                    return batch
                self._draws = True
            return self._read_seeded(keys)

    @cached_property
    def _generators(self) -> LentGenerators:
        return LentGenerators()

    def _read_seeded(self, keys: list[SampleKey]) -> Batch:
        samples, dataset = [], self._dataset(keys)
        for key in keys:
            seed_generators(derive_seed(self.seed, *key))
            samples.append(dataset[key[1]])
        return self._collated(samples, keys)

    def resized_in(self, epoch: int) -> Resized | None:
        """The training data of an epoch, from 0; None where they do not change."""
        number = bisect.bisect_right(self.resized, epoch, key=lambda each: each.start)
        return self.resized[number - 1] if number else None

    def _dataset(self, keys: list[SampleKey]) -> Dataset[Any]:
        resized = self.resized_in(keys[0][0])
        return self.dataset if resized is None else resized.dataset

    def _collated(self, samples: list[Any], keys: list[SampleKey]) -> Batch:
        batch = self.collate(samples)
        if self.on_device is None:
            return batch
        mixes = keys[0][0] < self.mixed_epochs
        choices = self.on_device.choose(batch, mixes=mixes)
        return batch if choices is None else batch._replace(choices=choices)


def with_num_workers(config: DataConfig, data: DataBundle, world: World) -> DataConfig:
    """The DATA node with a number for `NUM_WORKERS` null.

    Image files and users' datasets get a loader process for each CPU core of a rank, at most `MOST_WORKERS`.
    Data in memory gets 0, and so does a user's dataset that several processes cannot share.
    """
    if config.NUM_WORKERS is not None:
        return config
    workers = min(MOST_WORKERS, num_cores() // world.local_world_size)
    if not isinstance(data.train, ImageFiles | UserDataset):
        workers = 0
    elif isinstance(data.train, UserDataset):
        reason = reason_against_sharing(data.train.dataset)
        if reason and world.is_main:
            logger.info(
                "loader: in the rank's own process, since others cannot share %s: %s (DATA.NUM_WORKERS)",
                data.train.name,
                reason,
            )
        workers = 0 if reason else workers
    return replace(config, NUM_WORKERS=workers)


class BatchLoader:
    """Batches of one split for one rank. Each iteration runs through one epoch.

    With CUDA, batches are on the device, copied from page-locked memory while the step before them runs.
    """

    def __init__(
        self,
        dataset: SeededBatches,
        batches: PlannedBatches,
        config: DataConfig,
        world: World,
        seed: int,
    ) -> None:
        workers = self.num_workers = config.NUM_WORKERS or 0
        self._dataset, self._batches = dataset, batches
        self._device = world.device
        self._closing = multiprocessing.get_context().Event()
        """Tells the worker processes that they may be ended."""
        self._loader: DataLoader[Any] | None = _Loader(
            dataset,
            batch_sampler=batches,
            collate_fn=_already_collated,
            num_workers=workers,
            prefetch_factor=config.PREFETCH_FACTOR if workers else None,
            persistent_workers=workers > 0,
            pin_memory=config.PIN_MEMORY and world.device.type == "cuda",
            worker_init_fn=partial(_start_worker, self._closing),
            # Without its own generator, torch's loader draws from the global generator at every epoch.
            generator=torch.Generator().manual_seed(seed),
        )
        # At the latest when the interpreter ends: it then sends SIGTERM to the worker processes, and waits.
        weakref.finalize(self, self._closing.set)

    @property
    def side(self) -> int | None:
        """Side of the images in the epoch chosen; None without DATA.IMG_SIZE_SCHEDULE."""
        resized = self._dataset.resized_in(self._batches.sampler.epoch)
        return None if resized is None else resized.side

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Choose epoch and starting point of the next iteration; see `EpochSampler.set_epoch`."""
        self._batches.sampler.set_epoch(epoch, skip)

    def set_sizes(self, sizes: Sizes) -> None:
        """Choose the sizes of the batches, from the next iteration on."""
        self._batches.sizes = sizes

    def __iter__(self) -> Iterator[Batch]:
        """Batches on the host.

        Raises:
            DataError: a sample cannot be read, or a worker process died.
        """
        if self._loader is None:
            raise RuntimeError("this loader is closed")
        batches: Iterator[Batch]
        if self._loader.num_workers or self._loader.pin_memory:
            with blocked():  # a launcher's signal must not end a worker that cannot ignore it yet
                batches = _Batches(iter(self._loader))
        else:  # torch's loader takes longer than a small batch
            batches = map(self._dataset.read, self._batches)
        return CopiedAhead(batches, self._device) if self._device.type == "cuda" else batches

    def __len__(self) -> int:
        """Batches of the next iteration; they are counted without reading them."""
        return sum(1 for _ in self._batches)

    def close(self) -> None:
        """End the worker processes; the loader cannot be used afterwards. Closing twice is fine."""
        iterator = getattr(self._loader, "_iterator", None)
        self._loader = None
        self._closing.set()
        # torch has no public way. Garbage collection comes late where the traceback of an error holds the
        # iterator, and may close the queues first; then each worker takes 5 s to time out.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
            for worker in getattr(iterator, "_workers", ()):
                if worker.is_alive():  # it hangs where Python cannot handle torch's SIGTERM
                    worker.kill()


class _Batches(Iterator[Batch]):
    """Raises the errors among the items of torch's loader. A generator would keep the last batch alive."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __next__(self) -> Batch:
        try:
            batch = next(self._iterator)
        except RuntimeError as error:
            if not _WORKER_DIED.match(str(error)):
                raise
            raise DataError(
                f"a loader process died: {str(error).splitlines()[0]} Often memory ran out, or shared "
                "memory (/dev/shm): lower DATA.NUM_WORKERS, DATA.PREFETCH_FACTOR or DATA.BATCH_SIZE"
            ) from error
        if isinstance(batch, DataError):
            raise batch
        return cast(Batch, batch)


@dataclass(frozen=True)
class Loaders(AbstractContextManager["Loaders"]):
    """The batches of each split for one rank. As a context manager it closes all."""

    train: BatchLoader
    val: BatchLoader
    test: BatchLoader | None = None

    def __exit__(self, *_: object) -> None:
        self.train.close()
        self.val.close()
        if self.test is not None:
            self.test.close()


def build_loaders(
    bundle: DataBundle,
    config: DataConfig,
    world: World,
    *,
    sizes: Sizes,
    batch_size_val: int,
    seed: int,
    mixed_epochs: int = sys.maxsize,
) -> Loaders:
    """Loaders of all splits. Validation keeps every sample, training only the samples of `sizes`.

    Args:
        config: the DATA node.
        sizes: the size of each training batch of this rank.
        batch_size_val: samples per rank and validation batch.
        mixed_epochs: number of epochs, from the first, whose training batches are mixed, if any are.

    Raises:
        ConfigError: DATA.SAMPLER needs labels that the dataset does not give.
    """
    order = {"seed": seed, "rank": world.rank, "world_size": world.world_size}
    order["repeats"] = config.AUGMENT.REPEATS
    if config.SAMPLER == "shuffle":
        sampler = EpochSampler(dataset_length(bundle.train), **order)
    else:
        targets = training_targets(bundle, f"DATA.SAMPLER {config.SAMPLER}")
        sampler = ClassSampler(targets, power=0.5 if config.SAMPLER == "sqrt" else 0.0, **order)
    dataset = SeededBatches(
        bundle.train, bundle.collate, seed, bundle.on_device, mixed_epochs, bundle.resized
    )
    train = BatchLoader(dataset, PlannedBatches(sampler, sizes), config, world, seed)
    held_out = (
        build_val_loader(
            replace(bundle, val=dataset), config, world, batch_size=batch_size_val, seed=seed
        )
        for dataset in (bundle.val, bundle.test)
        if dataset is not None
    )
    return Loaders(train, *held_out)


def build_val_loader(
    bundle: DataBundle, config: DataConfig, world: World, *, batch_size: int, seed: int
) -> BatchLoader:
    """The validation batches of `build_loaders`; warns on rank 0 of more workers than cores."""
    workers, ranks = config.NUM_WORKERS or 0, world.local_world_size
    if world.is_main and workers * ranks > max(num_cores(), ranks):
        logger.warning(
            "warning: DATA.NUM_WORKERS is %d, for %s on %d CPU cores; more workers than cores take memory "
            "and are no faster. DATA.NUM_WORKERS null fits itself to the cores",
            workers,
            f"{ranks} ranks" if ranks > 1 else "one rank",
            num_cores(),
        )
    length = dataset_length(bundle.val)
    sampler = ValSampler(length, seed=seed, rank=world.rank, world_size=world.world_size)
    batches = PlannedBatches(sampler, lambda epoch, skip: repeat(batch_size))
    dataset = SeededBatches(bundle.val, bundle.collate, seed)
    return BatchLoader(dataset, batches, config, world, seed)


def _already_collated(batch: Any) -> Any:
    return batch


def _start_worker(closing: Event, _: int) -> None:
    """Leave signals to the training process: launchers send them to all processes of a rank.

    A worker that ended at once would break off the epoch, before the training loop has saved a checkpoint. If
    the training process dies, torch's worker loop ends.
    """

    def end_if_closing(*_: object) -> None:
        if closing.is_set():
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_if_closing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # `BatchLoader.__iter__` has blocked them
    sys.excepthook = _print_unless_disconnected


def _print_unless_disconnected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Stay silent about a connection lost because the training process ended; print anything else."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)
