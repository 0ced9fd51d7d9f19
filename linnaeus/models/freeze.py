"""Parameters that do not train, in all epochs or in the first ones (MODEL.FREEZE, TRAIN.UNFREEZE_EPOCH)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from linnaeus.config.instantiate import is_target
from linnaeus.config.keys import suggest
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.models.lora import check_lora
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.words import several


class Freezing:
    """Freezes parameters of a model, and unfreezes them.

    A module all of whose parameters are frozen stays in eval mode, with everything inside of it: BatchNorm
    keeps its statistics, and nothing is dropped. The optimizer takes the parameters that require a gradient.

    Args:
        model: without DistributedDataParallel; it is not changed before `freeze`.
        names: the parameters to freeze; those that never train are left out.
        unfreeze_epoch: the first epoch, counted from 1, in which all train; None if they never do.
    """

    def __init__(
        self,
        model: nn.Module,
        names: frozenset[str] = frozenset(),
        unfreeze_epoch: int | None = None,
    ) -> None:
        self._model = model
        self._names = frozenset(
            name for name, p in model.named_parameters() if name in names and p.requires_grad
        )
        self._modules = tuple(_whole_modules(model, self._names))
        self._unfreeze_epoch = unfreeze_epoch
        self.is_frozen = False

    def freeze(self, frozen: bool = True) -> None:
        """Freeze the parameters; with False, let everything train."""
        self.is_frozen = frozen and bool(self._names)
        for name, parameter in self._model.named_parameters():
            if name in self._names:
                parameter.requires_grad_(not frozen)
        if self._modules and isinstance(self._model, HierarchicalClassifier):
            self._model.always_eval = self._modules if frozen else ()
            self._model.train(self._model.training)

    def ends_within(self, num_epochs: int) -> bool:
        """Whether all parameters train in the last of these epochs."""
        return self._unfreeze_epoch is not None and self._unfreeze_epoch <= num_epochs

    @contextmanager
    def unfrozen(self, *, only_if: bool = True) -> Iterator[None]:
        """Inside the context everything trains, if the condition holds; afterwards all is as before."""
        if not (self.is_frozen and only_if):
            yield
            return
        self.freeze(False)
        try:
            yield
        finally:
            self.freeze()

    @property
    def keeps_optimizer_state(self) -> bool:
        """Whether the optimizer takes the frozen parameters too, since they train later."""
        return self._unfreeze_epoch is not None

    @property
    def sentence(self) -> str | None:
        """Describe the frozen parameters, for people; None without any."""
        if not self._names:
            return None
        sizes = {name: parameter.numel() for name, parameter in self._model.named_parameters()}
        until = (
            "" if self._unfreeze_epoch is None else f", until epoch {self._unfreeze_epoch} begins"
        )
        return (
            f"frozen: {len(self._names)} of {len(sizes)} parameters "
            f"({sum(sizes[name] for name in self._names):,} of {sum(sizes.values()):,} values){until}"
        )


def build_freezing(node: Any, model: nn.Module, unfreeze_epoch: int | None) -> Freezing:
    """Find the parameters that `MODEL.FREEZE` or `MODEL.LORA` freezes, without freezing them yet.

    Raises:
        ConfigError: a pattern matches nothing, everything is frozen, or your own model is to be
            unfrozen.
    """
    if is_target(node):
        if unfreeze_epoch is not None:
            raise ConfigError(
                f"TRAIN.UNFREEZE_EPOCH: {unfreeze_epoch}, but nothing is frozen: your own model takes no "
                "MODEL.FREEZE; set it to null"
            )
        return Freezing(model)
    check_lora(node, unfreeze_epoch)
    patterns = node.FREEZE if node.LORA.RANK is None else "backbone"
    if isinstance(patterns, str):
        patterns = [patterns] if patterns != "none" else []
    names = [name for name, _ in model.named_parameters()]
    matching = (name for pattern in patterns or () for name in _matching(pattern, names))
    frozen = frozenset(name for name in matching if ".lora_" not in name)
    if len(frozen) == len(names):
        raise ConfigError(
            f"MODEL.FREEZE: {node.FREEZE!r} freezes every parameter; leave at least the heads"
        )
    return Freezing(model, frozen, unfreeze_epoch)


def _matching(pattern: str, names: list[str]) -> list[str]:
    glob = "backbone.*" if pattern == "backbone" else pattern
    found = [name for name in names if fnmatchcase(name, glob)]
    if found:
        return found
    modules = {re.sub(r"\.[^.]+$", ".*", name): None for name in names}
    close = suggest(pattern, ["backbone", *modules, *names], most=3, cutoff=0.3)
    hint = close or f"; it has {several(names)}"
    raise ConfigError(f"MODEL.FREEZE: {pattern!r} matches no parameter of the model{hint}")


def _whole_modules(module: nn.Module, names: frozenset[str], path: str = "") -> Iterator[str]:
    """The outermost modules all of whose parameters are among the names."""
    prefix = f"{path}." if path else ""
    own = [f"{prefix}{name}" for name, _ in module.named_parameters()]
    if path and own and names.issuperset(own):
        yield path
        return
    for name, child in module.named_children():
        yield from _whole_modules(child, names, f"{prefix}{name}")
