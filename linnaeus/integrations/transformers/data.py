"""The largest samples of a Hugging Face `Trainer`'s datasets, and the collate function for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import ConcatDataset

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.result import Mode
from linnaeus.integrations.common import look_for_largest
from linnaeus.integrations.samples import Largest, is_read_by_index, stored_lengths


def trial_data(
    trainer: Any, mode: Mode, samples: Any, options: Mapping[str, Any]
) -> tuple[Largest, int | None]:
    """Look for the largest samples of the training set or the evaluation set(s), or of these samples.

    Returns:
        The look, and the samples of the largest dataset; None where nobody knows.

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
    # The loaders' datasets lack the columns that the model does not take.
    collate, read = loaders[0].collate_fn, [loader.dataset for loader in loaders]
    num_samples = max(map(len, read)) if all(map(is_read_by_index, read)) else None
    lengths: list[Any] = []
    if samples is not None:
        if isinstance(samples, str | Mapping) or not is_read_by_index(samples) or not samples:
            raise ValueError(
                f"{argument} is {samples!r:.40}; it must be a list of at least one sample"
            )
        columns = getattr(read[0], "column_names", None)
        if columns is not None:
            samples = [{name: row[name] for name in row if name in columns} for row in samples]
        read = [samples]
    elif num_samples is not None:
        column = getattr(trainer.args, "length_column_name", None)
        for dataset in datasets:
            has_column = column in (getattr(dataset, "column_names", None) or ())
            stored = stored_lengths(dataset, column if has_column else None)
            lengths += () if stored is None else stored
    whole: Any = read[0] if len(read) == 1 else ConcatDataset(read)
    look = look_for_largest(
        whole,
        collate,
        options,
        trainer.args.device,
        lengths if num_samples is not None and len(lengths) == len(whole) else None,
        remedy=f"give some of the largest: autobatch(trainer, {argument}=[...])",
        num_workers=trainer.args.dataloader_num_workers,
    )
    return look, num_samples


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
