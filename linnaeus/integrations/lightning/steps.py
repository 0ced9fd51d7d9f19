"""Steps of a Lightning trainer as trials of a search, and a trainer that they leave as it was.

A step is the one that Lightning runs itself, `_TrainingEpochLoop.advance` or
`_EvaluationLoop._evaluation_step`. Callbacks, loggers and the profiler see nothing of a trial. Collectives of
the module's own work over a process group of this rank alone, so that the other ranks can wait.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.optim import Optimizer
from torch.utils.data import Dataset, Sampler

from linnaeus.autobatch.ranks.single_rank import group_of_this_rank
from linnaeus.autobatch.state.contents import Contents
from linnaeus.autobatch.state.rng import rng_state, set_rng_state
from linnaeus.integrations.common import WholeLoop

logger = logging.getLogger("linnaeus.autobatch")

_NUM_BATCHES = 10_000
"""Batches of an epoch, for schedules of the search: they need not end before it does."""


class TrainStep:
    """An optimizer step of `accumulate_grad_batches` batches; the second one of a trial as an epoch's last.

    Args:
        trainer: the trainer, with optimizers.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        state = [trainer.lightning_module, *trainer.strategy.optimizers]
        self._run_loop = WholeLoop(
            trainer.strategy.root_device, "an epoch of training", state=state
        )

    def __call__(self, loop_of: tuple[Callable[[], Iterator[tuple[Any, int]]], int]) -> None:
        """Take a step.

        Args:
            loop_of: makes a batch, in an iterator; and the number of batches of an epoch.
        """
        (make_batches, num_rounds), trainer = loop_of, self._trainer
        attributes = vars(trainer.lightning_module)  # which a search restores after each trial
        number = attributes["_step_of_trial"] = attributes.get("_step_of_trial", 0) + 1

        def run() -> None:
            loop.batch_progress.reset()
            _begin(trainer, loop, "on_fit_start", "on_train_start", "on_train_epoch_start")
            for _ in range(trainer.accumulate_grad_batches):
                loop.advance(_Fetcher(make_batches()))

        loop = trainer.fit_loop.epoch_loop
        with _own_world(trainer):
            trainer.training = True
            self._run_loop(run, number, num_rounds // trainer.accumulate_grad_batches)


class ValidationStep:
    """Batches of validation, beside the outputs that the whole loop keeps.

    It removes the changes that a call makes to attributes of the module and its metrics.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._run_loop = WholeLoop(trainer.strategy.root_device, "validation")
        module = trainer.lightning_module
        values = {*map(id, module.parameters()), *map(id, module.buffers())}
        self._before = Contents((vars(part) for part in module.modules()), values)

    @torch.no_grad()
    def __call__(self, loop_of: tuple[Callable[[], Iterable[tuple[Any, int]]], int]) -> None:
        """Run batches.

        Args:
            loop_of: makes a batch of each loader, or one of all where they are combined, with the number of
                the loader; and how often the loop does so.
        """
        trainer: Any = self._trainer
        loop = trainer.fit_loop.epoch_loop.val_loop
        make_batches, num_rounds = loop_of

        def run() -> None:
            for batch, number in make_batches():
                loop._evaluation_step(batch, 0, number, None)
                del batch

        trainer.validating = True
        try:
            with _own_world(trainer):
                loop._data_fetcher = _Fetcher(iter(()))
                _begin(trainer, loop, "on_validation_start", "on_validation_epoch_start")
                for number in (1, 2)[:num_rounds]:
                    self._run_loop(run, number, num_rounds)
        finally:
            trainer.training = True
            self._before.restore()
            trainer.lightning_module.eval()


@dataclass
class _Fetcher:
    """Hands out batches as Lightning's own fetcher does; the last one is never known to be the last."""

    batches: Iterator[tuple[Any, int]]
    done = False

    def __next__(self) -> tuple[Any, int, int]:
        return next(self.batches)[0], 0, 0


def _begin(trainer: Any, loop: Any, *names: str) -> None:
    """Log to new results, and call the hooks before the first batch: a step may need their objects."""
    loop._results = _ResultCollection(trainer.training)
    for name in names:
        _call_lightning_module_hook(trainer, name)


def set_up_optimizers(trainer: Trainer) -> list[Any]:
    """Let the trainer make optimizers, inside of `rehearsal` and after the loaders.

    Returns:
        Everything that a step of the trainer changes and a search can put back.
    """
    strategy = trainer.strategy
    # A schedule may ask for the number of batches, for which Lightning would read its own loaders.
    trainer.fit_loop.max_batches = _NUM_BATCHES
    strategy.setup_optimizers(trainer)
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    if trainer.lightning_module.automatic_optimization:
        strategy.lr_scheduler_configs = []  # a schedule may end before the trials do
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return [strategy.model, *strategy.optimizers, *schedulers, scaler]


@contextlib.contextmanager
def rehearsal(trainer: Any) -> Iterator[None]:
    """Context in which the trainer can run steps. Its state is restored at the end.

    The search itself restores the module, its optimizers and the global generators. This context restores the
    rest: attributes of all Lightning objects, datasets and samplers reachable from the trainer, optimizers
    that the module keeps, and the generators once more, because hooks draw from them.
    """
    device, module = trainer.strategy.root_device, trainer.lightning_module
    with contextlib.ExitStack() as stack:
        stack.callback(set_rng_state, rng_state(device), device)
        stack.callback(
            Contents([trainer, module], inside=_attributes, without_tensors=True).restore
        )
        for owner in (module, trainer.datamodule):
            for name in ("_hparams", "_hparams_initial"):  # dictionaries of a kind of their own
                held = getattr(owner, name, {})
                stack.callback(held.update, dict(held))
        if any(isinstance(each, BaseFinetuning) for each in trainer.callbacks):
            logger.info(
                "AutoBatch: trials train all layers, because a callback unfreezes some later"
            )
            for parameter in module.parameters():
                if not parameter.requires_grad and parameter.is_floating_point():
                    stack.callback(parameter.requires_grad_, False)
                    parameter.requires_grad_()
        # Callbacks, loggers and the profiler see nothing.
        trainer.callbacks, trainer.profiler = [], PassThroughProfiler()
        trainer.loggers = [DummyLogger()] if trainer.loggers else []
        strategy, world_size = trainer.strategy, trainer.world_size
        if world_size > 1:
            strategy.model = strategy._setup_model(module)
            strategy.own_group = group_of_this_rank("gloo")
            stack.callback(torch_dist.destroy_process_group, strategy.own_group)
            strategy.all_gather = lambda tensor, *_, **__: torch.stack([tensor] * world_size)
        yield


def _attributes(value: Any) -> list[dict[str, Any]]:
    is_lightning = any(base.__module__.startswith("lightning.") for base in type(value).__mro__)
    is_inside = is_lightning or isinstance(value, Dataset | Sampler | Optimizer)
    return [vars(value)] if is_inside and hasattr(value, "__dict__") else []


@contextlib.contextmanager
def _own_world(trainer: Any) -> Iterator[None]:
    """Let collectives that name no group use the group of this rank alone, if there are several ranks."""
    world = torch_dist.group.WORLD
    torch_dist.GroupMember.WORLD = getattr(trainer.strategy, "own_group", world)
    try:
        yield
    finally:
        torch_dist.GroupMember.WORLD = world
