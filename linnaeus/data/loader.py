"""Loaders whose samples follow from (seed, epoch, index), whatever the workers and wherever a run resumes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, get_worker_info

from linnaeus.config.schema import DataConfig
from linnaeus.data.batch import Batch
from linnaeus.data.bundle import Collate, DataBundle, dataset_length
from linnaeus.data.sampler import (
    EpochSampler,
    PlannedBatches,
    SampleKey,
    Sizes,
    ValSampler,
    drops_last,
    samples_per_rank,
    steps_per_epoch,
    val_steps,
)
from linnaeus.errors import DataError
from linnaeus.rng import derive_seed, preserved_generators, seed_generators

__all__ = [
    "BatchLoader",
    "EpochSampler",
    "Loaders",
    "ValSampler",
    "build_loaders",
    "samples_per_rank",
    "steps_per_epoch",
    "val_steps",
]


@dataclass(frozen=True)
class Failure:
    """A `DataError` on its way out of a worker; raised there, it would arrive as the text of a traceback."""

    message: str
    notes: tuple[str, ...]

    def error(self) -> DataError:
        """The error as it was raised in the worker."""
        error = DataError(self.message)
        for note in self.notes:
            error.add_note(note)
        return error


class SeededBatches(Dataset[Any]):
    """Reads and collates whole batches, with the global generators seeded for each sample.

    Args:
        dataset: map-style dataset.
        collate: turns samples into a `Batch`; what it draws goes on from the last sample.
        seed: seed of the run.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate, seed: int) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed

    def __len__(self) -> int:
        return dataset_length(self.dataset)

    def __getitems__(self, keys: list[SampleKey]) -> Batch | Failure:
        """The batch of these samples; torch's loader calls this with all keys of a batch at once."""
        if get_worker_info() is None:
            # These are the generators of training. Restoring once a batch is cheaper than once a sample.
            with preserved_generators():
                return self._read(keys)
        try:
            return self._read(keys)
        except DataError as error:
            return Failure(str(error), tuple(getattr(error, "__notes__", ())))

    def _read(self, keys: list[SampleKey]) -> Batch:
        samples = []
        for epoch, index in keys:
            seed_generators(derive_seed(self.seed, epoch, index))
            samples.append(self.dataset[index])
        return self.collate(samples)


class BatchLoader:
    """Batches of one split for one process. Iterating again gives the sampler's epoch anew.

    Args:
        loader: torch's loader over `SeededBatches`.
        sampler: decides which samples come.
        dataset: the dataset that the batches come from.
    """

    def __init__(
        self, loader: DataLoader[Any], sampler: EpochSampler | ValSampler, dataset: Dataset[Any]
    ) -> None:
        self._loader: DataLoader[Any] | None = loader
        self.sampler = sampler
        self.dataset = dataset

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Choose epoch and starting point of the next iteration; see `EpochSampler.set_epoch`."""
        if isinstance(self.sampler, EpochSampler):
            self.sampler.set_epoch(epoch, skip)

    def __len__(self) -> int:
        """Batches of the next iteration, what `skip` leaves out not counted."""
        return len(self._open())

    def __iter__(self) -> Iterator[Batch]:
        """Batches on the host.

        Raises:
            DataError: a sample cannot be read, or a worker process died.
        """
        return _Batches(iter(self._open()))

    def close(self) -> None:
        """End the worker processes; the loader cannot be used afterwards. Closing twice is fine."""
        iterator = None if self._loader is None else self._loader._iterator
        self._loader = None
        # torch has no public way. Where the traceback of an error still holds the iterator, that is left to
        # the garbage collector, which may close the queues first: each worker then takes 5 s to time out.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def _open(self) -> DataLoader[Any]:
        if self._loader is None:
            raise RuntimeError("this loader is closed")
        return self._loader


class _Batches(Iterator[Batch]):
    """Turns what torch's loader gives into batches or errors; a generator would keep the last batch alive."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __next__(self) -> Batch:
        try:
            batch = next(self._iterator)
        except RuntimeError as error:
            if not _is_death_of_worker(error):
                raise
            raise DataError(
                f"a loader process died: {str(error).splitlines()[0]} Often memory ran out, or shared "
                "memory (/dev/shm): lower DATA.NUM_WORKERS, DATA.PREFETCH_FACTOR or DATA.BATCH_SIZE"
            ) from error
        if isinstance(batch, Failure):
            raise batch.error()
        return cast(Batch, batch)


@dataclass(frozen=True)
class Loaders:
    """Training and validation batches of one process; also a context manager that closes both."""

    train: BatchLoader
    val: BatchLoader

    def close(self) -> None:
        """End all worker processes."""
        self.train.close()
        self.val.close()

    def __enter__(self) -> Loaders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_loaders(
    bundle: DataBundle,
    *,
    batch_size: int | Sizes,
    batch_size_val: int,
    data_config: DataConfig,
    seed: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Loaders:
    """Loaders of both splits.

    With one size for all batches, training leaves out an incomplete last batch, unless a rank has fewer
    samples than one batch: then that smaller batch is the epoch. Validation keeps every sample.

    Args:
        bundle: the datasets.
        batch_size: samples per rank and training batch; or a function that gives the size of each batch.
        batch_size_val: samples per rank and validation batch.
        data_config: the `DATA` node; workers, prefetching and pinning are read from it.
        seed: seed of the run.
        rank, world_size: this process, and how many there are.
        device: device of training; host memory is page-locked for CUDA only.

    Raises:
        DataError: fewer training samples than processes.
    """
    length, length_val = dataset_length(bundle.train), dataset_length(bundle.val)
    if samples_per_rank(length, world_size) == 0:
        raise DataError(f"{length} training samples are too few for {world_size} processes")
    train_sampler = EpochSampler(length, seed=seed, rank=rank, world_size=world_size)
    val_sampler = ValSampler(length_val, rank=rank, world_size=world_size)

    def loader(
        dataset: Dataset[Any], sampler: EpochSampler | ValSampler, batches: Sampler[Any]
    ) -> BatchLoader:
        return BatchLoader(
            DataLoader(
                SeededBatches(dataset, bundle.collate, seed),
                batch_sampler=batches,
                collate_fn=_already_collated,
                num_workers=data_config.NUM_WORKERS,
                prefetch_factor=data_config.PREFETCH_FACTOR if data_config.NUM_WORKERS else None,
                persistent_workers=data_config.NUM_WORKERS > 0,
                pin_memory=data_config.PIN_MEMORY and device.type == "cuda",
                worker_init_fn=_start_worker,
                # Without one of its own, torch's loader draws from the global generator at every epoch.
                generator=torch.Generator().manual_seed(seed),
            ),
            sampler,
            dataset,
        )

    train_batches: Sampler[Any]
    if isinstance(batch_size, int):
        drop_last = drops_last(length, world_size, batch_size)
        train_batches = _equal_batches(train_sampler, batch_size, drop_last=drop_last)
    else:
        train_batches = PlannedBatches(train_sampler, batch_size)
    return Loaders(
        loader(bundle.train, train_sampler, train_batches),
        loader(bundle.val, val_sampler, _equal_batches(val_sampler, batch_size_val, drop_last=False)),
    )


def _equal_batches(sampler: Sampler[SampleKey], size: int, *, drop_last: bool) -> Sampler[Any]:
    return BatchSampler(cast(Any, sampler), size, drop_last)


def _already_collated(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    """Leave Ctrl-C to the training process, which ends its workers itself; torch's loader sets one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _print_unless_disconnected


def _print_unless_disconnected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A training process that ends in the middle of receiving a batch is no news to the user."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _is_death_of_worker(error: RuntimeError) -> bool:
    text = str(error)
    return text.startswith("DataLoader worker") and ("exited unexpectedly" in text or "killed by" in text)
