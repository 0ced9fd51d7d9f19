"""The loss: cross-entropy for each level of the taxonomy, or a user's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from linnaeus.config.instantiate import call_target, is_target
from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.errors import ConfigError

_LIBRARIES = ("torch", "torchvision", "timm")
_WITH_CLASS_WEIGHTS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)


def logits_per_level(outputs: Any, level_names: Sequence[str]) -> tuple[Tensor, ...]:
    """The logits of each level, coarse to fine, from any supported form of a model's outputs.

    Args:
        outputs: a tensor (one level), a sequence in level order, or a mapping from level names.
        level_names: names of the levels, coarse to fine.

    Raises:
        ConfigError: the outputs have another form, or are not one per level.
    """
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    if isinstance(outputs, Mapping):
        missing = [name for name in level_names if name not in outputs]
        if missing:
            raise ConfigError(
                f"MODEL: its output has no key for rank {missing[0]!r}; it has {sorted(outputs)}"
            )
        outputs = tuple(outputs[name] for name in level_names)
    if not isinstance(outputs, Sequence):
        raise ConfigError(
            f"MODEL: it gives a {type(outputs).__name__}; the loss needs a tensor of logits, a sequence of "
            f"them or a mapping from the ranks {list(level_names)}"
        )
    if len(outputs) != len(level_names):
        raise ConfigError(
            f"MODEL: it gives {len(outputs)} outputs for {len(level_names)} ranks {list(level_names)}"
        )
    return tuple(outputs)


class TaxonomicCrossEntropy(nn.Module):
    """Weighted mean over the levels; the loss of a level is its cross-entropy, averaged over all samples.

    A sample whose label is unknown at a level adds 0 to that level and counts in the average. The divisor is
    therefore the number of samples and not that of known labels, so that the gradient of an effective batch
    does not depend on how it is split into micro-batches and processes.

    Args:
        level_names: R names, coarse to fine.
        level_weights: R weights; they are normalised to sum to 1.
        label_smoothing: in [0, 1).
        num_classes: R numbers of classes, checked against the model's outputs; None does not check.
    """

    def __init__(
        self,
        level_names: Sequence[str],
        level_weights: Sequence[float],
        label_smoothing: float = 0.0,
        num_classes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.level_names = tuple(level_names)
        self.level_weights = tuple(weight / sum(level_weights) for weight in level_weights)
        self.label_smoothing = label_smoothing
        self.num_classes = None if num_classes is None else tuple(num_classes)

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss.

        Args:
            outputs: logits [B, num_classes[r]] per level; see `logits_per_level`.
            targets: labels [B, R], -1 where unknown.

        Returns:
            A scalar, the mean over the B samples; a level without a known label in the batch adds 0.
        """
        logits_by_level = logits_per_level(outputs, self.level_names)
        if self.num_classes is not None:
            self._check(logits_by_level, self.num_classes)
        losses = [
            weight * self._level_loss(logits, targets[:, level])
            for level, (logits, weight) in enumerate(zip(logits_by_level, self.level_weights, strict=True))
        ]
        return torch.stack(losses).sum()

    def _check(self, logits_by_level: Sequence[Tensor], num_classes: Sequence[int]) -> None:
        for name, logits, count in zip(self.level_names, logits_by_level, num_classes, strict=True):
            if logits.ndim != 2 or logits.shape[1] != count:
                raise ConfigError(
                    f"MODEL: its output for rank {name!r} has the shape {list(logits.shape)}; "
                    f"it must be [batch, {count}], one logit per class"
                )

    def _level_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = functional.cross_entropy(
            logits, labels, ignore_index=UNKNOWN, reduction="sum", label_smoothing=self.label_smoothing
        )
        return total / len(labels)


class SingleRank(nn.Module):
    """A library's loss over one taxonomic rank: it gets logits [B, C] and labels [B], and no tuples.

    Args:
        loss: callable (logits, labels) -> scalar.
        level_name: name of the rank, for messages.
    """

    def __init__(self, loss: nn.Module, level_name: str) -> None:
        super().__init__()
        self.loss = loss
        self.level_name = level_name

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss.

        Args:
            outputs: logits [B, C], in any form that `logits_per_level` takes.
            targets: labels [B, 1].
        """
        (logits,) = logits_per_level(outputs, (self.level_name,))
        return self.loss(logits, targets[:, 0])  # type: ignore[no-any-return]


def build_loss(node: Any, taxonomy: Taxonomy | None, device: torch.device | None = None) -> nn.Module:
    """Build the loss.

    Args:
        node: `LossConfig`, or a `_target_` node of a callable (outputs, targets) -> scalar, a mean over the
            samples. Lists of numbers arrive as tensors where the signature asks for a tensor.
        taxonomy: levels and classes of the labels; None when a user's dataset has none.
        device: of those tensors; None is torch's default.

    Raises:
        ConfigError: weights that do not match the ranks, a dataset without labels and no `_target_`, or a
            loss of a library for several ranks.
    """
    if is_target(node):
        return _custom_loss(node, taxonomy, device)
    if taxonomy is None:
        raise ConfigError("LOSS: the dataset has no class labels; name your own loss in LOSS._target_")
    names = list(taxonomy.names)
    weights = node.RANK_WEIGHTS if node.RANK_WEIGHTS is not None else [1.0] * len(names)
    if len(weights) != len(names):
        raise ConfigError(
            f"LOSS.RANK_WEIGHTS: {weights} has {len(weights)} weights for {len(names)} ranks {names}"
        )
    if sum(weights) <= 0:
        raise ConfigError(f"LOSS.RANK_WEIGHTS: {weights} are all 0; at least one rank must count")
    return TaxonomicCrossEntropy(names, weights, node.LABEL_SMOOTHING, list(taxonomy.num_classes.values()))


def _custom_loss(
    node: Mapping[str, Any], taxonomy: Taxonomy | None, device: torch.device | None
) -> nn.Module:
    name = node["_target_"]
    # torch's losses otherwise take the label -1, which is unknown, for a mistake.
    offer = {"taxonomy": taxonomy, "ignore_index": UNKNOWN} if taxonomy is not None else {"taxonomy": None}
    loss = call_target(node, "LOSS", offer=offer, convert=partial(_as_tensor, device=device))
    if not isinstance(loss, nn.Module):
        raise ConfigError(f"LOSS: {name} gave a {type(loss).__name__}, not an nn.Module")
    if taxonomy is None or not _is_of_a_library(loss):
        return loss
    counts = taxonomy.num_classes
    if len(counts) > 1:
        raise ConfigError(
            f"LOSS: {name} takes logits and labels of one taxonomic rank, but there are {len(counts)} "
            f"({', '.join(counts)}). With several, a loss gets a tuple of logits, [batch, classes] for each "
            f"rank, and labels [batch, {len(counts)}]: name one of your own, or leave out LOSS._target_ for "
            "the built-in cross-entropy (LOSS.LABEL_SMOOTHING, LOSS.RANK_WEIGHTS)"
        )
    ((level_name, num_classes),) = counts.items()
    weight = getattr(loss, "weight", None)
    if isinstance(loss, _WITH_CLASS_WEIGHTS) and weight is not None and weight.shape != (num_classes,):
        raise ConfigError(
            f"LOSS.weight: {weight.tolist()} has {weight.numel()} weights for {num_classes} classes of "
            f"{level_name!r}"
        )
    return SingleRank(loss, level_name)


def _is_of_a_library(loss: nn.Module) -> bool:
    """Whether a loss computes as torch, torchvision or timm have written it, which knows no ranks."""
    forward = type(loss).forward
    return forward is not nn.Module.forward and forward.__module__.partition(".")[0] in _LIBRARIES


def _as_tensor(parameter: inspect.Parameter, value: Any, device: torch.device | None) -> Any:
    """A list of numbers as a tensor, where the parameter's annotation names one."""
    if not isinstance(value, list) or not re.search(r"\bTensor\b", str(parameter.annotation)):
        return value
    try:
        return torch.tensor(value, dtype=torch.get_default_dtype(), device=device)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{parameter.name} must be a list of numbers, not {value}: {error}") from None
