"""The largest samples of a Hugging Face `Trainer`'s datasets, and the collate function for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.settings import kind_of
from linnaeus.integrations.common import look_for_largest
from linnaeus.integrations.samples import Largest, stored_lengths

_REMEDY = "set the batch size by hand, or search with a data_collator that makes the largest batch"


@dataclass(frozen=True)
class TrialData:
    """What batches of a trial are made of.

    Attributes:
        collate: makes a batch of samples, as the trainer's loader does.
        num_samples: samples in the dataset; the largest of several. None where it is not known.
        look: which samples make the largest batches.
        samples: all samples, by index.
    """

    collate: Callable[[list[Any]], Any]
    num_samples: int | None
    look: Largest
    samples: Any

    def up_to(self, largest: int) -> Callable[[int], list[Any]]:
        """Read the samples of batches up to a size; gives the samples of a batch of a size."""
        held = {
            index: self.samples[index]
            for index in {*self.look.indices(min(largest, len(self.samples)))}
        }
        return lambda size: [held[index] for index in self.look.indices(size)]


def trial_data(trainer: Any, mode: Mode, samples: Any, options: Mapping[str, Any]) -> TrialData:
    """Trial data from the training set or the evaluation set(s), or of these samples.

    Raises:
        AutoBatchError: the loader's batch size is not the trainer's, or the dataset is not read by index.
        ValueError: `samples` is no list of samples.
    """
    if mode == "train":
        argument, datasets, loaders = "samples", [trainer.train_dataset], [_checked_loader(trainer)]
    else:
        several = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {}
        argument, datasets = "eval_samples", [*several.values()] or [trainer.eval_dataset]
        loaders = [trainer.get_eval_dataloader(name) for name in several or [None]]
    collate = loaders[0].collate_fn
    read = [
        loader.dataset for loader in loaders
    ]  # without the columns that the model does not take
    is_known = all(
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") for dataset in read
    )
    num_samples = max(map(len, read)) if is_known else None
    if samples is not None:
        if (
            isinstance(samples, str | Mapping)
            or not hasattr(samples, "__len__")
            or not len(samples)
        ):
            raise ValueError(
                f"{argument} is {samples!r:.40}; it must be a list of at least one sample"
            )
        columns = getattr(read[0], "column_names", None)
        if columns is not None:
            samples = [{name: row[name] for name in row if name in columns} for row in samples]
        return TrialData(collate, num_samples, Largest(samples, collate, remedy=_REMEDY), samples)
    if num_samples is None:
        raise AutoBatchError(
            f"AutoBatch: the dataset is {kind_of(datasets[0])}, which is not read by index, so that its "
            "longest samples cannot be known before it has been read to the end. Give some of the longest "
            f"that may come: autobatch(trainer, {argument}=[...])."
        )
    column = getattr(trainer.args, "length_column_name", None)
    lengths: list[Any] = []
    for dataset in datasets:
        has_column = column in (getattr(dataset, "column_names", None) or ())
        stored = stored_lengths(dataset, column if has_column else None)
        lengths += () if stored is None else stored
    whole: Any = read[0] if len(read) == 1 else ConcatDataset(read)
    look = look_for_largest(
        whole,
        collate,
        options,
        lengths if len(lengths) == len(whole) else None,
        remedy=_REMEDY,
        num_workers=trainer.args.dataloader_num_workers,
    )
    return TrialData(collate, num_samples, look, whole)


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
