"""What a user's dataset declares: its taxonomy, its targets as labels, and errors that name its code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from linnaeus.config.instantiate import place_of
from linnaeus.data.taxonomy import UNKNOWN, Level, Taxonomy, require_classes
from linnaeus.errors import DataError, LinnaeusError

ABSENT = object()
"""Returned for a missing attribute, as None may be the value of one."""

_MAX_NESTING = 10


@contextmanager
def naming_errors(where: str) -> Iterator[None]:
    """Turn any error of a user's code into a `DataError` with its type, its text and the user's line.

    The full traceback goes along as a note, which Python shows but a one-line message does not.
    """
    try:
        yield
    except LinnaeusError:
        raise
    except Exception as error:
        text = " ".join([f"{type(error).__name__}:", *str(error).split()]).removesuffix(":")
        wrapped = DataError(f"{where}: {text}{place_of(error)}")
        wrapped.add_note("".join(traceback.format_exception(error)))
        raise wrapped from error


def describe(value: Any) -> str:
    """Type and size of a value, for messages."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list | Mapping):
        return f"a {kind} of {len(value)}"
    return f"{value!r}" if isinstance(value, int | float | str) else f"a {kind}"


def target_row(target: Any, taxonomy: Taxonomy, where: str) -> Tensor:
    """The labels of a sample, from an int, a tensor, a sequence of ints or {name of the level: int}.

    Returns:
        Tensor [R], int64, one label per level; -1 is unknown, as are levels missing from a mapping.

    Raises:
        DataError: another type, another number of labels, or a label that the level does not have.
    """
    names = taxonomy.names
    if isinstance(target, Mapping):
        strange = [str(name) for name in target if name not in names]
        if strange:
            raise DataError(f"{where}: {', '.join(strange)} not among the taxonomic ranks {', '.join(names)}")
        target = [target.get(name, UNKNOWN) for name in names]
    try:
        row = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        row = torch.empty(0)
    if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool or row.numel() != len(names):
        raise DataError(
            f"{where}: {describe(target)}, but {len(names)} whole number(s) are needed: {', '.join(names)}; "
            "for targets that are no labels, set the dataset's attribute `taxonomy` to None"
        )
    row = row.reshape(-1).to(torch.int64)
    for label, level in zip(row.tolist(), taxonomy.levels, strict=True):
        if not UNKNOWN <= label < len(level.classes):
            raise DataError(
                f"{where}: {label} at taxonomic rank {level.name!r}, which has {len(level.classes)} classes"
            )
    return row


def find_taxonomy(dataset: Any, name: str) -> Taxonomy | None:
    """The taxonomy that a user's dataset declares; None where it declares none, or sets `taxonomy` to None.

    Raises:
        DataError: an attribute of another type, or a level with fewer than two classes.
    """
    with naming_errors(f"{name}: its taxonomy"):
        declared = attribute_of(dataset, "taxonomy")
        for attribute in ("classes", "num_classes"):
            classes = attribute_of(dataset, attribute)
            if declared is ABSENT and classes is not ABSENT and classes is not None:
                declared = {"class": classes}
    if declared is ABSENT or declared is None:
        return None
    if isinstance(declared, Taxonomy):
        taxonomy = declared
    elif isinstance(declared, Mapping):
        levels = tuple(Level(str(level), _class_names(classes, name)) for level, classes in declared.items())
        taxonomy = Taxonomy(levels)
    else:
        raise DataError(f"{name}: taxonomy is {describe(declared)}; it must be a Taxonomy or {{rank: names}}")
    require_classes(taxonomy, name, "give each taxonomic rank two classes or more")
    return taxonomy


def attribute_of(dataset: Any, attribute: str) -> Any:
    """An attribute of a dataset, or of the dataset that it is a subset of; `ABSENT` where neither has it."""
    for _ in range(_MAX_NESTING):
        value = getattr(dataset, attribute, ABSENT)
        if value is not ABSENT or not hasattr(dataset, "dataset"):
            return value
        dataset = dataset.dataset
    return ABSENT


def all_targets(dataset: Any, taxonomy: Taxonomy, name: str) -> Tensor | None:
    """The labels of all samples of a user's dataset, from its attribute `targets`, without reading a sample.

    It holds one target for each sample, in any form that `target_row` takes, or {name of the level: labels}.
    A `target_transform` of the dataset, as torchvision's have, is applied. For a `Subset`, the targets are
    those of the dataset in it at the subset's indices.

    Returns:
        Tensor [N, R], int64, -1 where unknown; None where there is no such attribute.

    Raises:
        DataError: targets of another form or number.
    """
    targets = getattr(dataset, "targets", None)
    if targets is None:
        inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
        if inner is None or indices is None:
            return None
        rows = all_targets(inner, taxonomy, name)
        return None if rows is None else rows[torch.as_tensor(indices, dtype=torch.int64)]
    with naming_errors(f"{name}: its targets"):
        transform = getattr(dataset, "target_transform", None)
        if transform is not None:
            targets = [transform(target) for target in targets]
        rows = _rows(targets, taxonomy, name)
        num_samples = len(dataset)
    if len(rows) != num_samples:
        raise DataError(f"{name}: its `targets` are {len(rows)}, but it has {num_samples} samples")
    return rows


def _rows(targets: Any, taxonomy: Taxonomy, name: str) -> Tensor:
    """Targets of all samples as labels [N, R]."""
    if isinstance(targets, Mapping):
        columns = {level: torch.as_tensor(targets[level]) for level in taxonomy.names if level in targets}
        num_samples = len(next(iter(columns.values()), ()))
        unknown = torch.full((num_samples,), UNKNOWN)
        targets = torch.stack([columns.get(level, unknown) for level in taxonomy.names], dim=1)
    if isinstance(targets, list | tuple) and any(isinstance(target, Mapping) for target in targets):
        targets = torch.stack([target_row(target, taxonomy, name) for target in targets])
    rows = torch.as_tensor(targets)
    num_levels = len(taxonomy.levels)
    is_whole = not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
    if rows.ndim not in (1, 2) or rows.numel() != len(rows) * num_levels or not is_whole:
        raise DataError(
            f"{name}: its `targets` are {describe(rows)}; they must be {num_levels} whole number(s) for each "
            f"sample: {', '.join(taxonomy.names)}"
        )
    rows = rows.reshape(len(rows), num_levels).to(torch.int64)
    for labels, level in zip(rows.unbind(dim=1), taxonomy.levels, strict=True):
        strange = labels[(labels < UNKNOWN) | (labels >= len(level.classes))]
        if len(strange):
            raise DataError(
                f"{name}: its `targets` have {int(strange[0])} at taxonomic rank {level.name!r}, which has "
                f"{len(level.classes)} classes"
            )
    return rows


def _class_names(classes: Any, name: str) -> tuple[str, ...]:
    if isinstance(classes, Integral):
        return tuple(str(label) for label in range(int(classes)))
    if isinstance(classes, str) or not hasattr(classes, "__iter__"):
        raise DataError(f"{name}: classes must be names or their number, not {describe(classes)}")
    return tuple(
        ", ".join(map(str, entry)) if isinstance(entry, tuple | list) else str(entry) for entry in classes
    )
