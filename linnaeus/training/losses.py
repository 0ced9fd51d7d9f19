"""The losses: for each level of the taxonomy a built-in one, or a user's own for all."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from timm.loss import AsymmetricLossMultiLabel
from torch import Tensor, nn

from linnaeus.config.instantiate import call_target, is_target
from linnaeus.data.mixing import one_hot
from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.runtime.errors import ConfigError, first_line

STATISTICS = {
    "CLASS_WEIGHTS": "class_weights",
    "LOGIT_ADJUSTMENT": "logit_offsets",
    "POS_WEIGHT": "pos_weights",
}
"""Keys of LOSS that need the training samples of each class, and the buffers that they give the loss."""
_TAKERS = {"LOGIT_ADJUSTMENT": ("cross_entropy", "focal"), "POS_WEIGHT": ("bce",)}
"""Losses that take a key."""

_LIBRARIES = ("torch", "torchvision", "timm")
"""Their losses know no levels."""


def logits_per_level(outputs: Any, level_names: Sequence[str]) -> tuple[Tensor, ...]:
    """Return the logits of each level, coarse to fine, from any supported form of a model's outputs.

    Args:
        outputs: a tensor (one level), a sequence in level order, or a mapping from level names.
        level_names: names of the levels, coarse to fine.

    Raises:
        ConfigError: the outputs have another form, or are not one per level.
    """
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    elif isinstance(outputs, Mapping):
        missing = [name for name in level_names if name not in outputs]
        if missing:
            raise ConfigError(
                f"MODEL: its output has no key for level {missing[0]!r}; it has {sorted(outputs)}"
            )
        outputs = tuple(outputs[name] for name in level_names)
    elif not isinstance(outputs, Sequence):
        raise ConfigError(
            f"MODEL: it gives a {type(outputs).__name__}; the loss needs a tensor of logits, a sequence of "
            f"them or a mapping from the levels {list(level_names)}"
        )
    if len(outputs) != len(level_names):
        raise ConfigError(
            f"MODEL: it gives {len(outputs)} outputs for {len(level_names)} levels {list(level_names)}"
        )
    return tuple(outputs)


def gives_log_probabilities(model: nn.Module) -> bool:
    """Return whether a model's outputs are log-probabilities, as with `MarginalHead`, and not logits."""
    return bool(getattr(model, "gives_log_probabilities", False))


def log_probabilities(outputs: Tensor, *, are_logs: bool, is_multilabel: bool = False) -> Tensor:
    """Logarithms of the probabilities [B, C] of one level, float32.

    >>> outputs = torch.tensor([[0.6, 0.3]]).log()
    >>> log_probabilities(outputs, are_logs=True).exp(), log_probabilities(outputs, are_logs=False).exp()
    (tensor([[0.6000, 0.3000]]), tensor([[0.6667, 0.3333]]))

    With `are_logs`, the `gives_log_probabilities` of the model, its outputs [B, C] are unchanged: those
    of a level may add up to less than 1, and a softmax would make them add up to 1. Several labels per sample
    have a sigmoid for each class.
    """
    if is_multilabel:
        return functional.logsigmoid(outputs.float())
    return outputs.float() if are_logs else outputs.float().log_softmax(dim=1)


class TaxonomicLoss(nn.Module):
    """Weighted mean over the levels; the loss of a level is averaged over all samples.

    A sample whose label is unknown at a level adds 0 to that level and counts in the average. The divisor is
    therefore the number of samples, and not the number of known labels or the sum of class weights. The
    gradient of an effective batch then does not depend on its split into micro-batches and ranks.

    Targets are labels or, for batches mixed by Mixup or CutMix, probabilities; the loss of a mixed sample is
    the mean of the losses with either label, by the parts of the images.

    Args:
        level_names: L names, coarse to fine.
        level_weights: L weights; they are normalized to sum to 1.
        label_smoothing: in [0, 1).
        num_classes: L numbers of classes, checked against the model's outputs; None does not check, and
            cannot take probabilities.
        statistics: for each level, values [C] of its classes, by name; see `class_statistics`. They are
            buffers, so that a checkpoint holds them. `class_weights` weight the samples of a class,
            `logit_offsets` are added to the logits, `pos_weights` weight the present class.
    """

    def __init__(
        self,
        level_names: Sequence[str],
        level_weights: Sequence[float],
        label_smoothing: float = 0.0,
        num_classes: Sequence[int] | None = None,
        statistics: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.level_names = tuple(level_names)
        self.level_weights = tuple(weight / sum(level_weights) for weight in level_weights)
        self.label_smoothing = label_smoothing
        self.num_classes = None if num_classes is None else tuple(num_classes)
        self._statistics = {*(statistics or {})}
        for name, by_level in (statistics or {}).items():
            for level, values in enumerate(by_level):
                self.register_buffer(f"{name}_{level}", values)

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the loss.

        Args:
            outputs: logits [B, num_classes[r]] per level; see `logits_per_level`.
            targets: labels [B, L], int64, -1 where unknown; or probabilities [B, sum of num_classes], float,
                0 throughout where a label is unknown, see `soft_targets`.

        Returns:
            A scalar, the mean over the B samples; a level without a known label in the batch adds 0.
        """
        logits_by_level = logits_per_level(outputs, self.level_names)
        if self.num_classes is not None:
            self._check(logits_by_level, self.num_classes)
        if targets.is_floating_point():
            counts = [logits.shape[1] for logits in logits_by_level]
            targets_by_level = targets.split(counts, dim=1)
        else:
            targets_by_level = targets.unbind(dim=1)
        if len(logits_by_level) == 1:
            [logits], [target] = logits_by_level, targets_by_level
            return self._sum(logits, target, 0) / len(targets)
        parts = zip(logits_by_level, targets_by_level, self.level_weights, strict=True)
        losses = [
            weight * (self._sum(logits, target, level) / len(target))
            for level, (logits, target, weight) in enumerate(parts)
        ]
        return torch.stack(losses).sum()

    def statistic(self, name: str, level: int) -> Tensor | None:
        """Return the values [C] of the classes of a level; None without."""
        return self.get_buffer(f"{name}_{level}") if name in self._statistics else None

    def adjusted(self, logits: Tensor, level: int) -> Tensor:
        """Logits [B, C] of a softmax, with their offsets.

        The offset of a class with the share pi of the training samples is `LOSS.LOGIT_ADJUSTMENT * log(pi)`,
        as in logit adjustment (Menon et al. 2021, arXiv:2007.07314). With 1 it is balanced softmax
        (Ren et al. 2020, arXiv:2007.10740). The model's own logits, without offsets, then rank the classes
        as if all were equally frequent.
        """
        offsets = self.statistic("logit_offsets", level)
        return logits if offsets is None else _precise(logits) + offsets

    def _check(self, logits_by_level: Sequence[Tensor], num_classes: Sequence[int]) -> None:
        for name, logits, count in zip(self.level_names, logits_by_level, num_classes, strict=True):
            if logits.ndim != 2 or logits.shape[1] != count:
                raise ConfigError(
                    f"MODEL: its output for level {name!r} has the shape {list(logits.shape)}; "
                    f"it must be [batch, {count}], one logit per class"
                )

    def _sum(self, logits: Tensor, target: Tensor, level: int) -> Tensor:
        """The sum of the losses of one level for logits [B, C] and labels [B] or probabilities [B, C]."""
        raise NotImplementedError


class TaxonomicCrossEntropy(TaxonomicLoss):
    """Cross-entropy of the softmax, as torch computes it with class weights and label smoothing.

    For probabilities q of the classes, after smoothing, and weights w: `-sum_c w_c q_c log p_c`.
    """

    def _sum(self, logits: Tensor, target: Tensor, level: int) -> Tensor:
        logits, weights = self.adjusted(logits, level), self.statistic("class_weights", level)
        if target.is_floating_point():  # torch would smooth unknown rows too
            target = smoothed(target, self.label_smoothing)
            return functional.cross_entropy(logits, target, weights, reduction="sum")
        return functional.cross_entropy(
            logits,
            target,
            weights,
            ignore_index=UNKNOWN,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )


class TaxonomicBinaryCrossEntropy(TaxonomicLoss):
    """Binary cross-entropy of each class's sigmoid, a mean over the classes, as timm's `BinaryCrossEntropy`.

    Targets are one-hot, with label smoothing as for cross-entropy (Wightman et al. 2021, ResNet strikes back,
    arXiv:2110.00476). A class weight counts for the samples of the class, in all their binary terms.
    `pos_weights` multiply the term of the present class alone, as `pos_weight` of torch's
    `BCEWithLogitsLoss`.
    """

    def _sum(self, logits: Tensor, target: Tensor, level: int) -> Tensor:
        logits = _precise(logits)
        parts = _probabilities(target, logits)
        weights = self.statistic("class_weights", level)
        if weights is not None:
            parts = parts * weights
        # The class weight of a known label, 0 for an unknown one, between them where two samples are mixed.
        sample_weight = parts.sum(dim=1, keepdim=True)
        binary = smoothed(parts, self.label_smoothing) / sample_weight.clamp_min(
            torch.finfo(parts.dtype).tiny
        )
        total = functional.binary_cross_entropy_with_logits(
            logits,
            binary,
            weight=sample_weight,
            reduction="sum",
            pos_weight=self.statistic("pos_weights", level),
        )
        return total / logits.shape[1]


class TaxonomicFocalLoss(TaxonomicLoss):
    """Focal loss of the softmax: `-sum_c w_c q_c (1 - p_c)^gamma log p_c`, with q and w as for cross-entropy.

    Lin et al. 2017 (arXiv:1708.02002), with the softmax's probabilities, so that a model predicts as with
    cross-entropy. For two classes it equals torchvision's `sigmoid_focal_loss` without
    alpha.
    """

    def __init__(self, *args: Any, gamma: float = 2.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gamma = gamma

    def _sum(self, logits: Tensor, target: Tensor, level: int) -> Tensor:
        log_p = functional.log_softmax(_precise(self.adjusted(logits, level)), dim=1)
        weights = self.statistic("class_weights", level)
        if target.is_floating_point() or self.label_smoothing:
            share = smoothed(_probabilities(target, log_p), self.label_smoothing)
        else:  # of many classes, the one that counts
            share, label = (target != UNKNOWN).to(log_p.dtype), target.clamp_min(0)
            weights = None if weights is None else weights[label]
            log_p = log_p.gather(1, label[:, None])[:, 0]
        if weights is not None:
            share = share * weights
        # A power below 1 has no finite gradient at 0.
        rest = (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).eps)
        return -(share * rest**self.gamma * log_p).sum()


class MultilabelBinaryCrossEntropy(TaxonomicLoss):
    """Binary cross-entropy of each class's sigmoid for several labels per sample, a mean over the classes.

    Targets are [B, C], float: 1, 0, between them for mixed samples, or -1 where unknown, which adds 0. Label
    smoothing moves a target y to `(1 - label_smoothing) y + label_smoothing / 2`.
    """

    def _sum(self, logits: Tensor, target: Tensor, level: int) -> Tensor:
        is_unknown = target < 0
        target = target + self.label_smoothing * (0.5 - target)
        # A logit this low, of a class that is absent, has neither loss nor gradient.
        logits = _precise(logits).masked_fill(is_unknown, -1e4)
        return self._binary(logits, target.masked_fill(is_unknown, 0), level) / logits.shape[1]

    def _binary(self, logits: Tensor, target: Tensor, level: int) -> Tensor:
        """Return the sum of the binary losses for logits and targets in [0, 1], both [B, C]."""
        weights = self.statistic("pos_weights", level)
        return functional.binary_cross_entropy_with_logits(
            logits, target, reduction="sum", pos_weight=weights
        )


class MultilabelAsymmetric(MultilabelBinaryCrossEntropy):
    """Asymmetric loss (Ben-Baruch et al. 2021, arXiv:2009.14119) with gamma 1 and 4, and margin 0.05."""

    def _binary(self, logits: Tensor, target: Tensor, level: int) -> Tensor:
        # As one sample: not every version of timm can be told to sum, but over one sample all do.
        loss: Tensor = AsymmetricLossMultiLabel()(logits.reshape(1, -1), target.reshape(1, -1))
        return loss


def smoothed(probabilities: Tensor, label_smoothing: float) -> Tensor:
    """Label smoothing of probabilities [B, C], which leaves rows of zeros alone.

    A row with the sum s becomes `(1 - label_smoothing) * row + label_smoothing * s / C`.
    """
    if not label_smoothing:
        return probabilities
    share = label_smoothing / probabilities.shape[1]
    return probabilities * (1 - label_smoothing) + share * probabilities.sum(dim=1, keepdim=True)


def _probabilities(target: Tensor, like: Tensor) -> Tensor:
    """Labels [B] or probabilities [B, C], as probabilities of the type of the logits [B, C]."""
    if not target.is_floating_point():
        target = one_hot(target, like.shape[1])
    return target.to(like.dtype)


def _precise(logits: Tensor) -> Tensor:
    """Logits in float32 at least: autocast on the CPU leaves some losses in bfloat16."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class SingleLevel(nn.Module):
    """A library's loss over one level: it gets logits [B, C] and labels [B], and no tuples.

    Several labels per sample are [B, C], float: 1, 0, or -1 where unknown.

    Args:
        loss: callable (logits, labels) -> scalar.
        level_name: name of the level, for messages.
    """

    def __init__(self, loss: nn.Module, level_name: str) -> None:
        super().__init__()
        self.loss = loss
        self.level_name = level_name

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss for logits [B, C] and labels [B, 1], or probabilities [B, C] where batches are mixed."""
        (logits,) = logits_per_level(outputs, (self.level_name,))
        if not targets.is_floating_point():
            targets = targets[:, 0]
        return self.loss(logits, targets)  # type: ignore[no-any-return]

    @torch.no_grad()
    def check_takes_targets(self, num_classes: int, device: torch.device, *, mixes: bool) -> None:
        """Try the loss on labels, and with `mixes` also on probabilities, as mixed batches have them.

        Raises:
            ConfigError: it cannot take one of them.
        """
        num_samples = (
            2 if num_classes != 2 else 3
        )  # other than the classes, so that nothing broadcasts
        labels = torch.zeros(num_samples, 1, dtype=torch.int64, device=device)
        logits = torch.zeros(num_samples, num_classes, device=device)
        for targets in [labels, one_hot(labels[:, 0], num_classes).float()][: 1 + mixes]:
            try:
                self(logits, targets)
            except Exception as error:
                what = "labels [batch]"
                if targets is not labels:
                    what = "probabilities [batch, classes], as DATA.AUGMENT.MIXUP and CUTMIX make them,"
                raise ConfigError(
                    f"LOSS: {type(self.loss).__name__} does not take {what} with logits [batch, classes] "
                    f"({first_line(error)}); choose LOSS.NAME"
                ) from error


def is_rebuilt_from_config(criterion: nn.Module) -> bool:
    """Return whether the loss's state follows from configuration and data.

    True of built-in and library losses without trainable parameters.
    """
    is_known = isinstance(criterion, TaxonomicLoss | SingleLevel)
    return is_known and not trainable_parameters(criterion)


def build_loss(
    node: Any,
    taxonomy: Taxonomy | None,
    device: torch.device | None = None,
    statistics: Mapping[str, Sequence[Tensor]] | None = None,
) -> nn.Module:
    """Build the loss.

    Args:
        node: `LossConfig`, or a `_target_` node of a callable (outputs, targets) -> scalar, a mean over the
            samples. Lists of numbers arrive as tensors if the signature has a tensor.
        taxonomy: levels and classes of the labels; None when a user's dataset has none.
        device: of those tensors; None is torch's default.
        statistics: values [C] of the classes of each level, see `class_statistics`. Without them their
            buffers hold 1, to be loaded from a checkpoint.

    Raises:
        ConfigError: weights that do not match the levels, a dataset without labels and no `_target_`, a
            loss of a library for several levels, or one that is not for the number of labels per sample or
            for another key.
    """
    if is_target(node):
        return _custom_loss(node, taxonomy, device)
    if taxonomy is None:
        raise ConfigError(
            "LOSS: the dataset has no class labels; name your own loss in LOSS._target_"
        )
    names = list(taxonomy.names)
    weights = node.LEVEL_WEIGHTS if node.LEVEL_WEIGHTS is not None else [1.0] * len(names)
    if len(weights) != len(names):
        raise ConfigError(
            f"LOSS.LEVEL_WEIGHTS: {weights} has {len(weights)} weights for {len(names)} levels {names}"
        )
    if sum(weights) <= 0:
        raise ConfigError(f"LOSS.LEVEL_WEIGHTS: {weights} are all 0; at least one level must count")
    counts = list(taxonomy.num_classes.values())
    asked = {key: name for key, name in STATISTICS.items() if getattr(node, key) not in (None, 0)}
    if statistics is None:
        statistics = {name: [torch.ones(count) for count in counts] for name in asked.values()}
    kinds: dict[str, Callable[..., TaxonomicLoss]] = {
        "cross_entropy": TaxonomicCrossEntropy,
        "bce": TaxonomicBinaryCrossEntropy,
        "focal": partial(TaxonomicFocalLoss, gamma=node.FOCAL_GAMMA),
    }
    if taxonomy.is_multilabel:
        kinds = {"bce": MultilabelBinaryCrossEntropy, "asymmetric": MultilabelAsymmetric}
    if node.NAME not in kinds:
        number = "several labels" if taxonomy.is_multilabel else "one label in each level"
        raise ConfigError(
            f"LOSS.NAME: {node.NAME!r} is not for samples with {number}; set {' or '.join(kinds)}"
        )
    for key, takers in _TAKERS.items():
        if key in asked and node.NAME not in takers:
            raise ConfigError(
                f"LOSS.{key}: {getattr(node, key)} is for LOSS.NAME {' and '.join(takers)}, not {node.NAME}; "
                "leave it out"
            )
    return kinds[node.NAME](names, weights, node.LABEL_SMOOTHING, counts, statistics)


def _custom_loss(
    node: Mapping[str, Any], taxonomy: Taxonomy | None, device: torch.device | None
) -> nn.Module:
    name = node["_target_"]
    # torch's losses otherwise take the label -1, which is unknown, for a mistake.
    offer = (
        {"taxonomy": taxonomy, "ignore_index": UNKNOWN}
        if taxonomy is not None
        else {"taxonomy": None}
    )
    loss = call_target(node, "LOSS", offer=offer, convert=partial(_as_tensor, device=device))
    if not isinstance(loss, nn.Module):
        raise ConfigError(f"LOSS: {name} gave a {type(loss).__name__}, not an nn.Module")
    if taxonomy is None or type(loss).forward.__module__.partition(".")[0] not in _LIBRARIES:
        return loss
    counts = taxonomy.num_classes
    if len(counts) > 1:
        raise ConfigError(
            f"LOSS: {name} takes logits and labels of one level, but there are {len(counts)} "
            f"({', '.join(counts)}). With several, a loss gets a tuple of logits, [batch, classes] for each "
            f"level, and labels [batch, {len(counts)}]: use your own loss, or leave out LOSS._target_ for "
            "the built-in ones (LOSS.NAME, LOSS.LABEL_SMOOTHING, LOSS.LEVEL_WEIGHTS)"
        )
    return SingleLevel(loss, *counts)


def trainable_parameters(criterion: Any) -> list[nn.Parameter]:
    """Return the loss's own parameters that train, such as a temperature or the centers of classes."""
    parameters = criterion.parameters() if isinstance(criterion, nn.Module) else ()
    return [parameter for parameter in parameters if parameter.requires_grad]


def _as_tensor(parameter: inspect.Parameter, value: Any, device: torch.device | None) -> Any:
    """Return a list of numbers as a tensor, where the parameter's annotation names one."""
    if not isinstance(value, list) or not re.search(r"\bTensor\b", str(parameter.annotation)):
        return value
    return torch.tensor(value, dtype=torch.get_default_dtype(), device=device)
