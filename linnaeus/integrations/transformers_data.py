"""The longest samples of a Hugging Face `Trainer`'s datasets, and the collate function for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset

from linnaeus.autobatch.arguments import kind_of
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.lengths import Length, descending, largest_first, stored_lengths


@dataclass(frozen=True)
class TrialData:
    """What batches of a trial are made of.

    Attributes:
        collate: makes a batch of samples, as the trainer's loader does.
        num_samples: samples in the dataset; the largest of several. None where it is not known.
        longest: the n largest samples; any where all are alike.
    """

    collate: Callable[[list[Any]], Any]
    num_samples: int | None
    longest: Callable[[int], list[Any]]


def training_data(trainer: Any, length: Length, samples: Sequence[Any] | None) -> TrialData:
    """Trial data from the training set.

    Args:
        trainer: the trainer.
        length: as for `longest`, of the samples in `trainer.train_dataset`.
        samples: are taken instead of the longest.

    Raises:
        AutoBatchError: the loader does not have the trainer's batch size, no length can be known, or no batch
            can be made of `samples`.
    """
    return _data(
        trainer, "train_dataset", [(trainer.train_dataset, _checked_loader(trainer))], length, samples
    )


def evaluation_data(trainer: Any, length: Length, samples: Sequence[Any] | None) -> TrialData:
    """Trial data from the evaluation set(s).

    A sequence in `length` is ignored: it describes the training set.
    """
    length = length if callable(length) or isinstance(length, str) else None
    datasets = trainer.eval_dataset
    if isinstance(datasets, dict):
        pairs = [(dataset, trainer.get_eval_dataloader(name)) for name, dataset in datasets.items()]
    else:
        pairs = [(datasets, trainer.get_eval_dataloader())]
    return _data(trainer, "eval_dataset", pairs, length, samples)


def _data(
    trainer: Any, name: str, pairs: Sequence[tuple[Any, Any]], length: Length, samples: Sequence[Any] | None
) -> TrialData:
    collate = pairs[0][1].collate_fn
    sized = [len(loader.dataset) for _, loader in pairs if _is_read_by_index(loader.dataset)]
    num_samples = max(sized) if len(sized) == len(pairs) else None
    argument = "samples" if name == "train_dataset" else "eval_samples"
    if samples is not None:
        columns = getattr(pairs[0][1].dataset, "column_names", None)
        own = [_with_columns(sample, columns) for sample in samples]
        _check_batch(argument, own, collate)
        return TrialData(collate, num_samples, lambda n: list(islice(cycle(own), n)))
    if num_samples is None:
        raise AutoBatchError(
            f"AutoBatch: {name} is {kind_of(pairs[0][0])}, which is not read by index, so that its longest "
            f"samples cannot be known before it has been read to the end. Give some of the longest that may "
            f"come: autobatch(trainer, {argument}=[...])."
        )

    read = pairs[0][1].dataset if len(pairs) == 1 else ConcatDataset([loader.dataset for _, loader in pairs])
    order = _order(trainer, [dataset for dataset, _ in pairs], read, collate, length)
    indices = range(len(read)) if order is None else order
    return TrialData(collate, num_samples, lambda n: [read[int(index)] for index in indices[:n]])


def _order(
    trainer: Any, datasets: Sequence[Any], read: Any, collate: Callable[[list[Any]], Any], length: Length
) -> Tensor | None:
    """The samples' indices, the largest first; None where all are alike.

    Args:
        trainer: the trainer.
        datasets: as the user gave them.
        read: all of them, as the loaders read them: without the columns that the model does not take.
        collate: the trainer's.
        length: is trusted, if it is given.
    """
    if callable(length):
        return descending(length(dataset[index]) for dataset in datasets for index in range(len(dataset)))
    column = getattr(trainer.args, "length_column_name", None) if length is None else length
    stored = []
    for dataset in datasets:
        has_column = length is not None or column in (getattr(dataset, "column_names", None) or ())
        stored.append(stored_lengths(dataset, column if has_column else None))
    known = [length for each in stored if each is not None for length in each]
    if length is not None:
        return descending(known)
    return largest_first(read, collate, known if len(known) == len(read) else None)


def check_samples(name: str, samples: Any) -> None:
    """Check that it is a sequence of samples, or None.

    Args:
        name: the argument's name.
        samples: its value.

    Raises:
        TypeError: it is something else.
        ValueError: it is empty.
    """
    if samples is None:
        return
    if isinstance(samples, str | bytes | Mapping) or not _is_read_by_index(samples):
        raise TypeError(
            f"{name} is {kind_of(samples)}; it must be a list of samples, as the dataset has them"
        )
    if not len(samples):
        raise ValueError(f"{name} is empty; it must hold at least one sample")


def _check_batch(name: str, samples: list[Any], collate: Callable[[list[Any]], Any]) -> None:
    """Check that the collate function makes a batch of each sample; each alone, so that it can be named.

    Raises:
        AutoBatchError: names the sample and the cause.
    """
    for index, sample in enumerate(samples):
        where = f"AutoBatch: no batch can be made of {name}[{index}]"
        try:
            batch = collate([copy.copy(sample)])
        except Exception as error:
            raise AutoBatchError(f"{where}: {type(error).__name__}: {error}") from error
        if isinstance(batch, Mapping) and not batch:
            raise AutoBatchError(f"{where}: it has nothing that the model takes")


def _is_read_by_index(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _with_columns(sample: Any, columns: Iterable[str] | None) -> Any:
    if columns is None or not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name in columns}


def _checked_loader(trainer: Any) -> Any:
    """The training loader, which uses `_train_batch_size`: that is where the search writes its result.

    Raises:
        AutoBatchError: it uses another size.
    """
    args, size = trainer.args, trainer._train_batch_size + 1
    before = trainer._train_batch_size, args.per_device_train_batch_size
    trainer._train_batch_size = args.per_device_train_batch_size = size
    try:
        loader = trainer.get_train_dataloader()
    finally:
        trainer._train_batch_size, args.per_device_train_batch_size = before
    found = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or getattr(
        loader, "batch_size", None
    )
    if found not in (None, size):
        raise AutoBatchError(
            f"AutoBatch: get_train_dataloader() of {type(trainer).__name__} makes batches of {found} samples "
            f"where the trainer's batch size is {size}, so the size found would not be used. Let it use "
            "self._train_batch_size."
        )
    return loader
