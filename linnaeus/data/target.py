"""A user's own dataset, named by `_target_` in `DATA.DATASET`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from linnaeus.autobatch.rng import preserved_generators
from linnaeus.config.instantiate import prepare
from linnaeus.config.schema import DataConfig
from linnaeus.data.batch import Batch
from linnaeus.data.bundle import Collate, DataBundle, as_size, collate_pairs, dataset_length
from linnaeus.data.image import to_tensor
from linnaeus.data.target_labels import (
    all_targets,
    attribute_of,
    describe,
    find_taxonomy,
    naming_errors,
    target_row,
)
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.data.transforms import Preprocessing, Transform, build_transforms, preprocessing_of
from linnaeus.errors import DataError
from linnaeus.rng import seed_generators

_NUM_PROBED = 8
_GREY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "F"))


class UserDataset(Dataset[Any]):
    """A user's dataset, whose Pillow images become tensors and whose targets become one label per level.

    Args:
        dataset: map-style dataset whose items are (input, target).
        name: its `_target_`, for messages.
        taxonomy: levels of the targets; None leaves targets as they are.
        raw: return items untouched, for a dataset with its own `collate_fn`.
    """

    def __init__(self, dataset: Any, name: str, taxonomy: Taxonomy | None, *, raw: bool) -> None:
        self.dataset = dataset
        self.name = name
        self.taxonomy = taxonomy
        self.raw = raw
        self.transform: Transform | None = None
        self.channels = 3
        self.relabel: Callable[[Tensor], Tensor] | None = None

    def take(self, positions: list[int]) -> None:
        """Keep only the samples at these positions."""
        self.dataset = Subset(self.dataset, positions)

    def __len__(self) -> int:
        return dataset_length(self.dataset)

    @property
    def targets(self) -> Tensor | None:
        """Labels [N, R] of all samples, from the dataset's own `targets`; None where it has none.

        Raises:
            DataError: they are of another form, or not one for each sample.
        """
        if self.taxonomy is None:
            return None
        return all_targets(self.dataset, self.taxonomy, self.name)

    def __getitem__(self, index: int) -> Any:
        with naming_errors(f"{self.name}: sample {index}"):
            item = self.dataset[index]
        if self.raw:
            return item
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{self.name}: sample {index} is {describe(item)}; it must be a pair (input, target), "
                "or the dataset must have a `collate_fn` that makes (inputs, targets) of a list of samples"
            )
        inputs, target = item
        if isinstance(inputs, Image) and self.transform is not None:
            with naming_errors(f"{self.name}: image of sample {index}"):
                inputs = self.transform(to_tensor(inputs, self.channels))
        if self.taxonomy is not None:
            target = target_row(target, self.taxonomy, f"{self.name}: target of sample {index}")
        if self.relabel is not None:
            target = self.relabel(target)
        return inputs, target


class UserCollate:
    """A dataset's own `collate_fn`, whose result becomes a `Batch`.

    Args:
        collate_fn: list of samples to (inputs, targets).
        name: the dataset's `_target_`, for messages.
        taxonomy: if given, targets [B] or {name of the level: [B]} become [B, R].
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], name: str, taxonomy: Taxonomy | None) -> None:
        self.collate_fn = collate_fn
        self.name = name
        self.taxonomy = taxonomy

    def __call__(self, samples: list[Any]) -> Batch:
        """Collate a list of samples."""
        with naming_errors(f"{self.name}: collate_fn"):
            batch = self.collate_fn(samples)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(f"{self.name}: collate_fn gave {describe(batch)}; it must give (inputs, targets)")
        inputs, targets = batch
        if self.taxonomy is not None and isinstance(targets, Mapping):
            targets = torch.stack([torch.as_tensor(targets[name]) for name in self.taxonomy.names], dim=1)
        if self.taxonomy is not None and isinstance(targets, Tensor) and targets.ndim == 1:
            targets = targets.unsqueeze(1)
        return Batch(inputs, targets)


def build_target(config: DataConfig, *, seed: int) -> DataBundle:
    """Both splits of a user's dataset.

    The callable is called with `split="train"` and `split="val"` if it takes `split`, else with `train=True`
    and `train=False`; an argument that the node sets is not changed. The global generators are seeded before
    each call, so that a random split in a user's function is the same in both calls and in all processes.

    Classes come from the dataset's attribute `taxonomy` (a `Taxonomy`, or a mapping from names of levels to
    class names or their number), `classes` (names) or `num_classes`; for a `Subset`, from the dataset in it.

    Raises:
        ConfigError: there is no such class, or an argument of it cannot be made.
        DataError: an unusable dataset, or an error of the user's own code; the message names the `_target_`.
    """
    node: Mapping[str, Any] = config.DATASET
    name = str(node["_target_"])
    parts = {split: _instantiate(node, name, split, seed) for split in ("train", "val")}
    taxonomy = find_taxonomy(parts["train"], name)
    other = find_taxonomy(parts["val"], name)
    if taxonomy is not None and other is not None and taxonomy.levels != other.levels:
        raise DataError(f"{name}: training and validation have different classes")
    collate_fn = attribute_of(parts["train"], "collate_fn")
    raw = callable(collate_fn)
    collate: Collate = UserCollate(collate_fn, name, taxonomy) if raw else collate_pairs
    train, val = (UserDataset(part, name, taxonomy, raw=raw) for part in parts.values())
    in_chans, img_size = _prepare_images(train, val, collate, config)
    preprocessing = None
    if train.transform is not None and in_chans is not None and img_size is not None:
        preprocessing = preprocessing_of(config.AUGMENT, img_size, in_chans)
    report = [f"{name}: {len(train)} training and {len(val)} validation samples"]
    if train.transform is None and config.IMG_SIZE is not None:
        report.append(f"{name}: gives tensors, which pass as they are: no DATA.IMG_SIZE and no DATA.AUGMENT")
    if config.ON_BAD_IMAGE == "skip":
        report.append(f"{name}: reads its own images, so DATA.ON_BAD_IMAGE skip has no effect")
    if taxonomy is None:
        report.append(f"{name}: no `taxonomy`, `classes` or `num_classes`; targets are passed on as they are")
    return DataBundle(train, val, taxonomy, in_chans, img_size, collate, report, preprocessing)


def build_target_val(
    config: DataConfig, preprocessing: Preprocessing | None, *, seed: int
) -> tuple[UserDataset, DataBundle]:
    """The validation split of a user's dataset, for a trained model; the split of training is not made.

    Args:
        config: the DATA node.
        preprocessing: how an image becomes an input of the model; None where it took tensors.
        seed: as for `build_target`.

    Returns:
        The dataset, and a bundle whose splits both are it, with the taxonomy that it declares.

    Raises:
        DataError: an unusable dataset, one whose classes cannot be matched as it collates its own batches, or
            an error of the user's own code; the message names the `_target_`.
    """
    node: Mapping[str, Any] = config.DATASET
    name = str(node["_target_"])
    part = _instantiate(node, name, "val", seed)
    taxonomy = find_taxonomy(part, name)
    collate_fn = attribute_of(part, "collate_fn")
    raw = callable(collate_fn)
    dataset = UserDataset(part, name, taxonomy, raw=raw)
    collate: Collate = UserCollate(collate_fn, name, taxonomy) if raw else collate_pairs
    with preserved_generators():
        sample = dataset[0]
    if not raw and isinstance(sample[0], Image):
        if preprocessing is None:
            raise DataError(f"{name}: gives Pillow images, but the dataset of the run gave tensors")
        dataset.channels, dataset.transform = preprocessing.channels, preprocessing.transform()
    channels = None if preprocessing is None else preprocessing.channels
    size = None if preprocessing is None else preprocessing.size
    return dataset, DataBundle(dataset, dataset, taxonomy, channels, size, collate)


def _instantiate(node: Mapping[str, Any], name: str, split: str, seed: int) -> Any:
    with preserved_generators():
        seed_generators(seed)
        build = prepare(node, "DATA.DATASET")
        argument = _split_argument(build.func, node, name, split)
        with naming_errors(f"{name} ({split})"):
            dataset = build(**argument)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name} gave {describe(dataset)}; a dataset needs __len__ and __getitem__ (map style)"
        )
    with naming_errors(f"{name} ({split}): len()"):
        length = dataset_length(dataset)
    if length == 0:
        raise DataError(f"{name}: no sample for {'training' if split == 'train' else 'validation'}")
    return dataset


def _split_argument(function: Any, node: Mapping[str, Any], name: str, split: str) -> dict[str, Any]:
    """The argument that tells this callable which split to return."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: cannot be called: {error}") from error
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    choices = {"split": split, "train": split == "train"}
    free = [key for key in choices if key not in node]
    key = next((key for key in free if key in parameters), free[0] if takes_any and free else None)
    if key is None:
        raise DataError(
            f'{name}: takes neither `split` ("train" or "val") nor `train` (True or False), so it cannot '
            "tell training from validation; name a function that takes one of them and returns the dataset"
        )
    return {key: choices[key]}


def _prepare_images(
    train: UserDataset, val: UserDataset, collate: Collate, config: DataConfig
) -> tuple[int | None, tuple[int, int] | None]:
    """Channels and size of an input, from a few samples; sets the transforms for Pillow images."""
    step = max(1, len(train) // _NUM_PROBED)
    with preserved_generators():
        samples = [train[index] for index in range(0, len(train), step)[:_NUM_PROBED]]
        samples.append(val[0])  # an error there must show now, not after the first epoch
        if train.raw:
            return _shape_of([collate([sample]).inputs for sample in samples], ndim=4)
    images = [sample[0] for sample in samples if isinstance(sample[0], Image)]
    if not images:
        return _shape_of([sample[0] for sample in samples], ndim=3)
    sizes = {(image.height, image.width) for image in images}
    size = as_size(config.IMG_SIZE, sizes.pop() if len(sizes) == 1 else (224, 224))
    channels = 1 if all(image.mode in _GREY_MODES for image in images) else 3
    train.channels = val.channels = channels
    train.transform, val.transform = build_transforms(config.AUGMENT, size, channels)
    return channels, size


def _shape_of(inputs: list[Any], ndim: int) -> tuple[int | None, tuple[int, int] | None]:
    """Channels and size of image tensors; each is None where the tensors differ in it."""
    if not all(isinstance(value, Tensor) and value.ndim == ndim for value in inputs):
        return None, None
    channels = {int(value.shape[-3]) for value in inputs}
    sizes = {(int(value.shape[-2]), int(value.shape[-1])) for value in inputs}
    return (channels.pop() if len(channels) == 1 else None, sizes.pop() if len(sizes) == 1 else None)
