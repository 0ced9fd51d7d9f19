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
from typing import Any, Literal

from linnaeus.autobatch import AutoBatchResult
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.control import ControlPlane
from linnaeus.autobatch.ranks.group import of_main, together
from linnaeus.integrations.common import (
    SET_BY_TRAINER,
    check_divisors,
    check_effective_batch,
    check_values,
    checked_options,
    find_size,
    min_samples,
    options_at_most,
    split_effective_batch,
)
from linnaeus.integrations.lightning_loaders import Library, Loaders
from linnaeus.integrations.lightning_steps import (
    TrainStep,
    ValidationStep,
    averages,
    rehearsal,
    trial_state,
)

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

REFUSED = SET_BY_TRAINER | {"predict"}
"""Arguments of `auto_find_batch_size` that are no options here."""

_NOT_ALONE = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy")
"""Strategies, by name, that are kinds of the searchable ones and still cannot be searched."""

logger = logging.getLogger("linnaeus.autobatch")

Mode = Literal["train", "val"]


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
        batch_arg_name: attribute of the module, the data module or their `hparams` that the loaders take
            their batch size from.
        val_batch_arg_name: the attribute for validation, where it has its own. Where validation shares that
            of training, the size must fit in both.
        val: whether validation is searched too.
        val_options: options of the search of validation that differ from those of training, such as
            {"max_batch_size": 2048}.
        effective_batch_size: samples per optimizer step over all processes. `accumulate_grad_batches` is set
            to what that takes, and the batch size to the largest that fits and divides it.
        make_batch: makes a training batch of n samples, on the host, in the place of samples of the loaders.
        make_val_batch: the same for validation.
        **options: further arguments of `auto_find_batch_size`: `strategy`, `max_trials` and others.

    Attributes:
        results: what the searches of the last `fit` have found, by mode: `train`, and `val` where it was
            searched.
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
        if dropped := {"scale_lr", "base_batch_size", "lr_arg_name"} & options.keys():
            raise TypeError(
                f"AutoBatch() takes no {min(dropped)!r}: scale the rate in configure_optimizers, where the "
                "attribute has the size found, such as lr * (self.batch_size / 64) ** 0.5"
            )
        given = {
            "target_memory_fraction": target_memory_fraction, "min_batch_size": min_batch_size,
            "max_batch_size": max_batch_size, "memory_limit_gb": memory_limit_gb, "multiple_of": multiple_of,
        }  # fmt: skip
        own = AutoBatch.__init__.__kwdefaults__ or {}
        checked = checked_options("AutoBatch()", {**given, **options}, own=own, refused=REFUSED)
        for_val = checked_options("val_options", val_options or {}, refused=REFUSED)
        if effective_batch_size is not None:
            check_effective_batch(effective_batch_size, 1)
        check_values(checked)
        try:
            check_values({**checked, **for_val})
        except (TypeError, ValueError) as error:
            raise type(error)(f"val_options: {error}") from None
        self.results: dict[str, AutoBatchResult] = {}
        self.batch_size: int | None = None
        self.val_batch_size: int | None = None
        self._names = {"train": batch_arg_name, "val": val_batch_arg_name}
        self._val = val
        self._options = {"train": checked, "val": {**checked, **for_val}}
        self._effective_batch_size = effective_batch_size
        self._make_batch = {"train": make_batch, "val": make_val_batch}
        self._earlier: dict[str, int] = {}  # sizes of the run that is resumed

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the search run as soon as the strategy has put the module on its device."""
        library = Library(trainer)
        if stage != "fit":
            library("utilities.rank_zero").rank_zero_info(
                f"AutoBatch: {getattr(stage, 'value', stage)} keeps its batch size; only fit searches"
            )
            return
        vars(trainer.strategy).pop("_setup_model", None)  # an earlier fit may have ended before its search
        if trainer.fast_dev_run or trainer.limit_train_batches == 0:
            logger.info("AutoBatch: no search, because fast_dev_run is on or limit_train_batches is 0")
            return
        _check_strategy(library, trainer)
        strategy = trainer.strategy
        set_up_model = strategy._setup_model

        def search_first(model: Any) -> Any:
            del strategy._setup_model
            self._find_sizes(library, trainer, pl_module)
            return set_up_model(model)

        strategy._setup_model = search_first

    def state_dict(self) -> dict[str, Any]:
        """The sizes, for checkpoints: a run that is resumed uses them again."""
        sizes = {"train": self.batch_size, "val": self.val_batch_size}
        return {"sizes": {mode: size for mode, size in sizes.items() if size is not None}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the sizes of the run that is resumed; they are used again unless they no longer fit."""
        self._earlier = dict(state_dict["sizes"])

    def _find_sizes(self, library: Library, trainer: Any, module: Any) -> None:
        started = time.monotonic()
        with together() as control:  # what one rank raises ends all of them
            search = _Search(self, control, library, trainer, module)
            with rehearsal(library, trainer):
                search.run()
            self.results, self._earlier = search.results, {}
            self.batch_size, self.val_batch_size = search.sizes["train"], search.sizes.get("val")
            search.apply()
        parts = [f"batch size {self.batch_size}"]
        if search.accumulation_steps is not None:
            parts.append(f"accumulate_grad_batches {search.accumulation_steps}")
        if self.val_batch_size is not None:
            parts.append(f"validation {self.val_batch_size}")
        text = f"AutoBatch: {', '.join(parts)} ({time.monotonic() - started:.1f} s)"
        library("utilities.rank_zero").rank_zero_info(text)


class _Search:
    """The searches of one `fit`.

    Attributes:
        results: of each mode that was searched.
        sizes: by mode; `val` is missing where it shares that of training, or is not searched.
        accumulation_steps: what `accumulate_grad_batches` becomes; None leaves it alone.
    """

    def __init__(
        self, callback: AutoBatch, control: ControlPlane | None, library: Library, trainer: Any, module: Any
    ) -> None:
        self.results: dict[str, AutoBatchResult] = {}
        self.sizes: dict[str, int] = {}
        self.accumulation_steps: int | None = None
        self._callback = callback
        self._library = library
        self._trainer = trainer
        self._module = module
        self._averages = averages(trainer)
        self._options = {mode: dict(options) for mode, options in callback._options.items()}
        self._loaders: dict[str, Loaders] = {}
        self._earlier: dict[str, int] = of_main(control, callback._earlier)
        self._follows: dict[str, str] = {}  # the attribute that a mode's loaders follow
        self._has_own_val = not trainer.fit_loop.epoch_loop.val_loop._data_source.is_module() or bool(
            _holders(module, callback._names["val"])
        )
        size_name = callback._names["train"]
        _check_step(library, module)
        if callback._effective_batch_size is not None:
            _check_effective(callback._effective_batch_size, trainer, module)
        is_module = trainer.fit_loop._data_source.is_module()
        if is_module and not _holders(module, size_name):
            raise AutoBatchError(
                f"AutoBatch: neither {type(module).__name__} nor its data module nor their hparams have "
                f"{size_name}. Let train_dataloader take its batch size from such an attribute, name "
                "another one with batch_arg_name, or hand the loaders to fit"
            )

    def run(self) -> None:
        """Find the sizes; inside of `rehearsal`."""
        callback, trainer = self._callback, self._trainer
        self._look_at_loaders()
        for mode, loaders in self._loaders.items():
            for sized in loaders.sized if callback._make_batch[mode] is None else ():
                sized.look()
        effective, bounds = callback._effective_batch_size, self._bounds("train")
        if effective is not None:
            self._check_effective_bounds(effective, bounds)
            bounds["effective_batch"] = effective // trainer.world_size
        is_accumulating = trainer.accumulate_grad_batches > 1 or effective is not None
        num_batches = 2 if is_accumulating and self._module.automatic_optimization else 1
        trainer.accumulate_grad_batches = num_batches
        make = callback._make_batch["train"] or self._loaders["train"].batch
        step = TrainStep(self._library, trainer, num_batches, self._averages)
        size = self._find("train", step, lambda size: (make(size) for _ in range(num_batches)), bounds)
        if "val" in self._loaders:
            val = ValidationStep(self._library, trainer, self._loaders["val"])
            given = callback._make_batch["val"]
            make_val = val.make_batch if given is None else lambda size: iter([(given(size), 0)])
            if self._has_own_val:
                self.sizes["val"] = self._find("val", val, make_val, self._bounds("val"))
            else:
                size = self._fitting_validation(size, val, make_val)
        self.sizes["train"] = size if effective is None else self._split(effective, size)
        self._loaders["train"].check(self.sizes["train"], may_be_smaller=False)
        if "val" in self._loaders:  # which may take less of a size that it shares, such as all samples
            val_size = self.sizes.get("val", self.sizes["train"])
            self._loaders["val"].check(val_size, may_be_smaller=not self._has_own_val)
        if self._loaders["train"].leaves_one(self.sizes["train"]) and min_samples(self._module) > 1:
            raise AutoBatchError(
                f"AutoBatch: batch size {self.sizes['train']} leaves a single sample for the last batch of "
                "an epoch, and BatchNorm needs two; give the loader drop_last=True, or lower max_batch_size"
            )

    def _look_at_loaders(self) -> None:
        callback, name = self._callback, self._callback._names["train"]
        self._loaders["train"] = self._loaders_of("train", name)
        if not self._loaders["train"].follow:
            raise AutoBatchError(
                f"AutoBatch: train_dataloader gives the same batch size whatever {name} is; let it take the "
                f"size from self.{name}"
            )
        if not callback._val or not self._trainer.enable_validation:
            return
        val = self._loaders_of("val", callback._names["val"] if self._has_own_val else name)
        if not val.follow:
            return
        self._loaders["val"] = val
        if not self._has_own_val:  # the limit of validation holds for both
            sizes = [self._options[mode]["max_batch_size"] for mode in ("train", "val")]
            self._options["train"]["max_batch_size"] = min(sizes)

    def _loaders_of(self, mode: Mode, name: str) -> Loaders:
        loop = self._trainer.fit_loop
        source = (loop if mode == "train" else loop.epoch_loop.val_loop)._data_source
        if not source.is_module():
            return Loaders(self._library, self._trainer, mode, None, name)
        loaders = Loaders(self._library, self._trainer, mode, partial(_set, self._module, name), name)
        if loaders.follow:
            self._follows[mode] = name
        return loaders

    def apply(self) -> None:
        """Set what was found on the module, the data module, the loaders and the trainer."""
        train = self.sizes["train"]
        for mode, name in self._follows.items():
            _set(self._module, name, self.sizes.get(mode, train), initial=True)
        for mode, loaders in self._loaders.items():
            if not loaders.source.is_module():
                loaders.source.instance = loaders.rebuilt(self.sizes.get(mode, train))
        if "train" not in self._follows:  # the module may use its own copy of the size
            _set(self._module, self._callback._names["train"], train, initial=True)
        if self.accumulation_steps is not None:
            self._trainer.accumulate_grad_batches = self.accumulation_steps

    def _bounds(self, mode: Mode) -> dict[str, int]:
        """Upper bounds of the size besides memory, on this rank; the search takes the lowest of all ranks."""
        loaders, bounds = self._loaders[mode], dict[str, int]()
        is_given = self._callback._make_batch[mode] is not None
        if (most := loaders.most) is not None and (not is_given or loaders.num_batches > 1):
            bounds["dataset"] = most
        val = self._loaders.get("val")
        if mode == "train" and val is not None and not self._has_own_val and val.num_batches > 1:
            bounds["limit_val_batches"] = val.most or bounds.get("dataset", 1)
        return bounds

    def _check_effective_bounds(self, effective: int, bounds: Mapping[str, int]) -> None:
        """Check that an effective batch is no larger than an epoch, and that some size divides its parts."""
        options, world_size = self._options["train"], self._trainer.world_size
        if (most := bounds.get("dataset", effective) * world_size) < effective:
            raise AutoBatchError(
                f"AutoBatch: effective_batch_size is {effective}, above what one epoch holds, {most} "
                "samples; lower it"
            )
        largest = options["max_batch_size"]
        smallest = min(options["min_batch_size"], largest)
        check_divisors(effective, world_size, largest, smallest, options["multiple_of"])

    def _fitting_validation(self, size: int, step: Any, make_batch: Callable[[int], Any]) -> int:
        """The size of training, or the largest below it with which validation, which shares it, fits."""
        options = options_at_most(self._options["val"], size)
        fitting = self._search("val", step, make_batch, {}, options)
        if fitting < size:
            logger.warning(
                "AutoBatch: validation fits at batch size %d only, and shares %s with training, which fits "
                "at %d; give validation an attribute of its own (val_batch_arg_name)",
                fitting, self._callback._names["train"], size,
            )  # fmt: skip
        return fitting

    def _split(self, effective: int, size: int) -> int:
        """The largest micro-batch up to this size that divides the effective batch and suits BatchNorm."""
        options = self._options["train"]
        smallest = max(min(options["min_batch_size"], size), min_samples(self._module))
        world_size, multiple_of = self._trainer.world_size, options["multiple_of"]
        split = split_effective_batch(effective, world_size, size, smallest, multiple_of)
        self.accumulation_steps = split.accumulation_steps
        return split.micro_batch_size

    def _find(
        self, mode: Mode, step: Any, make_batch: Callable[[int], Any], bounds: Mapping[str, int]
    ) -> int:
        return self._search(mode, step, make_batch, bounds, self._options[mode], self._earlier.get(mode))

    def _search(
        self,
        mode: Mode,
        step: Any,
        make_batch: Callable[[int], Any],
        bounds: Mapping[str, int],
        options: Mapping[str, Any],
        earlier: int | None = None,
    ) -> int:
        def make(size: int) -> Any:
            if mode in self._follows:  # the module may use the size in its steps; the rehearsal puts it back
                _set(self._module, self._follows[mode], size)
            return make_batch(size)

        self.results[mode] = find_size(
            step, make, options, earlier, state=trial_state(self._trainer, self._averages), mode=mode,
            device=self._trainer.strategy.root_device, bounds=bounds, predict=False,
        )  # fmt: skip
        return self.results[mode].batch_size


def _check_strategy(library: Library, trainer: Any) -> None:
    strategies = library("strategies")
    strategy = trainer.strategy
    kind = type(strategy)
    is_known = isinstance(strategy, strategies.SingleDeviceStrategy | strategies.DDPStrategy)
    if not is_known or any(base.__name__ in _NOT_ALONE for base in kind.__mro__):
        raise AutoBatchError(
            f"AutoBatch: the strategy {kind.__name__} cannot be searched: ranks that hold parts of the model "
            "cannot run a step alone. Use one device or strategy='ddp', or set the batch size by hand"
        )


def _check_step(library: Library, module: Any) -> None:
    is_param = library("utilities.signature_utils").is_param_in_hook_signature
    for name in ("training_step", "validation_step"):
        step = getattr(module, name)
        if callable(step) and is_param(step, "dataloader_iter", explicit=True):
            raise AutoBatchError(
                f"AutoBatch: {name} of {type(module).__name__} takes dataloader_iter, and so reads its "
                "batches by itself; let it take batch"
            )


def _check_effective(effective: int, trainer: Any, module: Any) -> None:
    check_effective_batch(effective, trainer.world_size)
    if not module.automatic_optimization:
        raise AutoBatchError(
            f"AutoBatch: effective_batch_size is {effective}, but {type(module).__name__} optimizes "
            "manually, and so accumulates gradients by itself; leave effective_batch_size out"
        )
    scheduler = next(
        (each for each in trainer.callbacks if type(each).__name__ == "GradientAccumulationScheduler"), None
    )
    if scheduler is not None:
        raise AutoBatchError(
            f"AutoBatch: effective_batch_size is {effective}, but a GradientAccumulationScheduler sets "
            "accumulate_grad_batches as well; leave one of them out"
        )


def _holders(module: Any, name: str) -> list[Any]:
    """The module, the data module, and their hyperparameters, as far as they have the attribute."""
    owners = [module, getattr(module._trainer, "datamodule", None)]
    holders = [owner for owner in owners if owner is not None and hasattr(owner, name)]
    return holders + [
        owner._hparams for owner in owners if owner is not None and name in getattr(owner, "hparams", {})
    ]


def _set(module: Any, name: str, value: Any, *, initial: bool = False) -> None:
    """Set the attribute wherever it is; `initial` for the hyperparameters that loggers write down, too."""
    for holder in _holders(module, name):
        if isinstance(holder, dict):
            holder[name] = value
            continue
        try:
            setattr(holder, name, value)
        except AttributeError as error:
            raise AutoBatchError(
                f"AutoBatch: {name} of {type(holder).__name__} cannot be set ({error}); make it an attribute"
            ) from None
    for owner in (module, getattr(module._trainer, "datamodule", None)) if initial else ():
        before = getattr(owner, "_hparams_initial", None)
        if before is not None and name in before:
            before[name] = value
