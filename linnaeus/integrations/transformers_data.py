"""The longest samples of a Hugging Face `Trainer`'s datasets, and the collate function for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

from linnaeus.autobatch.arguments import kind_of
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.lengths import Length, longest, num_values, stored_lengths


@dataclass(frozen=True)
class TrialData:
    """What batches of a trial are made of.

    Attributes:
        collate: makes a batch of samples, as the trainer's loader does.
        num_samples: samples in the dataset; the largest of several. None where it is not known.
        longest: the n longest samples.
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

    def find(n: int) -> list[Any]:
        found = [_longest_of(trainer, dataset, loader, n, length) for dataset, loader in pairs]
        if len(found) == 1:
            return found[0]
        return sorted(chain(*found), key=length_of, reverse=True)[:n]

    return TrialData(collate, num_samples, find)


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


def _longest_of(trainer: Any, dataset: Any, loader: Any, n: int, length: Length) -> list[Any]:
    """The longest samples as the loader reads them: without the columns that the model does not take."""
    read = loader.dataset
    if length is None:
        length = _known_lengths(trainer, dataset, loader)
    if length is not None or stored_lengths(dataset) is not None:
        return longest(dataset, n, length=length, read=read)
    if _is_image(trainer, read[0]):  # a processor gives all images one size
        return [read[index % len(read)] for index in range(n)]
    found = longest(read, n, length=length_of)
    if getattr(getattr(trainer.model, "config", None), "is_encoder_decoder", False):
        # Both sides are padded on their own: the longest target may belong to another source.
        found = [*longest(read, 1, length=_target_length), *found][:n]
    return found


def _known_lengths(trainer: Any, dataset: Any, loader: Any) -> Length:
    """The column that the trainer's arguments name, or the lengths that a sampler has read already."""
    column = getattr(trainer.args, "length_column_name", None)
    if column in (getattr(dataset, "column_names", None) or ()):
        return str(column)
    sampler, seen = getattr(loader, "batch_sampler", None), 0
    while sampler is not None and seen < 4:
        lengths = getattr(sampler, "lengths", None)
        if lengths is not None and len(lengths) == len(loader.dataset):
            return list(map(int, lengths))
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        seen += 1
    return None


def length_of(sample: Any) -> int:
    """The tokens of a sample, of the longer of its two texts if it has a chosen and a rejected one.

    >>> length_of({"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5, 6]})
    5
    >>> length_of({"input_ids": [1, 2, 3], "labels": [1, 2, 3]})
    3
    """
    if not isinstance(sample, Mapping) or not any(str(name).startswith("chosen") for name in sample):
        return num_values(sample)

    def tokens(kind: str) -> int:
        found = [value for name, value in sample.items() if str(name).startswith(kind)]
        return max((len(value) for value in found if hasattr(value, "__len__")), default=0)

    return tokens("prompt") + max(tokens("chosen"), tokens("rejected"))


def _target_length(sample: Any) -> int:
    return num_values(sample.get("labels", ())) if isinstance(sample, Mapping) else 0


def _is_image(trainer: Any, sample: Any) -> bool:
    name = getattr(trainer.model, "main_input_name", None)
    return name == "pixel_values" and isinstance(sample, Mapping) and name in sample


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
