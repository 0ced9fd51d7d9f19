"""AutoBatch as a callback of Lightning's trainer.

    from linnaeus.integrations.lightning import AutoBatch

    Trainer(callbacks=[AutoBatch(target_memory_fraction=0.85, max_batch_size=512)]).fit(model)

The search runs while the strategy sets up the model: it is on its device, and neither optimizers nor loaders
nor the wrapper of DDP exist. The search makes its own, throws them away, and training makes its own with the
size found, as it would with that size by hand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from linnaeus.autobatch import AutoBatchResult
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.group import joined_ranks, of_main
from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.autobatch.settings import check_count
from linnaeus.integrations.common import (
    checked_options,
    find_size,
    split_effective_batch,
    warn_of_growth,
    warn_of_many_steps,
)
from linnaeus.integrations.lightning.loaders import Loaders, Mode, holders, library
from linnaeus.integrations.lightning.steps import (
    ValidationStep,
    rehearsal,
    train_step,
    trial_state,
)

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

logger = logging.getLogger("linnaeus.autobatch")


class AutoBatch(Callback):  # type: ignore[misc]
    """Finds the largest batch size that runs within a fraction of the memory, before `fit` trains with it.

    The size is set on the attribute or hyperparameter `batch_arg_name` of the module or the data module, or
    on the loaders handed to `fit`, which are built anew. Training is then, bit for bit, that of a run with
    this size by hand.

    Args:
        target_memory_fraction: fraction of the device's total memory that may be in use, in (0, 1].
        min_batch_size, max_batch_size: bounds of the size per process, inclusive; None is no upper bound.
        memory_limit_gb: GiB of a smaller device to search for; by default the device's own.
        multiple_of: sizes from here on are multiples of it.
        batch_arg_name: attribute of the module, the data module or their `hparams` that sizes the loaders.
        val_batch_arg_name: the attribute for validation, where it has its own. Where validation shares that
            of training, the size must fit in both.
        val: whether validation is searched too.
        val_options: options that differ in the search of validation, such as {"max_batch_size": 2048}.
        effective_batch_size: samples per optimizer step over all processes. `accumulate_grad_batches` is set
            to what that takes, and the batch size to the largest that fits and divides it.
        make_batch, make_val_batch: make a batch of n samples on the host, in the place of samples of the
            loaders.
        **options: further arguments of `auto_find_batch_size`: `strategy`, `max_trials` and others.

    Attributes:
        results: of the searches of the last `fit`, by mode: `train`, and `val` where it was searched.
        batch_size: the batch size of training; None before `fit`.
        val_batch_size: the batch size of validation where it was searched on its own, else None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, or out of its range.
    """

    def __init__(
        self,
        *,
        target_memory_fraction: float = 0.8,
        min_batch_size: int = 1,
        max_batch_size: int | None = 512,
        memory_limit_gb: float | None = None,
        multiple_of: int = 1,
        batch_arg_name: str = "batch_size",
        val_batch_arg_name: str = "val_batch_size",
        val: bool = True,
        val_options: Mapping[str, Any] | None = None,
        effective_batch_size: int | None = None,
        make_batch: Callable[[int], Any] | None = None,
        make_val_batch: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        if val_options and not val:
            raise ValueError("val_options is given, but val is False: validation is not searched")
        given = {
            "target_memory_fraction": target_memory_fraction,
            "min_batch_size": min_batch_size,
            "max_batch_size": max_batch_size,
            "memory_limit_gb": memory_limit_gb,
            "multiple_of": multiple_of,
        }
        checked = checked_options("AutoBatch()", {**given, **options})
        for_val = checked_options("val_options", {**checked, **(val_options or {})})
        if effective_batch_size is not None:
            check_count("effective_batch_size", effective_batch_size)
        self.results: dict[str, AutoBatchResult] = {}
        self.batch_size: int | None = None
        self.val_batch_size: int | None = None
        self._names = {"train": batch_arg_name, "val": val_batch_arg_name}
        self._val = val
        self._options = {"train": checked, "val": for_val}
        self._effective_batch_size = effective_batch_size
        self._make_batch = {"train": make_batch, "val": make_val_batch}
        self._earlier: dict[str, int] = {}  # sizes of the run that is resumed

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the search run as soon as the strategy has put the module on its device."""
        if stage != "fit":
            library(trainer, "utilities.rank_zero").rank_zero_info(
                f"AutoBatch: {getattr(stage, 'value', stage)} keeps its batch size; only fit searches"
            )
            return
        vars(trainer.strategy).pop(
            "_setup_model", None
        )  # an earlier fit may have ended before its search
        if trainer.fast_dev_run or trainer.limit_train_batches == 0:
            logger.info(
                "AutoBatch: no search, because fast_dev_run is on or limit_train_batches is 0"
            )
            return
        _check_strategy(trainer)
        strategy = trainer.strategy
        set_up_model = strategy._setup_model

        def search_first(model: Any) -> Any:
            del strategy._setup_model
            self._find_sizes(trainer, pl_module)
            return set_up_model(model)

        strategy._setup_model = search_first

    def state_dict(self) -> dict[str, Any]:
        """The sizes, for checkpoints: a run that is resumed uses them again."""
        sizes = {"train": self.batch_size, "val": self.val_batch_size}
        return {"sizes": {mode: size for mode, size in sizes.items() if size is not None}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the sizes of the run that is resumed; they are used again unless they no longer fit."""
        self._earlier = dict(state_dict["sizes"])

    def _find_sizes(self, trainer: Any, module: Any) -> None:
        started = time.monotonic()
        with joined_ranks() as control:  # what one rank raises ends all of them
            search = _Search(self, of_main(control, self._earlier), trainer, module, control)
            with rehearsal(trainer):
                search.run()
            self.results, self._earlier = search.results, {}
            self.batch_size, self.val_batch_size = search.sizes["train"], search.sizes.get("val")
            for mode, loaders in search.loaders.items():
                loaders.apply(search.sizes.get(mode, self.batch_size))
        text = f"AutoBatch: batch size {self.batch_size}"
        if search.accumulation_steps is not None:
            trainer.accumulate_grad_batches = search.accumulation_steps
            text += f", accumulate_grad_batches {search.accumulation_steps}"
        if self.val_batch_size is not None:
            text += f", validation {self.val_batch_size}"
        library(trainer, "utilities.rank_zero").rank_zero_info(
            f"{text} ({time.monotonic() - started:.1f} s)"
        )


class _Search:
    """The searches of one `fit`.

    Attributes:
        loaders: by mode; `val` is missing where it is not searched.
        results: of each mode that was searched.
        sizes: by mode; `val` is missing where it shares that of training, or is not searched.
        accumulation_steps: what `accumulate_grad_batches` becomes; None leaves it alone.
    """

    def __init__(
        self,
        callback: AutoBatch,
        earlier: Mapping[str, int],
        trainer: Any,
        module: Any,
        control: ControlPlane | None,
    ) -> None:
        self.loaders: dict[Mode, Loaders] = {}
        self.results: dict[str, AutoBatchResult] = {}
        self.sizes: dict[str, int] = {}
        self.accumulation_steps: int | None = None
        self._callback, self._earlier = callback, earlier
        self._trainer, self._module, self._control = trainer, module, control
        schedule = library(trainer, "callbacks").GradientAccumulationScheduler
        scheduled = [each for each in trainer.callbacks if isinstance(each, schedule)]
        self._num_batches = max(
            [trainer.accumulate_grad_batches]
            + [number for each in scheduled for number in each.scheduling.values()]
        )
        self._options = {mode: dict(options) for mode, options in callback._options.items()}
        name, val_name = callback._names["train"], callback._names["val"]
        has_own_loaders = not trainer.fit_loop.epoch_loop.val_loop._data_source.is_module()
        self._has_own_val = has_own_loaders or bool(holders(trainer, val_name))
        self._val_name = val_name if self._has_own_val else name
        _check_step(trainer, module)
        effective = callback._effective_batch_size
        if effective is not None and not module.automatic_optimization:
            raise AutoBatchError(
                f"AutoBatch: effective_batch_size is {effective}, but {type(module).__name__} optimizes "
                "manually, and so accumulates gradients by itself; leave effective_batch_size out"
            )
        if trainer.fit_loop._data_source.is_module() and not holders(trainer, name):
            raise AutoBatchError(
                f"AutoBatch: neither {type(module).__name__} nor its data module nor their hparams have "
                f"{name}. Let train_dataloader take its batch size from such an attribute, name "
                "another one with batch_arg_name, or hand the loaders to fit"
            )

    def run(self) -> None:
        """Find the sizes; inside of `rehearsal`."""
        callback, trainer = self._callback, self._trainer
        train, val = self._look_at_loaders()
        bounds = {} if train.most is None else {"dataset": train.most}
        effective, options = callback._effective_batch_size, self._options["train"]
        split_of = partial(
            split_effective_batch,
            world_size=trainer.world_size,
            model=self._module,
            options=options,
        )
        for mode, loaders in self.loaders.items():
            if callback._make_batch[mode] is None:
                loaders.prepare(self._options[mode]["max_batch_size"])
        if (
            val is not None
            and not self._has_own_val
            and val.num_batches > 1
            and val.most is not None
        ):
            bounds["limit_val_batches"] = val.most
        if effective is not None:
            split = split_of(
                effective, largest=options["max_batch_size"], epoch=bounds.get("dataset")
            )
            bounds["effective_batch"] = split.samples_per_rank  # an error comes before the search
        is_accumulating = self._num_batches > 1 or effective is not None
        num_batches = 2 if is_accumulating and self._module.automatic_optimization else 1
        trainer.accumulate_grad_batches = num_batches
        make = callback._make_batch["train"] or train.batch
        size = self._find(
            "train",
            partial(train_step, trainer, num_batches),
            lambda size: (make(size) for _ in range(num_batches)),
            bounds,
        )
        if val is not None:
            step, given = ValidationStep(trainer, val), callback._make_batch["val"]

            def make_loop(size: int) -> Any:
                def make_batches() -> Any:
                    return val.numbered_batches(size) if given is None else [(given(size), 0)]

                return make_batches, val.num_rounds(size)

            if self._has_own_val:
                val_bounds = {} if val.most is None else {"dataset": val.most}
                self.sizes["val"] = self._find("val", step, make_loop, val_bounds)
            else:
                size = self._find("val", step, make_loop, {})
        if effective is not None:
            split = split_of(effective, largest=size)
            warn_of_many_steps(split, trainer.world_size, size)
            size, self.accumulation_steps = split.micro_batch_size, split.accumulation_steps
        elif isinstance(train.size_before, int) and "train" not in self._earlier:
            warn_of_growth(train.size_before * self._num_batches, size * self._num_batches)
        self.sizes["train"] = size
        train.check(size, may_be_smaller=False)
        if val is not None:  # which may take less of a size that it shares, such as all samples
            val.check(self.sizes.get("val", size), may_be_smaller=not self._has_own_val)

    def _look_at_loaders(self) -> tuple[Loaders, Loaders | None]:
        name = self._callback._names["train"]
        train = self.loaders["train"] = Loaders(
            self._trainer, "train", name, self._options["train"]
        )
        if not train.follow:
            raise AutoBatchError(
                f"AutoBatch: train_dataloader gives the same batch size whatever {name} is; let it take the "
                f"size from self.{name}"
            )
        if not self._callback._val or not self._trainer.enable_validation:
            return train, None
        val = Loaders(self._trainer, "val", self._val_name, self._options["val"])
        if not val.follow:
            return train, None
        self.loaders["val"] = val
        if not self._has_own_val:  # the limit of validation holds for both
            sizes = [options["max_batch_size"] for options in self._options.values()]
            self._options["train"]["max_batch_size"] = min(sizes)
        return train, val

    def _find(
        self,
        mode: Mode,
        step: Callable[[Any], None],
        make_batch: Callable[[int], Any],
        bounds: dict[str, int],
    ) -> int:
        known, source = self._earlier.get(mode), "the run that is resumed"
        if mode == "val" and not self._has_own_val:
            known = self.results["train"].batch_size
            source = f"training, which shares {self._val_name}: val_batch_arg_name can name another"

        def make(size: int) -> Any:
            self.loaders[mode].set_size(size)  # the module may use it in its steps
            return make_batch(size)

        loaders, given = self.loaders[mode], self._callback._make_batch[mode]
        self.results[mode] = find_size(
            step,
            make,
            self._options[mode],
            known,
            source,
            control=self._control,
            looks=[] if given else [sized.look for sized in loaders.sized if sized.follows],
            batch=(given or loaders.batch)(2),
            loading=loaders.loading,
            state=trial_state(self._trainer),
            mode=mode,
            device=self._trainer.strategy.root_device,
            bounds=bounds,
        )
        return self.results[mode].batch_size


def _check_strategy(trainer: Any) -> None:
    strategies, strategy = library(trainer, "strategies"), trainer.strategy
    is_known = isinstance(strategy, strategies.SingleDeviceStrategy | strategies.DDPStrategy)
    # DeepSpeed's and XLA's are kinds of DDP's, with a name of their own.
    if not is_known or getattr(strategy, "strategy_name", "single_device") != "single_device":
        raise AutoBatchError(
            f"AutoBatch: the strategy {type(strategy).__name__} cannot be searched: ranks that hold parts "
            "of the model cannot run a step alone. Use one device or strategy='ddp', or set the batch size "
            "by hand"
        )


def _check_step(trainer: Any, module: Any) -> None:
    is_param = library(trainer, "utilities.signature_utils").is_param_in_hook_signature
    for name in ("training_step", "validation_step"):
        step = getattr(module, name)
        if callable(step) and is_param(step, "dataloader_iter", explicit=True):
            raise AutoBatchError(
                f"AutoBatch: {name} of {type(module).__name__} takes dataloader_iter, and so reads its "
                "batches by itself; let it take batch"
            )
