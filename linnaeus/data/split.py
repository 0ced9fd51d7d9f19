"""Holds samples out for validation where the data has no split of its own. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from hashlib import blake2b


def stratified_split(
    keys: Sequence[str], strata: Sequence[Hashable], fraction: float
) -> tuple[list[int], list[int]]:
    """Hold out a fraction of each stratum for validation; each keeps at least one training sample.

    The choice depends on the keys alone, not on a seed or on the order of the samples, so accuracies of
    different runs, machines and versions are comparable. Rounding carries over from stratum to stratum, so
    that the total is right even where strata are small.

    Args:
        keys: a permanent name of each sample, such as its relative path.
        strata: the stratum of each sample, such as its class.
        fraction: fraction of the samples to hold out.

    Returns:
        Positions of the training and of the validation samples, each ascending.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    digests = [blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys]
    for position in sorted(range(len(keys)), key=lambda i: (digests[i], keys[i])):
        members[strata[position]].append(position)
    val: list[int] = []
    seen = 0
    for stratum in sorted(members, key=repr):
        seen += len(members[stratum])
        wanted = round(fraction * seen) - len(val)
        val += members[stratum][: max(0, min(wanted, len(members[stratum]) - 1))]
    held_out = set(val)
    return [i for i in range(len(keys)) if i not in held_out], sorted(val)
