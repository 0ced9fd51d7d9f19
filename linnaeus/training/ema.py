"""Average of the weights, updated by each optimizer step: exponential, or over the last epochs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from linnaeus.training.callbacks import CallbackState


class Ema:
    """timm's average of a model's weights, with the count of updates that its decay warm-up needs.

    Args:
        model: without DistributedDataParallel; it is copied.
        decay: decay per optimizer step, reached after a warm-up so that short runs benefit too.
        copy: a copy of the model, for a sharded model, which cannot be copied here.
        equal_from: the first epoch, counted from 1, whose steps are averaged equally instead of with `decay`.
            Before it, the average equals the model.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        copy: nn.Module | None = None,
        equal_from: int | None = None,
    ) -> None:
        self._source, self._equal_from = model, equal_from
        self._average = _average_of(model, decay, copy)
        self.num_updates = 0

    @property
    def module(self) -> nn.Module:
        """The averaged model, in eval mode."""
        return self._average.module  # type: ignore[no-any-return]

    def on_update(self, state: CallbackState | None = None) -> None:
        """Update the average with the model's current weights."""
        if self._equal_from is not None:
            self.num_updates += state is None or state.epoch >= self._equal_from
            decay = 1 - 1 / max(self.num_updates, 1)
            with torch.no_grad():
                self._average.apply_update_(self._source, decay)
            return
        self.num_updates += 1
        self._average.update(self._source, step=self.num_updates)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights and the number of updates."""
        return {"module": self.module.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.module.load_state_dict(state["module"])
        self.num_updates = state["num_updates"]


def _average_of(model: nn.Module, decay: float, copy: nn.Module | None) -> ModelEmaV3:
    if copy is None and not next(model.parameters()).is_meta:
        return ModelEmaV3(model, decay=decay, use_warmup=True)
    # timm copies the model and creates a random number generator on its device; `meta` has none.
    # Buffers of a sharded model are plain tensors, which `foreach` cannot mix with DTensors.
    average = ModelEmaV3(
        nn.Linear(1, 1, device="cpu"), decay=decay, use_warmup=True, foreach=copy is None
    )
    average.module = (deepcopy(model) if copy is None else copy).eval()
    return average
