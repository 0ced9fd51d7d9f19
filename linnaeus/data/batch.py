"""A batch, its transfer to the device, and synthetic batches of any size for the batch-size search."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from linnaeus.autobatch import nest
from linnaeus.autobatch.state.rng import preserved_generators
from linnaeus.runtime.errors import DataError
from linnaeus.runtime.rng import derive_seed, seed_generators


class Batch(NamedTuple):
    """Input of one training or validation step.

    Attributes:
        inputs: pixels, uint8 tensor [B, C, H, W], which the device normalizes; where a user's dataset gives
            tensors, any nest of them.
        targets: int64 tensor [B, L], one column per level of the taxonomy, -1 where unknown; with several
            labels per sample, float32 tensor [B, C] of 1, 0, and -1 where unknown; for a user's dataset
            without a taxonomy, its targets as they are.
        choices: the loader's random choices for transforms on the device; see `DeviceTransform`.
    """

    inputs: Any
    targets: Any
    choices: Mapping[str, Any] | None = None


def describe(value: Any) -> str:
    """Type and size of a value, for messages."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list | Mapping):
        return f"a {kind} of {len(value)}"
    return f"{value!r}" if isinstance(value, int | float | str) else f"a {kind}"


def batch_size(batch: Batch) -> int:
    """Return the number of samples in a batch.

    The length of the targets, or else of the inputs, where that is a tensor; otherwise the length that all
    tensors in the batch share; otherwise, as detection models have it, the length of the list of inputs.

    Raises:
        DataError: there is no tensor with a dimension.
    """
    for part in (batch.targets, batch.inputs):
        if isinstance(part, Tensor) and part.ndim:
            return len(part)
    lengths = [len(tensor) for tensor in nest.tensors(batch) if tensor.ndim]
    if not lengths:
        raise DataError("the batch holds no tensor with a batch dimension")
    if len(set(lengths)) > 1 and isinstance(batch.inputs, tuple | list):
        return len(batch.inputs)
    return lengths[0]


def to_device(batch: Batch, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
    """Move every tensor of a batch, in nests of tuples, lists and dicts too.

    `non_blocking` does not wait for copies from page-locked memory.
    """

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=non_blocking) if hasattr(leaf, "to") else leaf

    inputs, targets = (nest.map_leaves(move, part) for part in batch[:2])
    return Batch(inputs, targets, batch.choices)


class CopiedAhead(Iterator[Batch]):
    """Batches on a device, each copied on its own stream while the step before it runs.

    Two batches are on the device at any time. A copy begins when the steps before it have ended. Their memory
    belongs to the current stream, so the allocator reuses it normally. An error of the next batch is raised
    when that batch is requested.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Batch | Exception = self._copy()

    def _copy(self) -> Batch | Exception:
        try:
            batch = next(self._batches)
            if self._stream is None:
                return to_device(batch, self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            inputs, targets = (nest.map_leaves(self._move, part) for part in batch[:2])
            return Batch(inputs, targets, batch.choices)
        except StopIteration:
            return StopIteration()  # without a traceback, which would refer to this object
        except Exception as error:
            return error

    def _move(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_cuda:
            return leaf.to(self._device) if hasattr(leaf, "to") else leaf
        place = torch.empty_like(leaf, device=self._device)
        with torch.cuda.stream(self._stream):
            return place.copy_(leaf, non_blocking=True)

    def __next__(self) -> Batch:
        batch = self._next
        if isinstance(batch, Exception):
            raise batch
        self._wait()
        self._next = self._copy()
        return batch

    def __del__(self) -> None:
        self._wait()  # the memory of a copy under way must not be used for anything else

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class BatchSpec:
    """Makes batches of any size like the loader's, without a loader, by repeating a few real samples.

    Where collating only stacks or concatenates, a batch is filled on the device, and equals the collated
    samples bit for bit. Where it does more (shuffles, packs, counts), the repeated samples are collated.

    Args:
        dataset: map-style; of `num_samples`, chosen by the seed, those with the largest shape are repeated.
        collate: turns samples into a `Batch`.
        num_samples: samples to look at.
        seed: for datasets and collate functions that draw random numbers. The state of the global random
            generators is restored.
        choose: draws the `choices` of a batch; None where the device only normalizes.

    Raises:
        DataError: the dataset is empty.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Batch],
        num_samples: int,
        seed: int = 0,
        choose: Callable[[Batch], Mapping[str, Any] | None] | None = None,
    ) -> None:
        length = len(dataset)  # type: ignore[arg-type]
        if length == 0:
            raise DataError("the dataset has no sample to take the shape of a batch from")
        groups: dict[Any, list[Any]] = {}
        with preserved_generators():
            for index in random.Random(seed).sample(range(length), min(num_samples, length)):
                seed_generators(derive_seed(seed, index))
                sample = dataset[index]
                shapes = tuple(tuple(tensor.shape) for tensor in nest.tensors(collate([sample])))
                groups.setdefault(shapes, []).append(sample)
        self.samples = groups[max(groups, key=lambda shapes: sum(map(math.prod, shapes)))]
        self.collate = collate
        self.seed = seed
        self.choose = choose
        self.tensor_bytes = [
            nest.num_bytes(leaf) for leaf in nest.leaves(self._collate(self.samples[:1])[:2])
        ]
        self._base = self._collate(self.samples)
        self._grows = _growing_leaves(self.samples, self._collate)

    def make(self, n: int, device: torch.device | str) -> Batch:
        """A batch of n samples on a device. Making it takes no more device memory than the batch itself."""
        if self._grows is None:
            return to_device(self._collate(list(islice(cycle(self.samples), n))), device)
        grows = iter(self._grows)

        def fill(leaf: Any) -> Any:
            if not next(grows):
                return leaf.to(device) if isinstance(leaf, Tensor) else leaf
            return _filled(leaf, len(leaf) // len(self.samples) * n, device)

        inputs, targets = (nest.map_leaves(fill, part) for part in self._base[:2])
        return Batch(inputs, targets, self._base.choices)

    def load(self, n: int) -> Batch:
        """Return a batch of n samples on the host, made as a loader in this process makes it.

        Each sample is a copy until they are collated. The C library does not return the memory of small
        samples to the system, so a process that loads data holds more than its batch.
        """

        def own(leaf: Any) -> Any:
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        return self._collate(
            [nest.map_leaves(own, sample) for sample in islice(cycle(self.samples), n)]
        )

    def _collate(self, samples: list[Any]) -> Batch:
        with preserved_generators():
            seed_generators(self.seed)
            batch = self.collate(samples)
            return batch if self.choose is None else batch._replace(choices=self.choose(batch))


def _growing_leaves(samples: list[Any], collate: Callable[[list[Any]], Batch]) -> list[bool] | None:
    """Which leaves grow in their first dimension with the batch, or None if collating does more.

    Collating only stacks or concatenates if collating all samples, and one of them again, equals the
    concatenation of the samples collated one by one.
    """
    samples = [*samples, samples[0]]
    joint = collate(samples)[:2]
    singles = [collate([sample])[:2] for sample in samples]
    if any(nest.structure(single) != nest.structure(joint) for single in singles):
        return None
    grows = []
    for whole, *parts in zip(*map(nest.leaves, (joint, *singles)), strict=True):
        stays = all(nest.same(whole, part) for part in parts)
        is_stack = (
            isinstance(whole, Tensor) and whole.ndim and len({part.shape for part in parts}) == 1
        )
        if not stays and not (is_stack and nest.same(whole, torch.cat(parts))):
            return None
        grows.append(not stays)
    return grows


def _filled(base: Tensor, length: int, device: torch.device | str) -> Tensor:
    """`base` repeated along its first dimension up to `length`, written into one allocation on the device."""
    result = torch.empty(length, *base.shape[1:], dtype=base.dtype, device=device)
    filled = min(length, len(base))
    result[:filled].copy_(base[:filled])
    while filled < length:
        more = min(filled, length - filled)
        result[filled : filled + more].copy_(result[:more])
        filled += more
    return result


def is_image_batch(leaf: Any) -> bool:
    """Return whether it is a floating-point tensor of 4 dimensions."""
    return isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()
