"""The largest samples of a Hugging Face `Trainer`'s datasets, and the collate function for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from torch.utils.data import ConcatDataset

from linnaeus.autobatch.arguments import kind_of
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.lengths import largest_first, stored_lengths


@dataclass(frozen=True)
class TrialData:
    """What batches of a trial are made of.

    Attributes:
        collate: makes a batch of samples, as the trainer's loader does.
        num_samples: samples in the dataset; the largest of several. None where it is not known.
        largest: the n largest samples; any where all are alike.
    """

    collate: Callable[[list[Any]], Any]
    num_samples: int | None
    largest: Callable[[int], list[Any]]


def training_data(trainer: Any, samples: Sequence[Any] | None) -> TrialData:
    """Trial data from the training set, or of these samples.

    Raises:
        AutoBatchError: the loader's batch size is not the trainer's, or the dataset is not read by index.
        ValueError: `samples` is no list of samples.
    """
    pairs = [(trainer.train_dataset, _checked_loader(trainer))]
    return _data(trainer, pairs, "samples", samples)


def evaluation_data(trainer: Any, samples: Sequence[Any] | None) -> TrialData:
    """Trial data from the evaluation set(s), or of these samples; raises as `training_data` does."""
    datasets = trainer.eval_dataset
    if isinstance(datasets, dict):
        pairs = [(dataset, trainer.get_eval_dataloader(name)) for name, dataset in datasets.items()]
    else:
        pairs = [(datasets, trainer.get_eval_dataloader())]
    return _data(trainer, pairs, "eval_samples", samples)


def _data(trainer: Any, pairs: list[tuple[Any, Any]], argument: str, samples: Any) -> TrialData:
    """Trial data from datasets, each with its loader, or of these samples."""
    collate = pairs[0][1].collate_fn
    read = [loader.dataset for _, loader in pairs]  # without the columns that the model does not take
    is_known = all(hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") for dataset in read)
    num_samples = max(map(len, read)) if is_known else None
    if samples is not None:
        if isinstance(samples, str | Mapping) or not hasattr(samples, "__len__") or not len(samples):
            raise ValueError(f"{argument} is {samples!r:.40}; it must be a list of at least one sample")
        columns = getattr(read[0], "column_names", None)
        own = [_with_columns(sample, columns) for sample in samples]
        return TrialData(collate, num_samples, lambda n: list(islice(cycle(own), n)))
    if num_samples is None:
        raise AutoBatchError(
            f"AutoBatch: the dataset is {kind_of(pairs[0][0])}, which is not read by index, so that its "
            "longest samples cannot be known before it has been read to the end. Give some of the longest "
            f"that may come: autobatch(trainer, {argument}=[...])."
        )
    column = getattr(trainer.args, "length_column_name", None)
    lengths: list[Any] = []
    for dataset, _ in pairs:
        has_column = column in (getattr(dataset, "column_names", None) or ())
        stored = stored_lengths(dataset, column if has_column else None)
        lengths += () if stored is None else stored
    whole: Any = read[0] if len(read) == 1 else ConcatDataset(read)
    order = largest_first(whole, collate, lengths if len(lengths) == len(whole) else None)
    indices = range(len(whole)) if order is None else order
    return TrialData(collate, num_samples, lambda n: [whole[int(index)] for index in indices[:n]])


def _with_columns(sample: Any, columns: Sequence[str] | None) -> Any:
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
    sized = [getattr(loader, "batch_sampler", None), loader]
    found = next(filter(None, (getattr(each, "batch_size", None) for each in sized)), size)
    if found != size:
        raise AutoBatchError(
            f"AutoBatch: get_train_dataloader() of {type(trainer).__name__} makes batches of {found} samples "
            f"where the trainer's batch size is {size}, so the size found would not be used. Let it use "
            "self._train_batch_size."
        )
    return loader
