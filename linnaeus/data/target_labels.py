"""What a user's dataset says about its classes, and its targets as labels."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from linnaeus.data.taxonomy import UNKNOWN, Rank, Taxonomy, require_classes
from linnaeus.data.user_code import describe, naming_errors
from linnaeus.errors import DataError

MISSING = object()
"""Stands for an attribute that is not there, as None may be its value."""

_MAX_NESTING = 10


def target_row(target: Any, taxonomy: Taxonomy, where: str) -> Tensor:
    """One label per rank from an int, a tensor, a sequence of ints or {rank: int}.

    Returns:
        Tensor [R], int64; -1 is unknown. Ranks that a mapping leaves out are unknown.

    Raises:
        DataError: another type, another number of labels, or a label that the rank does not have.
    """
    names = taxonomy.names
    if isinstance(target, Mapping):
        strange = [str(name) for name in target if name not in names]
        if strange:
            raise DataError(f"{where}: {', '.join(strange)} not among the ranks {', '.join(names)}")
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
    for label, rank in zip(row.tolist(), taxonomy.ranks, strict=True):
        if not UNKNOWN <= label < len(rank.classes):
            raise DataError(f"{where}: {label} at rank {rank.name!r}, which has {len(rank.classes)} classes")
    return row


def find_taxonomy(dataset: Any, name: str) -> Taxonomy | None:
    """The taxonomy that a user's dataset declares; None where it has none, or sets `taxonomy` to None.

    Raises:
        DataError: an attribute of another type, or a rank with fewer than two classes.
    """
    with naming_errors(f"{name}: its taxonomy"):
        declared = attribute_of(dataset, "taxonomy")
        for attribute in ("classes", "num_classes"):
            classes = attribute_of(dataset, attribute)
            if declared is MISSING and classes is not MISSING and classes is not None:
                declared = {"class": classes}
    if declared is MISSING or declared is None:
        return None
    if isinstance(declared, Taxonomy):
        taxonomy = declared
    elif isinstance(declared, Mapping):
        ranks = tuple(Rank(str(rank), _class_names(classes, name)) for rank, classes in declared.items())
        taxonomy = Taxonomy(ranks)
    else:
        raise DataError(f"{name}: taxonomy is {describe(declared)}; it must be a Taxonomy or {{rank: names}}")
    require_classes(taxonomy, name, "give each rank two classes or more")
    return taxonomy


def attribute_of(dataset: Any, attribute: str) -> Any:
    """An attribute of a dataset, or of the one that it is a subset of; `MISSING` where none has it."""
    for _ in range(_MAX_NESTING):
        value = getattr(dataset, attribute, MISSING)
        if value is not MISSING or not hasattr(dataset, "dataset"):
            return value
        dataset = dataset.dataset
    return MISSING


def _class_names(classes: Any, name: str) -> tuple[str, ...]:
    if isinstance(classes, Integral):
        return tuple(str(label) for label in range(int(classes)))
    if isinstance(classes, str) or not hasattr(classes, "__iter__"):
        raise DataError(f"{name}: classes must be names or their number, not {describe(classes)}")
    return tuple(
        ", ".join(map(str, entry)) if isinstance(entry, tuple | list) else str(entry) for entry in classes
    )
