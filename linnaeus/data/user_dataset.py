"""A user's own dataset, named by `_target_` in `DATA.DATASET`."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.config.instantiate import check_arguments, place_of, prepare
from linnaeus.config.schema import DataConfig
from linnaeus.data.batch import Batch, describe
from linnaeus.data.bundle import Collate, DataBundle, as_size, collate_pairs
from linnaeus.data.image import DEFAULT_DECODING, Decoding, upright
from linnaeus.data.taxonomy import UNKNOWN, Level, Taxonomy, require_classes
from linnaeus.data.transforms import Preprocessing, Transform, build_transforms
from linnaeus.runtime.errors import DataError, LinnaeusError
from linnaeus.runtime.rng import seed_generators
from linnaeus.runtime.words import several

T = TypeVar("T")

_NUM_PROBED = 8
_GREY_MODES = frozenset(("1", "L", "LA", "I", "I;16", "F"))
_ABSENT = object()
"""Stands for a missing attribute, as None may be the value of one."""


@dataclass(eq=False)
class UserDataset(Dataset[Any]):
    """A user's dataset, whose Pillow images become tensors and whose targets become one label per level.

    Attributes:
        dataset: map-style dataset whose items are (input, target).
        name: its `_target_`, for messages.
        taxonomy: levels of the targets; None leaves targets as they are.
        raw: return items untouched, for a dataset with its own `collate_fn`.
    """

    dataset: Any
    name: str
    taxonomy: Taxonomy | None
    raw: bool = field(kw_only=True)
    transform: Transform | None = None
    channels: int = 3
    decoding: Decoding = DEFAULT_DECODING
    _targets: dict[int | tuple[int, ...], Tensor] = field(default_factory=dict, init=False)
    """The target [L] of each label, or labels of all levels, met so far."""

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows: Tensor) -> UserDataset:
        """Return the samples at these indices."""
        return replace(self, dataset=Subset(self.dataset, rows.tolist()))

    @property
    def targets(self) -> Tensor | None:
        """Labels [N, L] of all samples, from the dataset's own `targets`; None if it has none.

        Raises:
            DataError: they are of another form, or not one for each sample.
        """
        return (
            None if self.taxonomy is None else _all_targets(self.dataset, self.taxonomy, self.name)
        )

    def __getitem__(self, index: int) -> Any:
        try:
            item = self.dataset[index]
        except LinnaeusError:
            raise
        except Exception as error:
            raise _named(error, f"{self.name}: sample {index}") from error
        if self.raw:
            return item
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{self.name}: sample {index} is {describe(item)}; it must be a pair (input, target), "
                "or the dataset must have a `collate_fn` that makes (inputs, targets) of a list of samples"
            )
        inputs, target = item
        if self.transform is not None and isinstance(inputs, Image):
            with _naming_errors(f"{self.name}: image of sample {index}"):
                inputs = self.transform(upright(inputs, self.channels, self.decoding))
        if type(target) is int and target in self._targets:  # the usual one, first
            return inputs, self._targets[target]
        if self.taxonomy is None:
            return inputs, target
        label = None if self.taxonomy.is_multilabel else _plain_label(target)
        if label is not None and label in self._targets:
            return inputs, self._targets[label]
        where = f"{self.name}: target of sample {index}"
        if self.taxonomy.is_multilabel:
            return inputs, _label_set(target, self.taxonomy, where)
        target = _labels(_row(target, self.taxonomy, where), None, self.taxonomy, where)[0]
        if label is not None:
            self._targets[label] = target
        return inputs, target


def _plain_label(target: Any) -> int | tuple[int, ...] | None:
    """Return a target as Python's own whole numbers; None for anything else."""
    value = target.tolist() if hasattr(target, "tolist") else target
    if isinstance(value, list | tuple) and all(type(each) is int for each in value):
        return tuple(value)
    return value if type(value) is int else None


@dataclass(eq=False)
class UserCollate:
    """A dataset's own `collate_fn`, whose result becomes a `Batch`.

    Given a taxonomy, targets [B] or {name of the level: [B]} become [B, L]. `name` is for messages.
    """

    collate_fn: Callable[[list[Any]], Any]
    name: str
    taxonomy: Taxonomy | None

    def __call__(self, samples: list[Any]) -> Batch:
        """Return the batch of a list of samples."""
        with _naming_errors(f"{self.name}: collate_fn"):
            batch = self.collate_fn(samples)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(
                f"{self.name}: collate_fn gave {describe(batch)}; it must give (inputs, targets)"
            )
        inputs, targets = batch
        if self.taxonomy is not None and self.taxonomy.is_multilabel:
            return Batch(inputs, torch.as_tensor(targets).float())
        if self.taxonomy is not None and isinstance(targets, Mapping):
            targets = torch.stack(
                [torch.as_tensor(targets[name]) for name in self.taxonomy.names], dim=1
            )
        if self.taxonomy is not None and isinstance(targets, Tensor) and targets.ndim == 1:
            targets = targets.unsqueeze(1)
        return Batch(inputs, targets)


def build_user_dataset(
    config: DataConfig,
    *,
    seed: int,
    splits: tuple[str, ...] = ("train", "val"),
    preprocessing: Preprocessing | None = None,
) -> DataBundle:
    """Both splits of a user's dataset. With one of them in `splits`, both are that one.

    The callable is called with `split="train"` and `split="val"` if it takes `split`, else with `train=True`
    and `train=False`; an argument that the node sets is not changed. The global generators are seeded before
    each call, so that a random split in a user's function is the same in both calls and in all ranks.

    Classes come from the dataset's attribute `taxonomy` (a `Taxonomy`, or a mapping from names of levels to
    class names or their number), `classes` (names) or `num_classes`; for a `Subset`, from the dataset in it.
    Its attribute `multilabel`, if true, says that a target is [C]: 1, 0, or -1 (unknown) for each class.

    Pillow images become inputs as `preprocessing` says, if given, else with the augmentation of the
    configuration.

    Raises:
        ConfigError: there is no such class, or an argument of it cannot be made.
        DataError: an unusable dataset, or an error of the user's own code; the message names the `_target_`.
    """
    made = [_build_split(config, split, seed) for split in splits]
    (train, collate), (val, _) = made[0], made[-1]
    name, taxonomy = train.name, train.taxonomy
    if taxonomy is not None and val.taxonomy is not None and taxonomy.levels != val.taxonomy.levels:
        raise DataError(f"{name}: training and validation have different classes")
    val.taxonomy, val.raw = taxonomy, train.raw
    channels, size, preprocessing = _prepare_images(train, val, collate, config, preprocessing)
    report: list[str] = []
    own = [
        attribute
        for attribute, value in getattr(train.dataset, "__dict__", {}).items()
        if isinstance(value, Random | np.random.Generator | np.random.RandomState | torch.Generator)
    ]
    if own:
        report.append(
            f"{name}: own generator {several(own)}: samples that draw from it are the same in each worker "
            "and differ after a resume; draw from the global generators instead"
        )
    if preprocessing is None and config.IMG_SIZE is not None:
        report.append(
            f"{name}: gives tensors, which pass as they are: no DATA.IMG_SIZE and no DATA.AUGMENT"
        )
    if config.ON_BAD_IMAGE == "skip":
        report.append(f"{name}: reads its own images, so DATA.ON_BAD_IMAGE skip has no effect")
    if taxonomy is None:
        report.append(
            f"{name}: no `taxonomy`, `classes` or `num_classes`; targets are passed on as they are"
        )
    return DataBundle(
        train, val, taxonomy, channels, size, collate, report, preprocessing, source=name
    )


def _build_split(config: DataConfig, split: str, seed: int) -> tuple[UserDataset, Collate]:
    node: Mapping[str, Any] = config.DATASET
    name = str(node["_target_"])
    with preserved_generators():
        seed_generators(seed)
        build = prepare(node, "DATA.DATASET")
        argument = _split_argument(build.func, node, name, split)
        check_arguments(build, "DATA.DATASET", argument)
        with _naming_errors(f"{name} ({split})"):
            dataset = build(**argument)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name} gave {describe(dataset)}; a dataset needs __len__ and __getitem__ (map style)"
        )
    with _naming_errors(f"{name} ({split}): len()"):
        length = len(dataset)
    if length == 0:
        raise DataError(f"{name}: no sample for {'training' if split == 'train' else 'validation'}")
    taxonomy = _find_taxonomy(dataset, name)
    collate_fn = _attribute_of(dataset, "collate_fn")
    raw = callable(collate_fn)
    collate: Collate = UserCollate(collate_fn, name, taxonomy) if raw else collate_pairs
    return UserDataset(dataset, name, taxonomy, raw=raw), collate


def _split_argument(
    function: Any, node: Mapping[str, Any], name: str, split: str
) -> dict[str, Any]:
    """Return the argument that tells this callable which split to return."""
    with _naming_errors(name):  # some built-in callables have no signature
        parameters = inspect.signature(function).parameters
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
    train: UserDataset,
    val: UserDataset,
    collate: Collate,
    config: DataConfig,
    preprocessing: Preprocessing | None,
) -> tuple[int | None, tuple[int, int] | None, Preprocessing | None]:
    """Channels and size of an input, from a few samples; sets the transforms for Pillow images."""
    step = max(1, len(train) // _NUM_PROBED)
    with preserved_generators():
        samples = [train[index] for index in range(0, len(train), step)[:_NUM_PROBED]]
        samples.append(val[0])  # an error there must show now, not after the first epoch
        inputs = [collate([sample]).inputs if train.raw else sample[0] for sample in samples]
    images = [image for image in inputs if isinstance(image, Image)]
    if not images:  # tensors, or no images at all
        ndim = 4 if train.raw else 3
        if not all(isinstance(value, Tensor) and value.ndim == ndim for value in inputs):
            return None, None, None
        size = _only((value.shape[-2], value.shape[-1]) for value in inputs)
        return _only(value.shape[-3] for value in inputs), size, None
    if preprocessing is None:
        sizes = _only((image.height, image.width) for image in images)
        channels = 1 if all(image.mode in _GREY_MODES for image in images) else 3
        # Its files are decoded by the dataset itself, so that predict decodes all pixels too.
        decoding = replace(Decoding.of(config), fast=False)
        size = as_size(config.IMG_SIZE, sizes or (224, 224))
        train.transform, preprocessing = build_transforms(config.AUGMENT, size, channels, decoding)
    val.transform = preprocessing.transform()
    train.channels = val.channels = preprocessing.channels
    train.decoding = val.decoding = preprocessing.decoding
    return preprocessing.channels, preprocessing.size, preprocessing


def _only(values: Iterable[T]) -> T | None:
    """Return the value that all are equal to; None where they differ."""
    first, *others = {*values}
    return None if others else first


@contextmanager
def _naming_errors(where: str) -> Iterator[None]:
    """Turn any error of a user's code into a `DataError`."""
    try:
        yield
    except LinnaeusError:
        raise
    except Exception as error:
        raise _named(error, where) from error


def _named(error: Exception, where: str) -> DataError:
    """Return an error of a user's code as a `DataError` with its type, its text and the user's line.

    The full traceback goes along as a note, which Python shows but a one-line message does not.
    """
    text = " ".join([f"{type(error).__name__}:", *str(error).split()]).removesuffix(":")
    named = DataError(f"{where}: {text}{place_of(error)}")
    named.add_note("".join(traceback.format_exception(error)))
    return named


def _attribute_of(dataset: Any, attribute: str) -> Any:
    """An attribute of a dataset, or of the dataset that it is a subset of; `_ABSENT` where neither has it."""
    while not hasattr(dataset, attribute):
        inner = getattr(dataset, "dataset", dataset)
        if inner is dataset:
            return _ABSENT
        dataset = inner
    return getattr(dataset, attribute)


def _find_taxonomy(dataset: Any, name: str) -> Taxonomy | None:
    """The taxonomy that a user's dataset declares; None where it declares none, or sets `taxonomy` to None.

    Raises:
        DataError: an attribute of another type, or a level with fewer than two classes.
    """
    with _naming_errors(f"{name}: its taxonomy"):
        declared = _attribute_of(dataset, "taxonomy")
        for attribute in ("classes", "num_classes"):
            classes = _attribute_of(dataset, attribute)
            if declared is _ABSENT and classes is not _ABSENT and classes is not None:
                declared = {"class": classes}
    if declared is _ABSENT or declared is None:
        return None
    if isinstance(declared, Mapping):
        levels = tuple(
            Level(str(level), _class_names(classes, name)) for level, classes in declared.items()
        )
        declared = Taxonomy(levels)
    if not isinstance(declared, Taxonomy):
        raise DataError(
            f"{name}: taxonomy is {describe(declared)}; it must be a Taxonomy or {{level: names}}"
        )
    if _attribute_of(dataset, "multilabel") is True and not declared.is_multilabel:
        declared = replace(declared, separator=";")
    require_classes(declared, name, "give each level two classes or more")
    return declared


def _class_names(classes: Any, name: str) -> tuple[str, ...]:
    if isinstance(classes, Integral):
        return tuple(str(label) for label in range(int(classes)))
    if isinstance(classes, str) or not hasattr(classes, "__iter__"):
        raise DataError(f"{name}: classes must be names or their number, not {describe(classes)}")
    return tuple(
        ", ".join(map(str, entry)) if isinstance(entry, tuple | list) else str(entry)
        for entry in classes
    )


def _all_targets(dataset: Any, taxonomy: Taxonomy, name: str) -> Tensor | None:
    """The labels of all samples of a user's dataset, from its attribute `targets`, without reading a sample.

    It holds one target for each sample; None if there is no such attribute. A `target_transform`, as in
    torchvision's datasets, is applied. A `Subset` takes the targets of its dataset at its indices.
    """
    targets = getattr(dataset, "targets", None)
    if targets is None:
        inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
        if inner is None or indices is None:
            return None
        rows = _all_targets(inner, taxonomy, name)
        return None if rows is None else rows[torch.as_tensor(indices, dtype=torch.int64)]
    where = f"{name}: its `targets`"
    with _naming_errors(where):
        transform = getattr(dataset, "target_transform", None)
        if transform is not None:
            targets = [transform(target) for target in targets]
        if isinstance(targets, list | tuple):
            targets = [_row(target, taxonomy, where) for target in targets]
        return _labels(targets, len(dataset), taxonomy, where)


def _row(target: Any, taxonomy: Taxonomy, where: str) -> Any:
    """Return the labels of a sample: the values of {level: label} in level order, or the target itself."""
    if not isinstance(target, Mapping):
        return target
    strange = [str(name) for name in target if name not in taxonomy.names]
    if strange:
        levels = ", ".join(taxonomy.names)
        raise DataError(f"{where}: {', '.join(strange)} not among the levels {levels}")
    return [target.get(name, UNKNOWN) for name in taxonomy.names]


def _label_set(target: Any, taxonomy: Taxonomy, where: str) -> Tensor:
    """Return the labels [C] of a sample that has several, float32: 1, 0, or -1 (unknown) for each class."""
    ((level, num_classes),) = taxonomy.num_classes.items()
    with _naming_errors(where):
        row = torch.as_tensor(target).float()
    if row.shape != (num_classes,) or not ((row == 0) | (row == 1) | (row == UNKNOWN)).all():
        raise DataError(
            f"{where}: {describe(target)}, but 1, 0, or -1 where unknown is needed for each of the "
            f"{num_classes} classes of {level}, since the dataset's `multilabel` is True"
        )
    return row


def _labels(values: Any, num_samples: int | None, taxonomy: Taxonomy, where: str) -> Tensor:
    """Labels [N, L], int64, one per level, -1 where unknown, from whole numbers of any type.

    Args:
        values: [N, L], or [N] with one level; without the N for a single sample.
        num_samples: N; None for a single sample.

    Raises:
        DataError: another type, another shape, or a label that the level does not have.
    """
    counts = taxonomy.num_classes
    try:
        rows = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        rows = torch.empty(0)
    is_whole = not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
    found = describe(rows if rows.numel() else values)
    rows = rows[None] if num_samples is None else rows
    rows = rows[:, None] if rows.ndim == len(counts) == 1 else rows
    if not is_whole or rows.shape != (num_samples or 1, len(counts)):
        each = "" if num_samples is None else f" for each of {num_samples} samples"
        raise DataError(
            f"{where}: {found}, but {len(counts)} whole number(s) are "
            f"needed{each}: {', '.join(counts)}; for several labels of a sample set the dataset's attribute "
            "`multilabel` to True, for targets that are no labels `taxonomy` to None"
        )
    rows = rows.to(torch.int64)
    strange = (rows < UNKNOWN) | (rows >= torch.tensor([*counts.values()]))
    if strange.any():
        row, column = strange.nonzero()[0].tolist()
        name = taxonomy.names[column]
        raise DataError(
            f"{where}: {int(rows[row, column])} at level {name!r}, which has {counts[name]} classes"
        )
    return rows
