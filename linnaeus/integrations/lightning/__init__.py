"""AutoBatch as a callback for Lightning's trainer.

    from linnaeus.integrations.lightning import AutoBatch

    Trainer(callbacks=[AutoBatch(target_memory_fraction=0.85, max_batch_size=512)]).fit(model)

The search runs while the strategy sets up the model. The model is then on its device, but optimizers, loaders
and the DDP wrapper do not exist yet. The search creates and discards its own. Training then creates them with
the size found, as with a size set by hand.
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
        val_batch_arg_name: attribute that sizes the validation loaders. If validation uses the attribute of
            training, the size fits both.
        val: whether to search the validation batch size too.
        val_options: options that differ in the search for validation, such as {"max_batch_size": 2048}.
        effective_batch_size: samples per optimizer step over all ranks. The callback sets
            `accumulate_grad_batches` and the largest batch size that fits and divides it.
        make_batch: makes a batch of n samples on the host, instead of samples from the loaders.
        cost: fills batches up to a total cost, with few long samples or many short ones: the name of a
            column, a function of a sample, or one number for each sample. `batch_size` is then the cost of a
            batch, and `max_batch_size` bounds its samples. Validation keeps its batches.
        **options: further arguments of `auto_find_batch_size`, such as `memory_limit_gb` and `multiple_of`.

    Attributes:
        results: results of the last `fit` by mode: `train`, and `val` if it was searched.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
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
                    f"effective_batch_size is {effective_batch_size}, but with cost the samples per batch "
                    "vary; leave one out"
                )
        self.results: dict[str, AutoBatchResult] = {}
        self._cost = cost
        self._sizes: dict[str, int] = {}
        self._names = {"train": batch_arg_name, "val": val_batch_arg_name}
        self._val = val
        self._options = {"train": checked, "val": for_val}
        self._effective_batch_size = effective_batch_size
        self._make_batch = make_batch
        self._earlier: dict[str, int] = {}  # sizes of the resumed run

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Schedule the search for the moment when the strategy has moved the module to its device."""
        if stage != "fit" or trainer.fast_dev_run or trainer.limit_train_batches == 0:
            return
        _check_strategy(trainer)
        strategy = trainer.strategy

        def search_first(model: Any) -> Any:
            del strategy._setup_model  # reveals the method of the class
            self._find_sizes(trainer, pl_module)
            return strategy._setup_model(model)

        strategy._setup_model = search_first

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes for checkpoints, so that a resumed run uses them again."""
        return {"sizes": self._sizes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the sizes of the resumed run. They are used again if they still fit."""
        self._earlier = dict(state_dict["sizes"])

    @property
    def batch_size(self) -> int | None:
        """The batch size of training; None before `fit`."""
        return self._sizes.get("train")

    @property
    def val_batch_size(self) -> int | None:
        """The batch size of validation if it was searched separately, else None."""
        return self._sizes.get("val")

    def _find_sizes(self, trainer: Trainer, module: Any) -> None:
        started = time.monotonic()
        with joined_ranks() as control:  # an error on one rank ends all ranks
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
        loaders: loaders by mode; without `val` if validation is not searched.
        results: results by mode searched.
        sizes: sizes by mode; without `val` if validation shares the training size or is not searched.
        accumulation_steps: new value of `accumulate_grad_batches`; None keeps the old one.
        ends: the batches that need the most memory at a cost; None without `cost`.
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
        """Find the sizes. Call this inside `rehearsal`."""
        callback, trainer, module = self.callback, self.trainer, self.module
        name, val_name = callback._names["train"], callback._names["val"]
        effective, options = callback._effective_batch_size, callback._options
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise AutoBatchError(
                f"AutoBatch: training_step of {type(module).__name__} takes dataloader_iter and reads its "
                "own batches; let it take batch"
            )
        if effective is not None and not module.automatic_optimization:
            raise AutoBatchError(
                f"AutoBatch: effective_batch_size is {effective}, but {type(module).__name__} optimizes "
                "manually and accumulates gradients itself; leave effective_batch_size out"
            )
        if callback._cost is not None:
            self._find_budget(callback._cost)
            return
        train = self._look_at("train", name)
        if not train.follow:
            raise AutoBatchError(
                f"AutoBatch: train_dataloader ignores {name}: its batch size is constant; let it take the "
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
        if effective is not None:  # raise errors before the search
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
        source = "the resumed run"
        if mode == "val" and "val" not in self._earlier:
            source = "training, which it shares: set val_batch_arg_name to another attribute"

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


def _check_strategy(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise AutoBatchError(
            f"AutoBatch: the trainer comes from {type(trainer).__module__.partition('.')[0]}; import Trainer "
            "and LightningModule from lightning.pytorch"
        )
    strategy = trainer.strategy  # subclasses may shard the model, such as DeepSpeed's
    if type(strategy) not in (strategies.SingleDeviceStrategy, strategies.DDPStrategy):
        raise AutoBatchError(
            f"AutoBatch: the strategy {type(strategy).__name__} is not supported, because ranks that hold "
            "parts of the model cannot run a step alone. Use one device or strategy='ddp', or set the batch "
            "size by hand"
        )
