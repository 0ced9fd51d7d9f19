"""Holding samples out for validation where the data has no split of its own. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from hashlib import blake2b


def stratified_split(
    keys: Sequence[str], strata: Sequence[Hashable], fraction: float
) -> tuple[list[int], list[int]]:
    """Split so that each stratum gives its share to validation, and at least one sample to training.

    The choice depends on the keys alone, never on a seed or on the order of the samples, so accuracies of
    different runs, machines and versions are comparable. Small strata take turns: the total comes out right.

    Args:
        keys: the lasting name of each sample, such as its relative path.
        strata: what to stratify by, one for each sample.
        fraction: share of the samples for validation.

    Returns:
        Positions of the training and of the validation samples, each ascending.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    order = sorted(range(len(keys)), key=lambda i: (_digest(keys[i]), keys[i]))
    for position in order:
        members[strata[position]].append(position)
    val: list[int] = []
    seen = 0
    for stratum in sorted(members, key=repr):
        seen += len(members[stratum])
        wanted = round(fraction * seen) - len(val)
        val += members[stratum][: max(0, min(wanted, len(members[stratum]) - 1))]
    held_out = set(val)
    return [i for i in range(len(keys)) if i not in held_out], sorted(val)


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
