"""The largest samples of a Hugging Face `Trainer`'s datasets, and the collate function for them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.result import Mode
from linnaeus.integrations.accelerate import loader_of_rank
from linnaeus.integrations.budget import Ends, costs_of
from linnaeus.integrations.samples import Largest, is_read_by_index, loading_of


def trial_data(
    trainer: Any, mode: Mode, samples: Any, timeout_minutes: float
) -> tuple[Largest, int | None]:
    """Look for the largest samples of the training set or the evaluation set(s), or of these samples.

    Returns:
        The look, and the samples of the largest dataset; None if unknown.

    Raises:
        AutoBatchError: the loader's batch size is not the trainer's, or the dataset is not read by index.
        ValueError: `samples` is empty.
    """
    argument, several = "samples", trainer.eval_dataset
    if mode == "train":
        loaders = [_checked_loader(trainer)]
    else:
        argument, names = "eval_samples", several if isinstance(several, dict) else [None]
        loaders = [trainer.get_eval_dataloader(name) for name in names]
    # The loaders' datasets lack the columns that the model does not take.
    collate, read = loaders[0].collate_fn, [loader.dataset for loader in loaders]
    num_samples = max(map(len, read)) if all(map(is_read_by_index, read)) else None
    if samples is not None:
        columns = getattr(read[0], "column_names", None)
        if columns is not None:
            samples = [{name: row[name] for name in row if name in columns} for row in samples]
        read = [samples]
    whole: Any = read[0] if len(read) == 1 else ConcatDataset(read)
    look = Largest(
        whole,
        collate,
        remedy=f"give some of the largest: autobatch(trainer, {argument}=[...])",
        timeout_minutes=timeout_minutes,
        device=trainer.args.device,
        **loading_of(loaders[0]),
    )
    return look, num_samples


def ends_of(trainer: Any) -> Ends:
    """The training set's batches that need most memory at a number of tokens.

    Raises:
        AutoBatchError: the loader's batch size is not the trainer's, the dataset is not read by index, or its
            samples have neither a length column nor `input_ids`.
    """
    loader, whole, column = (
        _checked_loader(trainer),
        trainer.train_dataset,
        trainer.args.length_column_name,
    )
    cost = column if column in (getattr(whole, "column_names", None) or []) else None
    is_known = is_read_by_index(whole) and (cost is not None or "input_ids" in whole[0])
    if not is_known:
        raise AutoBatchError(
            f"AutoBatch: budget is 'tokens', but train_dataset has no column {column!r} (length_column_name) "
            "and no input_ids that are read by index; add the column, or leave budget out"
        )
    return Ends(loader.dataset, loader.collate_fn, costs_of(whole, cost), "tokens")


def budget_loader(trainer: Any, ends: Ends, budget: int) -> Any:
    """Return the trainer's loader with batches within a budget. Each rank draws its own batches."""
    loader, args = type(trainer).get_train_dataloader(trainer), trainer.args
    seed = args.seed if args.data_seed is None else args.data_seed
    return loader_of_rank(trainer.accelerator, loader, ends, budget, seed=seed)


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
