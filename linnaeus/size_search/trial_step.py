"""The training step as trials of a search run it, and its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

import torch

from linnaeus.batch_plan.effective_batch import micro_batches_held
from linnaeus.data.batch import Batch, BatchSpec
from linnaeus.training.build import Assembly
from linnaeus.training.ddp import wrap

if TYPE_CHECKING:
    from linnaeus.size_search.searches import SizeSearch


class TrialStep:
    """The training step of a trial: in training's wrapper, over a process group of this rank alone.

    The wrapper is made with the batches, inside the trial, since its buckets belong to the peak.

    Args:
        search: its model, data and settings.

    Attributes:
        num_micro_batches: micro-batches of a step.
        step: takes the result of `batches`.
    """

    def __init__(self, search: SizeSearch) -> None:
        self.num_micro_batches = micro_batches_held(search.train)
        self._search = search
        self._train_step = dataclasses.replace(search.assembly.train_step)
        self._is_wrapped = False
        # No function of its own: the fewer frames lie above the model, the easier is a traceback to read.
        self.step = partial(self._train_step, num_micro_batches=self.num_micro_batches)

    def discard_wrapper(self) -> None:
        """Let the next trial make its own: a wrapper is unusable after an error in the middle of a step."""
        self._train_step.model = self._search.assembly.model
        self._is_wrapped = False

    def batches(self, spec: BatchSpec, size: int) -> Iterator[Batch]:
        """Return the micro-batches of one step."""
        search, step = self._search, self._train_step
        if not self._is_wrapped:
            step.model = wrap(
                search.assembly.model,
                search.world,
                single_rank=True,
                find_unused_parameters=search.find_unused_parameters,
            )
            self._is_wrapped = True
        return search.batches(spec, size, num_batches=self.num_micro_batches)


def on_meta(assembly: Assembly) -> Assembly:
    """Return the assembly with steps that run on `meta`, and count into metrics of their own."""
    precision = dataclasses.replace(assembly.train_step.precision, device=torch.device("meta"))
    return dataclasses.replace(
        assembly,
        train_step=dataclasses.replace(assembly.train_step, precision=precision),
        validation_step=dataclasses.replace(
            assembly.validation_step,
            precision=precision,
            update_metrics=deepcopy(assembly.metrics).to(precision.device).update,
        ),
    )
