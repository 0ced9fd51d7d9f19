"""What figures of an evaluation are computed from: counts that are streamed, and summed over processes.

A level with C classes has C x C pairs of a true and a predicted class, of which most never occur: only those
that do are kept. Shapes: B is the number of samples in a batch, R the number of levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.dist import World
from linnaeus.training.losses import log_probabilities, logits_per_level

NUM_BINS = 15
"""Bins of equal width over the confidences 0 to 1."""
HELD_ON_DEVICE = 8192
"""Samples whose predictions are kept on the device before they are copied to the host, so that few batches
synchronise."""
HELD_ON_HOST = 1 << 20
"""Pairs that wait on the host to be counted together."""


@dataclass
class LevelCounts:
    """The counts of one level.

    Attributes:
        num_classes: C.
        pairs: [K], int64, ascending: the pairs of classes that occurred, as true x C + predicted.
        counts: [K], int64: samples of each pair.
        bins: [3, NUM_BINS], float64: samples, sum of confidences and correct ones in each bin of confidence.
        cross_entropy: sum over the samples of the negative log-probability of their class.
        num_unlabelled: samples without a label at this level, which count nowhere else.
        num_not_finite: samples, with or without a label, whose outputs hold NaN or infinity.
    """

    num_classes: int
    pairs: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    bins: Tensor = field(default_factory=lambda: torch.zeros(3, NUM_BINS, dtype=torch.float64))
    cross_entropy: float = 0.0
    num_unlabelled: int = 0
    num_not_finite: int = 0

    @property
    def num_samples(self) -> int:
        """Samples with a label."""
        return int(self.counts.sum())

    def add(self, other: LevelCounts) -> None:
        """Add the counts of other samples."""
        self._count(torch.cat([self.pairs, other.pairs]), torch.cat([self.counts, other.counts]))
        self.bins += other.bins
        self.cross_entropy += other.cross_entropy
        self.num_unlabelled += other.num_unlabelled
        self.num_not_finite += other.num_not_finite

    def _count(self, pairs: Tensor, counts: Tensor) -> None:
        self.pairs, positions = torch.unique(pairs, return_inverse=True)
        self.counts = torch.zeros_like(self.pairs).index_add_(0, positions, counts)


class Tally:
    """Counts the predictions of all batches.

    Args:
        taxonomy: levels of the labels; None counts nothing.
        are_logs: whether the model gives log-probabilities, and not logits.
    """

    def __init__(self, taxonomy: Taxonomy | None, *, are_logs: bool = False) -> None:
        self._are_logs = are_logs
        self.level_names: Sequence[str] = () if taxonomy is None else taxonomy.names
        self._num_classes = [] if taxonomy is None else list(taxonomy.num_classes.values())
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._levels = [LevelCounts(count) for count in self._num_classes]
        self._on_device: list[tuple[Tensor, Tensor]] = []
        self._on_host: list[list[Tensor]] = [[] for _ in self._num_classes]

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch.

        Args:
            outputs: the model's outputs.
            targets: labels [B, R], -1 where unknown.
        """
        if not self.level_names:
            return
        labels, values = [], []
        for level, logits in enumerate(logits_per_level(outputs, self.level_names)):
            known = targets[:, level].clamp_min(0)
            log_p = log_probabilities(logits, are_logs=self._are_logs)
            predicted = logits.argmax(dim=1)
            chosen = torch.stack([predicted, known], dim=1)
            values.append(log_p.gather(1, chosen))
            labels.append(predicted)
        predictions = torch.stack([targets, torch.stack(labels, dim=1)])
        self._on_device.append((predictions, torch.stack(values, dim=1)))
        if sum(len(part[1]) for part in self._on_device) >= HELD_ON_DEVICE:
            self._flush()

    def _flush(self) -> None:
        """Count what waits on the device."""
        if not self._on_device:
            return
        targets, predictions = torch.cat([part[0] for part in self._on_device], dim=1).cpu()  # [N, R] each
        log_p = torch.cat([part[1] for part in self._on_device]).cpu().double()  # [N, R, 2]
        self._on_device = []
        for level, counts in enumerate(self._levels):
            known = targets[:, level] != UNKNOWN
            true, predicted = targets[known, level], predictions[known, level]
            counts.num_unlabelled += int((~known).sum())
            counts.num_not_finite += int(log_p[:, level, 0].isnan().sum())
            counts.cross_entropy -= float(log_p[known, level, 1].sum())
            counts.bins += _binned(log_p[known, level, 0].exp(), true == predicted)
            waiting = self._on_host[level]
            waiting.append(true * counts.num_classes + predicted)
            if sum(map(len, waiting)) >= HELD_ON_HOST:
                self._merge(level)

    def _merge(self, level: int) -> None:
        counts = self._levels[level]
        pairs, occurrences = torch.unique(torch.cat(self._on_host[level]), return_counts=True)
        counts.add(LevelCounts(counts.num_classes, pairs, occurrences))
        self._on_host[level] = []

    def collect(self, world: World) -> list[LevelCounts] | None:
        """The counts of all processes on rank 0, None elsewhere; a collective, which all must call."""
        self._flush()
        for level, waiting in enumerate(self._on_host):
            if waiting:
                self._merge(level)
        gathered = world.gather_on_host(self._levels)
        if gathered is None:
            return None
        first, *others = gathered
        for levels in others:
            for total, counts in zip(first, levels, strict=True):
                total.add(counts)
        return list(first)


def _binned(confidences: Tensor, is_correct: Tensor) -> Tensor:
    """Samples, sum of confidences and correct ones [3, NUM_BINS] by confidence [N], float64.

    A bin has its lower edge and not its upper one, as in torchmetrics; the last one has both. Edges are
    those of float32, as the confidences.
    """
    edges = torch.linspace(0, 1, NUM_BINS + 1)
    bins = (torch.bucketize(confidences.float(), edges, right=True) - 1).clamp(0, NUM_BINS - 1)
    columns = torch.stack([torch.ones_like(confidences), confidences, is_correct.double()])
    return torch.zeros(3, NUM_BINS, dtype=torch.float64).index_add_(1, bins, columns)
