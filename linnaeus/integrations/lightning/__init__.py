"""AutoBatch as a callback of Lightning's trainer.

    from linnaeus.integrations.lightning import AutoBatch

    Trainer(callbacks=[AutoBatch(target_memory_fraction=0.85, max_batch_size=512)]).fit(model)

The search runs while the strategy sets up the model: it is on its device, and neither optimizers nor loaders
nor the wrapper of DDP exist. The search makes its own, throws them away, and training makes its own with the
size found, as it would with that size by hand.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer, strategies
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.parsing import lightning_hasattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from linnaeus.autobatch import AutoBatchResult
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.group import joined_ranks, of_main
from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.autobatch.settings import UNBOUNDED, check_count
from linnaeus.integrations.budget import Cost, Ends, ends_of_loader, search_within
from linnaeus.integrations.common import (
    checked_options,
    divisor_of,
    find_size,
    warn_of_growth,
)
from linnaeus.integrations.lightning.loaders import Loaders, Mode, train_within
from linnaeus.integrations.lightning.steps import (
    TrainStep,
    ValidationStep,
    rehearsal,
    set_up_optimizers,
)


class AutoBatch(Callback):  # type: ignore[misc]
    """Callback that finds the maximum batch size within a fraction of the memory, before training.

    It sets the attribute or hyperparameter `batch_arg_name` of the module or the data module. Training is
    bit-identical to a run with this size set by hand.

        Trainer(callbacks=[AutoBatch(target_memory_fraction=0.85, max_batch_size=512)]).fit(model)

    Args:
        target_memory_fraction: fraction of the device's total memory that may be in use, in (0, 1].
        min_batch_size: lower bound of the size per rank, inclusive.
        max_batch_size: upper bound of the size per rank, inclusive; None is no bound.
        batch_arg_name: attribute of the module, the data module or their `hparams` that sizes the loaders.
        val_batch_arg_name: the attribute for validation, where it has its own. If validation uses the
            attribute of training, the size fits both.
        val: whether validation is searched too.
        val_options: options that differ in the search of validation, such as {"max_batch_size": 2048}.
        effective_batch_size: samples per optimizer step over all ranks. The callback sets
            `accumulate_grad_batches`, and the batch size to the largest that fits and divides it.
        make_batch: makes a batch of n samples on the host, in place of samples of the loaders.
        cost: makes batches of as much cost as fits, few long samples or many short ones: the name of a
            column, a function of a sample, or one number for each sample. `batch_size` is then that cost,
            `max_batch_size` bounds the samples of a batch, and validation keeps its batches.
        **options: further arguments of `auto_find_batch_size`: `memory_limit_gb`, `multiple_of` and others.

    Attributes:
        results: of the searches of the last `fit`, by mode: `train`, and `val` where it was searched.

    Raises:
        TypeError, ValueError: an argument of the wrong type, or out of its range.
    """

    def __init__(
        self,
        *,
        target_memory_fraction: float = 0.8,
        min_batch_size: int = 1,
        max_batch_size: int | None = 512,
        batch_arg_name: str = "batch_size",
        val_batch_arg_name: str = "val_batch_size",
        val: bool = True,
        val_options: Mapping[str, Any] | None = None,
        effective_batch_size: int | None = None,
        make_batch: Callable[[int], Any] | None = None,
        cost: Cost | None = None,
        **options: Any,
    ) -> None:
        given = {
            "target_memory_fraction": target_memory_fraction,
            "min_batch_size": min_batch_size,
            "max_batch_size": max_batch_size,
        }
        checked = checked_options("AutoBatch()", {**given, **options})
        for_val = checked_options("val_options", {**checked, **(val_options or {})})
        if effective_batch_size is not None:
            check_count("effective_batch_size", effective_batch_size)
            if cost is not None:
                raise ValueError(
                    f"effective_batch_size is {effective_batch_size}, but with cost batches differ in their "
                    "samples; leave one out"
                )
        self.results: dict[str, AutoBatchResult] = {}
        self._cost = cost
        self._sizes: dict[str, int] = {}
        self._names = {"train": batch_arg_name, "val": val_batch_arg_name}
        self._val = val
        self._options = {"train": checked, "val": for_val}
        self._effective_batch_size = effective_batch_size
        self._make_batch = make_batch
        self._earlier: dict[str, int] = {}  # sizes of the run that is resumed

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the search run as soon as the strategy has put the module on its device."""
        if stage != "fit" or trainer.fast_dev_run or trainer.limit_train_batches == 0:
            return
        _check_strategy(trainer)
        strategy = trainer.strategy

        def search_first(model: Any) -> Any:
            del strategy._setup_model  # the class has its own
            self._find_sizes(trainer, pl_module)
            return strategy._setup_model(model)

        strategy._setup_model = search_first

    def state_dict(self) -> dict[str, Any]:
        """The sizes, for checkpoints: a run that is resumed uses them again."""
        return {"sizes": self._sizes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the sizes of the run that is resumed; they are used again unless they no longer fit."""
        self._earlier = dict(state_dict["sizes"])

    @property
    def batch_size(self) -> int | None:
        """The batch size of training; None before `fit`."""
        return self._sizes.get("train")

    @property
    def val_batch_size(self) -> int | None:
        """The batch size of validation where it was searched on its own, else None."""
        return self._sizes.get("val")

    def _find_sizes(self, trainer: Trainer, module: Any) -> None:
        started = time.monotonic()
        with joined_ranks() as control:  # what one rank raises ends all of them
            search = _Search(self, trainer, module, control)
            with rehearsal(trainer):
                search.run()
            for mode, loaders in search.loaders.items():
                loaders.set_size(search.sizes.get(mode, search.sizes["train"]))
            if search.ends is not None:
                train_within(trainer, search.ends, search.sizes["train"])
        self.results, self._sizes, self._earlier = search.results, search.sizes, {}
        if search.accumulation_steps is not None:
            trainer.accumulate_grad_batches = search.accumulation_steps
        steps, seconds = trainer.accumulate_grad_batches, time.monotonic() - started
        sizes = f"batch size {self.batch_size}, validation {self.val_batch_size or self.batch_size}"
        if self._cost is not None:
            sizes = f"batches of {self.batch_size} units of cost"
        rank_zero_info(f"AutoBatch: {sizes}, accumulate_grad_batches {steps} ({seconds:.1f} s)")


@dataclass
class _Search:
    """The searches of one `fit`.

    Attributes:
        loaders: by mode; `val` is missing where it is not searched.
        results: of each mode that was searched.
        sizes: by mode; `val` is missing where it shares the size of training, or is not searched.
        accumulation_steps: what `accumulate_grad_batches` becomes; None leaves it alone.
        ends: the batches that need most memory at a cost; None without one.
    """

    callback: AutoBatch
    trainer: Trainer
    module: Any
    control: ControlPlane | None
    loaders: dict[Mode, Loaders] = field(default_factory=dict)
    results: dict[str, AutoBatchResult] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    accumulation_steps: int | None = None
    ends: Ends | None = None

    def __post_init__(self) -> None:
        self._earlier = of_main(self.control, self.callback._earlier)
        self._num_batches = self.trainer.accumulate_grad_batches
        for each in self.trainer.callbacks:
            if isinstance(each, GradientAccumulationScheduler):
                self._num_batches = max(self._num_batches, *each.scheduling.values())

    def run(self) -> None:
        """Find the sizes; inside of `rehearsal`."""
        callback, trainer, module = self.callback, self.trainer, self.module
        name, val_name = callback._names["train"], callback._names["val"]
        effective, options = callback._effective_batch_size, callback._options
        self._check()
        if callback._cost is not None:
            self._find_budget(callback._cost)
            return
        train = self._look_at("train", name)
        if not train.follow:
            raise AutoBatchError(
                f"AutoBatch: train_dataloader gives the same batch size whatever {name} is; let it take the "
                f"size from self.{name}"
            )
        is_shared = not lightning_hasattr(module, val_name)
        if callback._val and trainer.enable_validation:
            val = self._look_at("val", name if is_shared else val_name)
            if not val.follow:
                del self.loaders["val"]
        self._state = set_up_optimizers(trainer)
        bounds = {} if train.most is None else {"dataset": train.most}
        world_size, searched = trainer.world_size, options["train"]
        if effective is not None:  # an error comes before the search
            most = searched["max_batch_size"]
            divisor_of(effective, world_size, most, module, searched, train.most)
            bounds["effective_batch"] = effective // world_size
        accumulates = module.automatic_optimization and (effective or self._num_batches > 1)
        trainer.accumulate_grad_batches = 2 if accumulates else 1
        step = TrainStep(trainer)
        size = self._find("train", step, bounds, self._earlier.get("train"))
        if "val" in self.loaders:
            val, known, bounds = self.loaders["val"], self._earlier.get("val"), dict[str, int]()
            if is_shared:
                known = size
            elif val.most is not None:
                bounds["dataset"] = val.most
            found = self._find("val", ValidationStep(trainer), bounds, known)
            if is_shared:
                size = found
            else:
                self.sizes["val"] = found
        if effective is not None:
            size = divisor_of(effective, world_size, size, module, searched)
            self.accumulation_steps = effective // (world_size * size)
        elif isinstance(train.size_before, int) and "train" not in self._earlier:
            before = train.size_before * self._num_batches
            warn_of_growth(before, size * self._num_batches)
        self.sizes["train"] = size

    def _find_budget(self, cost: Cost) -> None:
        trainer, options = self.trainer, self.callback._options["train"]
        given = trainer.fit_loop._data_source.dataloader()
        ends = self.ends = ends_of_loader(given, cost, options["max_batch_size"])
        self._state = set_up_optimizers(trainer)
        trainer.accumulate_grad_batches = min(self._num_batches, 2)
        step, total = TrainStep(trainer), int(ends.costs.sum())

        def run(budget: int) -> None:
            for indices in ends.indices(budget):
                step((partial(self._batches, indices), -(-total // budget)))

        self.results["train"] = search_within(
            ends,
            run,
            {**options, "max_batch_size": UNBOUNDED},
            self._earlier.get("train"),
            "the run that is resumed",
            control=self.control,
            state=self._state,
            device=trainer.strategy.root_device,
        )
        self.sizes["train"] = self.results["train"].batch_size

    def _batches(self, indices: list[int]) -> Iterator[tuple[Any, int]]:
        assert self.ends is not None
        yield self.ends.batch(indices), 0

    def _look_at(self, mode: Mode, name: str) -> Loaders:
        callback = self.callback
        options, make_batch = callback._options[mode], callback._make_batch
        self.loaders[mode] = Loaders(self.trainer, mode, name, options, make_batch)
        return self.loaders[mode]

    def _find(
        self,
        mode: Mode,
        step: Callable[[Any], None],
        bounds: dict[str, int],
        known: int | None,
    ) -> int:
        trainer, loaders = self.trainer, self.loaders[mode]
        loaders.check_transfer()
        source = "the run that is resumed"
        if mode == "val" and "val" not in self._earlier:
            source = "training, which it shares: val_batch_arg_name can name another attribute"

        def loop_of(size: int) -> Any:
            loaders.set_size(size)  # the module may use it in its steps
            return partial(loaders.batches, size), loaders.num_rounds(size)

        self.results[mode] = find_size(
            step,
            loop_of,
            self.callback._options[mode],
            known,
            source,
            control=self.control,
            looks=loaders.looks,
            state=self._state,
            mode=mode,
            device=trainer.strategy.root_device,
            bounds=bounds,
        )
        return self.results[mode].batch_size

    def _check(self) -> None:
        """Refuse what cannot be searched, apart from loaders."""
        module, effective = type(self.module).__name__, self.callback._effective_batch_size
        if "dataloader_iter" in inspect.signature(self.module.training_step).parameters:
            raise AutoBatchError(
                f"AutoBatch: training_step of {module} takes dataloader_iter, and so reads its batches by "
                "itself; let it take batch"
            )
        if effective is not None and not self.module.automatic_optimization:
            raise AutoBatchError(
                f"AutoBatch: effective_batch_size is {effective}, but {module} optimizes manually, and so "
                "accumulates gradients by itself; leave effective_batch_size out"
            )


def _check_strategy(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise AutoBatchError(
            f"AutoBatch: the trainer comes from {type(trainer).__module__.partition('.')[0]}; import Trainer "
            "and LightningModule from lightning.pytorch"
        )
    strategy = trainer.strategy  # other kinds of these hold parts of the model, such as DeepSpeed's
    if type(strategy) not in (strategies.SingleDeviceStrategy, strategies.DDPStrategy):
        raise AutoBatchError(
            f"AutoBatch: the strategy {type(strategy).__name__} cannot be searched: ranks that hold parts "
            "of the model cannot run a step alone. Use one device or strategy='ddp', or set the batch size "
            "by hand"
        )
