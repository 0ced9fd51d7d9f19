"""Steps of a Lightning trainer as trials of a search, and a trainer that they leave as it was.

A step is the one that Lightning runs itself, `_TrainingEpochLoop.advance` or
`_EvaluationLoop._evaluation_step`, on the bare module. What surrounds it is exchanged: callbacks, loggers and
the profiler see nothing of a trial, and collectives are those of a process group with this rank alone, so
that the other ranks can wait.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.optim import Optimizer

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.single_rank import group_of_this_rank
from linnaeus.autobatch.state.contents import Contents
from linnaeus.autobatch.state.snapshot import Snapshot
from linnaeus.integrations.common import WholeLoop
from linnaeus.integrations.lightning.loaders import Loaders, library, restores_of_data

logger = logging.getLogger("linnaeus.autobatch")


def train_step(trainer: Any, num_batches: int, batches: Iterator[Any]) -> None:
    """One optimizer step: `advance` on each of its micro-batches.

    Args:
        trainer: the trainer, with optimizers.
        num_batches: micro-batches of a step.
        batches: are made when they are asked for.
    """
    loop = trainer.fit_loop.epoch_loop
    with _own_world(trainer):
        trainer.training = True
        loop.batch_progress.reset()
        _begin(trainer, loop, "on_fit_start", "on_train_start", "on_train_epoch_start")
        fetcher = _Fetcher(batches)
        for _ in range(num_batches):
            try:
                loop.advance(fetcher)
            except StopIteration:
                raise AutoBatchError(
                    "AutoBatch: on_train_batch_start has returned -1, which ends the epoch, so no step can "
                    "be measured; return it only where trainer.global_step is above 0"
                ) from None


class ValidationStep:
    """Batches of validation, beside what the whole loop keeps of its batches.

    What a call leaves in attributes of the module and its metrics, it takes out again.

    Args:
        trainer: the trainer.
        loaders: the loaders of validation.
    """

    def __init__(self, trainer: Any, loaders: Loaders) -> None:
        self._trainer, self._loaders = trainer, loaders
        self._run_loop = WholeLoop(trainer.strategy.root_device)
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
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop.val_loop
        make_batches, num_batches = loop_of

        def run() -> None:
            for batch, number in make_batches():
                loop._evaluation_step(batch, 0, number, None)
                del batch

        trainer.validating = True
        try:
            with _own_world(trainer):
                loop._combined_loader = self._loaders.combined
                loop._data_fetcher = _Fetcher(iter(()))
                _begin(trainer, loop, "on_validation_start", "on_validation_epoch_start")
                self._run_loop(run, num_batches)
        finally:
            trainer.training = True
            self._before.restore()
            trainer.lightning_module.eval()


class _Fetcher:
    """Hands out batches as Lightning's own fetcher does; the last one is never known to be the last."""

    done = False

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> tuple[Any, int, int]:
        return next(self._batches), 0, 0


def _begin(trainer: Any, loop: Any, *names: str) -> None:
    """Log to new results, and call hooks that come before the first batch: a step may need what they make."""
    results = library(trainer, "trainer.connectors.logger_connector.result")
    loop._results = results._ResultCollection(trainer.training)
    for name in names:
        library(trainer, "trainer.call")._call_lightning_module_hook(trainer, name)


def trial_state(trainer: Any) -> list[Any]:
    """Everything that a step of the trainer changes and a search can put back; inside of `rehearsal`."""
    strategy = trainer.strategy
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    state = [strategy.lightning_module, *strategy.optimizers, *schedulers]
    state.append(getattr(trainer.precision_plugin, "scaler", None))
    return [part for part in state if part is not None]


@contextlib.contextmanager
def rehearsal(trainer: Any) -> Iterator[None]:
    """Inside, the trainer has optimizers and can run steps; afterwards it is what it was.

    What trials do to the module, its optimizers and the global generators, the search itself puts back. This
    puts back the rest: loops, logged results, hyperparameters, datasets, and the generators once more,
    because setting up optimizers may load data.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    with contextlib.ExitStack() as stack:
        # With the generators come the optimizers that the module keeps: those that training uses.
        optimizers = [value for value in vars(module).values() if isinstance(value, Optimizer)]
        stack.callback(Snapshot(optimizers, strategy.root_device).restore)
        roots = [module, trainer.datamodule, *(loop._data_source.instance for loop in loops)]
        for restore in restores_of_data(roots):
            stack.callback(restore)
        stack.callback(Contents(_bookkeeping(trainer)).restore)
        thaws = library(trainer, "callbacks").BaseFinetuning
        if any(isinstance(each, thaws) for each in trainer.callbacks):
            logger.info(
                "AutoBatch: trials train all layers, because a callback unfreezes some later"
            )
            for parameter in module.parameters():
                if not parameter.requires_grad and parameter.is_floating_point():
                    stack.callback(parameter.requires_grad_, False)
                    parameter.requires_grad_()
        # Callbacks, loggers and the profiler see nothing.
        trainer.callbacks, trainer.profiler = (
            [],
            library(trainer, "profilers").PassThroughProfiler(),
        )
        trainer.loggers = (
            [library(trainer, "loggers.logger").DummyLogger()] if trainer.loggers else []
        )
        with _nothing_fetched(trainer):
            strategy.setup_optimizers(trainer)
        for loop in loops:  # forget the loaders that this has made, and end their workers
            if loop._combined_loader is not None:
                loop._combined_loader.reset()
            loop._combined_loader = loop._data_fetcher = None
        trainer.fit_loop.max_batches = float("inf")
        if module.automatic_optimization:
            strategy.lr_scheduler_configs = []  # a schedule may end before the trials do
        stack.enter_context(_alone(trainer))
        yield


@contextlib.contextmanager
def _nothing_fetched(trainer: Any) -> Iterator[None]:
    """Inside, loaders that are set up are not read: `configure_optimizers` asks for their length only."""
    fit_loop, fetchers = library(trainer, "loops.fit_loop"), library(trainer, "loops.fetchers")
    before = fit_loop._select_data_fetcher
    fit_loop._select_data_fetcher = lambda *_: fetchers._DataFetcher()
    try:
        yield
    finally:
        fit_loop._select_data_fetcher = before


def _bookkeeping(trainer: Any) -> Iterator[dict[str, Any]]:
    """The attributes of the trainer, its strategy, and what counts steps and holds logged values."""
    progress = library(trainer, "loops.progress")._BaseProgress
    fit = trainer.fit_loop
    epoch = fit.epoch_loop
    loops = [fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop]
    waiting = [trainer, trainer.strategy, trainer._logger_connector, *loops]
    for part in waiting:
        yield vars(part)
        waiting += [value for value in vars(part).values() if isinstance(value, progress)]


@contextlib.contextmanager
def _alone(trainer: Any) -> Iterator[None]:
    """Let collectives of a step be this rank's own, and take up the memory that DDP will hold.

    It adds attributes to the strategy, which `rehearsal` removes.
    """
    if trainer.world_size == 1 or not torch_dist.is_initialized():
        yield
        return
    strategy, world_size = trainer.strategy, trainer.world_size
    strategy.own_group = group_of_this_rank("gloo")
    strategy.all_gather = lambda tensor, *_, **__: torch.stack([tensor] * world_size)
    buckets = None
    if not strategy._ddp_kwargs.get("gradient_as_bucket_view"):  # they are beside the gradients
        trained = [each for each in trainer.lightning_module.parameters() if each.requires_grad]
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        buckets = torch.ones(num_bytes, dtype=torch.uint8, device=strategy.root_device)
    try:
        yield
    finally:
        del buckets
        torch_dist.destroy_process_group(strategy.own_group)


@contextlib.contextmanager
def _own_world(trainer: Any) -> Iterator[None]:
    """Let collectives that name no group use the group of this rank alone, if there are several ranks."""
    group = vars(trainer.strategy).get("own_group")
    if group is None:
        yield
        return
    world = torch_dist.group.WORLD
    torch_dist.GroupMember.WORLD = group
    try:
        yield
    finally:
        torch_dist.GroupMember.WORLD = world
