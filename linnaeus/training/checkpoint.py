"""Checkpoints: written atomically, and read without running code from them."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linnaeus.dist import World
from linnaeus.errors import CheckpointError
from linnaeus.files import write_atomically
from linnaeus.training.ema import Ema

logger = logging.getLogger("linnaeus.checkpoint")


@dataclass(frozen=True)
class TrainingState:
    """The objects whose state a checkpoint holds.

    Attributes:
        model: without DistributedDataParallel, so that a checkpoint does not depend on the number of ranks.
        ema: None without EMA.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    schedule: torch.optim.lr_scheduler.LRScheduler
    ema: Ema | None

    def state_dict(self) -> dict[str, Any]:
        """The state of each object, by attribute."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: it belongs to another model or another configuration.
        """
        for part in fields(self):
            target = getattr(self, part.name)
            if target is None:
                continue
            if part.name not in state:
                raise CheckpointError(
                    f"the checkpoint has no {part.name}; it was written with another configuration. "
                    "Choose another EXPERIMENT.NAME or set TRAIN.AUTO_RESUME False"
                )
            try:
                target.load_state_dict(state[part.name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"the checkpoint's {part.name} does not fit this configuration: {error}. "
                    "Choose another EXPERIMENT.NAME or set TRAIN.AUTO_RESUME False"
                ) from error


class CheckpointFolder:
    """`last.pt`, the one before it in `previous.pt`, and `best.pt`.

    A new checkpoint is written to `pending.pt` first. A process that is killed at any moment leaves at least
    one of `last.pt`, `previous.pt` and `pending.pt` whole, even where `last.pt` was damaged before.

    Args:
        folder: the run's `checkpoints/`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending = folder / "pending.pt"
        self.last = folder / "last.pt"
        self.previous = folder / "previous.pt"
        self.best = folder / "best.pt"

    def save(self, content: dict[str, Any], *, is_best: bool = False) -> None:
        """Write `last.pt`, and with `is_best` also `best.pt`.

        Raises:
            CheckpointError: the disk does not take it; the checkpoints before it are kept.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".*.tmp"):  # of a process that was killed while writing
                leftover.unlink()
            write_atomically(self.pending, lambda file: torch.save(content, file))
            if is_best:  # first: if the process dies in between, the best checkpoint has its name
                self._link_best()
            if self.last.exists():
                self.last.replace(self.previous)
            self.pending.replace(self.last)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.last} cannot be written: {error}") from error

    def find_latest(self) -> Path | None:
        """The newest checkpoint that can be read; None when there is none at all.

        Raises:
            CheckpointError: there are checkpoints, but none can be read.
        """
        found = [path for path in (self.last, self.previous, self.pending) if path.exists()]
        for path in found:
            try:
                load_checkpoint(path)
                return path
            except CheckpointError as error:
                logger.warning("%s; trying the one before it", error)
        if found:
            raise CheckpointError(
                f"none of {', '.join(map(str, found))} can be read; "
                "delete them or choose another EXPERIMENT.NAME to start anew"
            )
        return None

    def load_latest(self, world: World) -> dict[str, Any] | None:
        """The checkpoint that `find_latest` finds on rank 0, on every rank."""
        path = world.on_main(self.find_latest)
        return None if path is None else load_checkpoint(path)

    def _link_best(self) -> None:
        """Hard-link `best.pt` to the pending file; checkpoints are replaced, never changed in place."""
        temporary = self.folder / ".best.tmp"
        try:
            os.link(self.pending, temporary)
        except OSError:
            shutil.copyfile(self.pending, temporary)
        temporary.replace(self.best)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; only tensors and plain values are accepted (`weights_only`).

    Raises:
        CheckpointError: the file is damaged, or no checkpoint.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch reports damage with many kinds of exceptions
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} is damaged or no checkpoint ({type(error).__name__}: {reason})"
        ) from error
    if not isinstance(content, dict) or "progress" not in content:
        raise CheckpointError(f"{path} is no checkpoint of Linnaeus")
    return content
