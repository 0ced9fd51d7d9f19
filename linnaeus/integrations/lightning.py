"""AutoBatch as a callback of Lightning's trainer.

    from linnaeus.integrations.lightning import AutoBatch

    Trainer(callbacks=[AutoBatch(target_memory_fraction=0.85, max_batch_size=512)]).fit(model)

The search runs while the strategy sets up the model: it is on its device, and neither optimizers nor loaders
nor the wrapper of DDP exist. The search makes its own, throws them away, and training makes its own with the
size found, as it would with that size by hand.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from linnaeus.autobatch import AutoBatchResult, auto_find_batch_size
from linnaeus.autobatch.arguments import check_choice, check_count, kind_of
from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.control import ControlPlane
from linnaeus.autobatch.ranks.group import together
from linnaeus.autobatch.split import Split, scale_factor
from linnaeus.integrations.common import (
    SET_BY_TRAINER,
    check_divisors,
    check_effective_batch,
    check_values,
    checked_options,
    min_samples,
    split_effective_batch,
)
from linnaeus.integrations.lightning_loaders import Epoch, Library, Loaders
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

LR_NAMES = ("lr", "learning_rate")
"""Attributes that hold the learning rate, in this order; Lightning's own finder looks for the same."""

REFUSED = SET_BY_TRAINER | {"predict"}
"""Arguments of `auto_find_batch_size` that are no options here."""

_NOT_ALONE = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy")
"""Strategies, by name, that are kinds of the searchable ones and still cannot be searched."""

logger = logging.getLogger("linnaeus.autobatch")


@dataclass
class _Plan:
    """What a run is to use. What it leaves alone is None."""

    train: int
    val: int | None = None
    accumulation_steps: int | None = None
    learning_rate: float | None = None


class AutoBatch(Callback):  # type: ignore[misc]
    """Finds the largest batch size that runs within a fraction of the memory, before `fit` trains with it.

    The size is set on the attribute or hyperparameter `batch_arg_name` of the module or the data module, or
    on the loaders handed to `fit`, which are built anew. Training is then, bit for bit, that of a run with
    this size by hand.

    Args:
        batch_arg_name: attribute of the module, the data module or their `hparams` that the loaders take
            their batch size from.
        val_batch_arg_name: the attribute for validation, where it has its own. Where validation shares that
            of training, the size must fit in both.
        val: whether validation is searched too.
        val_options: options of the search of validation that differ from those of training, such as
            {"max_batch_size": 2048}.
        effective_batch_size: samples per optimizer step over all processes. `accumulate_grad_batches` is set
            to what that takes, and the batch size to the largest that fits and divides it.
        scale_lr: `linear` or `sqrt`: the learning rate times the effective batch size divided by
            `base_batch_size`, or times the root of that. None leaves it alone.
        base_batch_size: the effective batch size that the learning rate was tuned for.
        lr_arg_name: attribute or hyperparameter that holds the learning rate; by default `lr`, else
            `learning_rate`.
        make_batch: makes a training batch of n samples, on the host, in the place of samples of the loaders.
        make_val_batch: the same for validation.
        **options: arguments of `auto_find_batch_size`: `target_memory_fraction`, `max_batch_size`,
            `memory_limit_gb`, `strategy`, `max_trials` and others.

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
        batch_arg_name: str = "batch_size",
        val_batch_arg_name: str = "val_batch_size",
        val: bool = True,
        val_options: Mapping[str, Any] | None = None,
        effective_batch_size: int | None = None,
        scale_lr: Literal["linear", "sqrt"] | None = None,
        base_batch_size: int | None = None,
        lr_arg_name: str | None = None,
        make_batch: Callable[[int], Any] | None = None,
        make_val_batch: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        names = {"batch_arg_name": batch_arg_name, "val_batch_arg_name": val_batch_arg_name}
        functions = {"make_batch": make_batch, "make_val_batch": make_val_batch}
        _check_types(names, str, "text, the name of an attribute")
        _check_types({"lr_arg_name": lr_arg_name}, str | None, "text, the name of an attribute")
        _check_types({"val": val}, bool, "True or False")
        _check_types({"val_options": val_options}, Mapping | None, "a dictionary of options")
        _check_types(functions, Callable | None, "a function that makes a batch of n samples")
        if val_options and not val:
            raise ValueError("val_options is given, but val is False: validation is not searched")
        own = AutoBatch.__init__.__kwdefaults__ or {}
        sizes = ("min_batch_size", "max_batch_size")
        checked = checked_options("AutoBatch()", options, own=(*own, *sizes), refused=REFUSED)
        for_val = checked_options("val_options", val_options or {}, refused=REFUSED)
        for name, count in (
            ("effective_batch_size", effective_batch_size), ("base_batch_size", base_batch_size)
        ):  # fmt: skip
            if count is not None:
                check_count(name, count)
        check_values(checked)
        if for_val:
            _check_values_of_val({**checked, **for_val})
        if scale_lr is None and base_batch_size is not None:
            raise ValueError("base_batch_size is given, but scale_lr, which it is for, is not")
        if scale_lr is not None:
            check_choice("scale_lr", scale_lr, ("linear", "sqrt"))
            if base_batch_size is None:
                raise ValueError(
                    f"scale_lr is {scale_lr!r}, which needs base_batch_size: the effective batch size that "
                    "the learning rate was tuned for"
                )
        self.results: dict[str, AutoBatchResult] = {}
        self.batch_size: int | None = None
        self.val_batch_size: int | None = None
        self._names = {"train": batch_arg_name, "val": val_batch_arg_name}
        self._val = val
        self._options = {"train": checked, "val": {**checked, **for_val}}
        self._effective_batch_size = effective_batch_size
        self._scale_lr = scale_lr
        self._base_batch_size = base_batch_size
        self._lr_arg_name = lr_arg_name
        self._make_batch = {"train": make_batch, "val": make_val_batch}
        self._earlier: dict[str, int] = {}  # sizes of the run that is resumed
        self._lrs: tuple[float, float] | None = None  # the rate as configured, and as it was set

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the search run as soon as the strategy has put the module on its device."""
        if stage != "fit":
            return
        vars(trainer.strategy).pop("_setup_model", None)  # an earlier fit may have ended before its search
        if trainer.fast_dev_run or trainer.limit_train_batches == 0:
            logger.info("AutoBatch: no search, because fast_dev_run is on or limit_train_batches is 0")
            return
        library = Library(trainer)
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
        return {"sizes": {mode: size for mode, size in sizes.items() if size is not None}, "lrs": self._lrs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the sizes of the run that is resumed; they are used again unless they no longer fit."""
        self._earlier = dict(state_dict["sizes"])
        self._lrs = state_dict["lrs"]

    def _find_sizes(self, library: Library, trainer: Any, module: Any) -> None:
        with together() as control:  # what one rank raises ends all of them
            search = _Search(self, control, library, trainer, module)
            with rehearsal(library, trainer):
                plan = search.run()
            self.results, self._earlier = search.results, {}
            self.batch_size, self.val_batch_size = plan.train, plan.val
            self._scale(plan, trainer, module)
            search.apply(plan)
        _say(library, plan, self.results)

    def _scale(self, plan: _Plan, trainer: Any, module: Any) -> None:
        """Add the learning rate to a plan, if it is to follow."""
        if self._scale_lr is None:
            return
        assert self._base_batch_size is not None
        rate = self._configured_lr(module)
        steps = plan.accumulation_steps or trainer.accumulate_grad_batches
        effective = plan.train * steps * trainer.world_size
        plan.learning_rate = rate * scale_factor(self._scale_lr, effective, self._base_batch_size)
        self._lrs = rate, plan.learning_rate

    def _configured_lr(self, module: Any) -> float:
        """The learning rate before any scaling: an earlier `fit` may have left the scaled one."""
        present: float = _get(module, self.lr_name(module))
        if self._lrs is not None and present == self._lrs[1]:
            return self._lrs[0]
        return present

    def lr_name(self, module: Any) -> str:
        """The attribute that holds the learning rate.

        Raises:
            AutoBatchError: there is none.
        """
        names = LR_NAMES if self._lr_arg_name is None else (self._lr_arg_name,)
        for name in names:
            if _holders(module, name):
                return name
        raise AutoBatchError(
            f"AutoBatch: scale_lr is {self._scale_lr!r}, but neither {type(module).__name__} nor its data "
            f"module nor their hparams have {' or '.join(names)}; let configure_optimizers take the rate "
            "from such an attribute, and name it with lr_arg_name"
        )


def _check_types(arguments: Mapping[str, Any], kind: Any, allowed: str) -> None:
    """Check arguments by name.

    Raises:
        TypeError: one is not of this kind.
    """
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {kind_of(value)}; it must be {allowed}")


def _check_values_of_val(options: Mapping[str, Any]) -> None:
    """Check the values of options of validation, together with those of training that hold there too."""
    try:
        check_values(options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"val_options: {error}") from None


@dataclass(frozen=True)
class _Facts:
    """What the sizes depend on besides memory, of one rank; any two ranks may differ.

    Attributes:
        epochs: of each loader, by mode; `val` is missing where it is not searched.
        earlier: sizes of the run that is resumed, by mode.
    """

    epochs: dict[str, list[Epoch]]
    earlier: dict[str, int]


@dataclass(frozen=True)
class _Work:
    """What a search of a mode runs."""

    mode: Literal["train", "val"]
    step: Callable[[Any], object]
    make_batch: Callable[[int], Any]


class _Search:
    """The searches of one `fit`. All that `run` decides follows from what every rank knows."""

    def __init__(
        self, callback: AutoBatch, control: ControlPlane | None, library: Library, trainer: Any, module: Any
    ) -> None:
        self.results: dict[str, AutoBatchResult] = {}
        self._callback = callback
        self._control = control
        self._library = library
        self._trainer = trainer
        self._module = module
        self._averages = averages(trainer)
        self._options = {mode: dict(options) for mode, options in callback._options.items()}
        self._loaders: dict[str, Loaders] = {}
        self._epochs: dict[str, list[Epoch]] = {}  # of the loaders of all ranks
        self._earlier: dict[str, int] = {}
        self._follows: dict[str, str] = {}  # the attribute that a mode's loaders follow
        self._has_own_val = not trainer.fit_loop.epoch_loop.val_loop._data_source.is_module() or bool(
            _holders(module, callback._names["val"])
        )
        size_name = callback._names["train"]
        _check_step(library, module)
        if callback._effective_batch_size is not None:
            _check_effective(callback._effective_batch_size, trainer, module)
        if callback._scale_lr is not None:
            callback.lr_name(module)
        is_module = trainer.fit_loop._data_source.is_module()
        if is_module and not _holders(module, size_name):
            raise AutoBatchError(
                f"AutoBatch: neither {type(module).__name__} nor its data module nor their hparams have "
                f"{size_name}. Let train_dataloader take its batch size from such an attribute, name "
                "another one with batch_arg_name, or hand the loaders to fit"
            )

    def run(self) -> _Plan:
        """The sizes found; inside of `rehearsal`."""
        self._prepare()
        effective, val = self._callback._effective_batch_size, None
        train = self._training()
        size = self._find(train, self._bounds(effective))
        if "val" in self._epochs:
            if self._has_own_val:
                val = self._find(self._validation(), self._dataset_bound("val", min))
            else:
                size = self._fitting_validation(size)
        if effective is not None:
            split = self._split(effective, size)
            plan = _Plan(split.micro_batch_size, val, split.accumulation_steps)
        else:
            plan = _Plan(self._without_single_samples(train, size), val)
        self._check_loaders(plan)
        return plan

    def _check_loaders(self, plan: _Plan) -> None:
        """Check that hooks make loaders of the sizes that were measured.

        Validation that shares its size with training may take less of it, such as all of a small dataset.
        """
        self._loaders["train"].check(plan.train, may_be_smaller=False)
        if "val" in self._loaders:
            size = plan.train if plan.val is None else plan.val
            self._loaders["val"].check(size, may_be_smaller=plan.val is None)

    def _prepare(self) -> None:
        """Look at the loaders of both modes, on all ranks."""
        callback = self._callback
        name = callback._names["train"]
        self._loaders["train"] = self._loaders_of("train", name)
        if not self._loaders["train"].follow:
            raise AutoBatchError(
                f"AutoBatch: train_dataloader gives the same batch size whatever {name} is; let it take the "
                f"size from self.{name}"
            )
        if callback._val and self._trainer.enable_validation:
            self._loaders["val"] = self._loaders_of(
                "val", callback._names["val" if self._has_own_val else "train"]
            )
        own = _Facts({mode: loaders.epochs for mode, loaders in self._loaders.items()}, callback._earlier)
        ranks: list[_Facts] = [own] if self._control is None else self._control.gather(own)
        self._earlier = ranks[0].earlier
        self._epochs["train"] = [epoch for rank in ranks for epoch in rank.epochs["train"]]
        val = [epoch for rank in ranks for epoch in rank.epochs.get("val", ())]
        if all("val" in rank.epochs for rank in ranks) and any(epoch.share is not None for epoch in val):
            self._epochs["val"] = val
        else:
            self._loaders.pop("val", None)
            self._follows.pop("val", None)
        if "val" in self._epochs and not self._has_own_val:  # the limit of validation holds for both
            sizes = [_largest(self._options[mode]) for mode in ("train", "val")]
            self._options["train"]["max_batch_size"] = min(sizes)

    def apply(self, plan: _Plan) -> None:
        """Set what the plan says on the module, the data module, the loaders and the trainer."""
        sizes = {"train": plan.train, "val": plan.val if plan.val is not None else plan.train}
        for mode, name in self._follows.items():
            _set(self._module, name, sizes[mode], initial=True)
        for mode, loaders in self._loaders.items():
            if not loaders.source.is_module():
                loaders.source.instance = loaders.rebuilt(sizes[mode])
        if "train" not in self._follows:  # the module may use its own copy of the size
            _set(self._module, self._callback._names["train"], plan.train, initial=True)
        if plan.accumulation_steps is not None:
            self._trainer.accumulate_grad_batches = plan.accumulation_steps
        if plan.learning_rate is not None:
            _set(self._module, self._callback.lr_name(self._module), plan.learning_rate, initial=True)

    def _training(self) -> _Work:
        """An optimizer step; of two micro-batches where gradients are accumulated."""
        callback, trainer = self._callback, self._trainer
        is_accumulating = trainer.accumulate_grad_batches > 1 or callback._effective_batch_size is not None
        held = 2 if is_accumulating and self._module.automatic_optimization else 1
        trainer.accumulate_grad_batches = held
        make = callback._make_batch["train"] or self._loaders["train"].batch

        def make_batches(size: int) -> Any:
            self._set_size("train", size)
            return (make(size) for _ in range(held))

        return _Work("train", TrainStep(self._library, trainer, held, self._averages), make_batches)

    def _validation(self) -> _Work:
        """A batch of each loader."""
        step = ValidationStep(self._library, self._trainer, self._loaders["val"])
        given = self._callback._make_batch["val"]

        def make_batches(size: int) -> Any:
            self._set_size("val", size)
            return iter([(given(size), 0)]) if given is not None else step.make_batch(size)

        return _Work("val", step, make_batches)

    def _bounds(self, effective: int | None) -> dict[str, int]:
        """Upper bounds of the size in training, the same on every rank.

        Raises:
            AutoBatchError: the effective batch is larger than an epoch.
        """
        world_size, most = self._trainer.world_size, self._most("train", min)
        if effective is None:
            return self._dataset_bound("train", min)
        if most is not None and effective > most * world_size:
            raise AutoBatchError(
                f"AutoBatch: effective_batch_size is {effective}, above what one epoch holds, "
                f"{most * world_size} samples; lower it"
            )
        options, largest = self._options["train"], _largest(self._options["train"])
        smallest = min(self._smallest("train"), largest)
        check_divisors(effective, world_size, largest, smallest, options.get("multiple_of", 1))
        return {"effective_batch": effective // world_size, **self._dataset_bound("train", min)}

    def _dataset_bound(self, mode: str, among: Callable[[list[int]], int]) -> dict[str, int]:
        most = self._most(mode, among)
        return {} if most is None or self._callback._make_batch[mode] is not None else {"dataset": most}

    def _most(self, mode: str, among: Callable[[list[int]], int]) -> int | None:
        """The smallest or the largest of the sizes at which a loader of any rank still has a full batch.

        None if there is no such limit: with `max`, if one of the loaders that follow the size has none.
        """
        limits = [epoch.most for epoch in self._epochs[mode] if epoch.share is not None]
        known = [limit for limit in limits if limit is not None]
        return among(known) if known and (among is min or len(known) == len(limits)) else None

    def _fitting_validation(self, size: int) -> int:
        """The size of training, or the largest below it with which validation, which shares it, fits."""
        bound = self._dataset_bound("val", max)  # batches of a larger size do not become larger
        asked = min(size, *bound.values()) if bound else size
        fitting = self._at_most(self._validation(), asked, "max_batch_size" if asked == size else "dataset")
        if fitting == asked:
            return size
        logger.warning(
            "AutoBatch: validation fits at batch size %d only, and shares %s with training, which fits at "
            "%d; give validation an attribute of its own (val_batch_arg_name)",
            fitting, self._callback._names["train"], size,
        )  # fmt: skip
        return fitting

    def _split(self, effective: int, size: int) -> Split:
        """The largest micro-batch up to this size that divides the effective batch and suits BatchNorm."""
        smallest = max(min(self._smallest("train"), size), min_samples(self._module))
        world_size = self._trainer.world_size
        multiple_of = self._options["train"].get("multiple_of", 1)
        try:
            split = split_effective_batch(effective, world_size, size, smallest, multiple_of)
            while self._leaves_one(split.micro_batch_size):
                lower = split.micro_batch_size - 1
                split = split_effective_batch(effective, world_size, lower, smallest, multiple_of)
        except AutoBatchError as error:
            if min_samples(self._module) == 1:
                raise
            raise AutoBatchError(
                f"{error}; BatchNorm needs two, also in the last batch of an epoch unless the loader has "
                "drop_last=True"
            ) from None
        return split

    def _without_single_samples(self, work: _Work, size: int) -> int:
        """The largest size up to this one that leaves BatchNorm no single sample; it is run."""
        while (lower := self._suiting_batchnorm(size)) < size:
            size = self._at_most(work, lower, "last_batch")
        return size

    def _suiting_batchnorm(self, size: int) -> int:
        """The largest size up to this one at which no rank's epoch ends with a single sample.

        Raises:
            AutoBatchError: that is below the smallest that is asked for.
        """
        if size == 1 or not self._leaves_one(size):
            return size
        smallest = max(min(self._smallest("train"), size), 2)
        multiple = self._options["train"].get("multiple_of", 1)
        for lower in range(size - 1, smallest - 1, -1):
            if (lower < multiple or lower % multiple == 0) and not self._leaves_one(lower):
                return lower
        raise AutoBatchError(
            f"AutoBatch: each batch size from {smallest} to {size} that may be used leaves a single sample "
            "for the last batch of an epoch, and BatchNorm needs two; give the loader drop_last=True, or "
            "lower min_batch_size"
        )

    def _leaves_one(self, size: int) -> bool:
        """Whether there is BatchNorm, and on some rank the last batch of an epoch has a single sample."""
        is_needed = min_samples(self._module) > 1
        return is_needed and any(epoch.last_batch(size) == 1 for epoch in self._epochs["train"])

    def _smallest(self, mode: str) -> int:
        """The smallest size asked for that leaves two samples to loaders that take a fraction of it."""
        least = max(epoch.least for epoch in self._epochs[mode])
        asked: int = self._options[mode].get("min_batch_size", 1)
        return max(asked, least)

    def _find(self, work: _Work, bounds: dict[str, int]) -> int:
        """The largest size within the bounds; the size of the run that is resumed if it still fits."""
        options, earlier = self._options[work.mode], self._earlier.get(work.mode)
        if earlier is None:
            return self._search(work, bounds, {"min_batch_size": self._smallest(work.mode)})
        limits = {"max_batch_size": options.get("max_batch_size", earlier), **bounds}
        name = min(limits, key=lambda name: limits[name])
        asked = min(earlier, limits[name])
        size = self._at_most(work, asked, "max_batch_size")
        if size < earlier:
            why = "no longer fits" if asked == earlier else f"is above {name}, {asked}"
            logger.warning(
                "AutoBatch (%s): batch size %d of the run that is resumed %s; going on with %d",
                work.mode, earlier, why, size,
            )  # fmt: skip
        return size

    def _at_most(self, work: _Work, size: int, limited_by: str) -> int:
        """Run a size, and search below it if it does not fit.

        Args:
            work: what to run.
            size: at most `max_batch_size`, except in validation.
            limited_by: what the result reports if the size fits.
        """
        options = {
            "min_batch_size": min(self._smallest(work.mode), size), "max_batch_size": size, "start": size,
            "strategy": "guided",
        }  # fmt: skip
        if size % self._options[work.mode].get("multiple_of", 1):
            options["multiple_of"] = 1
        if limited_by != "last_batch":
            options["objective"] = "memory"  # the size is given, not to be chosen
        if limited_by == "max_batch_size":
            return self._search(work, {}, options)
        # The lower of the two bounds is the one that the result names.
        return self._search(work, {limited_by: size}, {**options, "max_batch_size": size + 1})

    def _search(self, work: _Work, bounds: dict[str, int], options: dict[str, Any]) -> int:
        result = auto_find_batch_size(
            work.step, work.make_batch, state=trial_state(self._trainer, self._averages), mode=work.mode,
            device=self._trainer.strategy.root_device, bounds=bounds, predict=False,
            **{**self._options[work.mode], **options},
        )  # fmt: skip
        self.results[work.mode] = result
        return result.batch_size

    def _loaders_of(self, mode: str, name: str) -> Loaders:
        loop = self._trainer.fit_loop
        source = (loop if mode == "train" else loop.epoch_loop.val_loop)._data_source
        if not source.is_module():
            return Loaders(self._library, self._trainer, mode, None, name)
        loaders = Loaders(self._library, self._trainer, mode, partial(_set, self._module, name), name)
        if loaders.follow:
            self._follows[mode] = name
        return loaders

    def _set_size(self, mode: str, size: int) -> None:
        """The module may use the size in its steps; the rehearsal puts it back."""
        if mode in self._follows:
            _set(self._module, self._follows[mode], size)


def _largest(options: Mapping[str, Any]) -> int:
    """The largest size that a search with these options tries."""
    default = inspect.signature(auto_find_batch_size).parameters["max_batch_size"].default
    return int(options.get("max_batch_size", default))


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
        if is_param(step, "dataloader_iter", explicit=True):
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


def _say(library: Library, plan: _Plan, results: Mapping[str, AutoBatchResult]) -> None:
    """Print what was found, as Lightning prints what it does."""
    parts = [f"batch size {plan.train}"]
    if plan.accumulation_steps is not None:
        parts.append(f"accumulate_grad_batches {plan.accumulation_steps}")
    if plan.val is not None:
        parts.append(f"validation {plan.val}")
    if plan.learning_rate is not None:
        parts.append(f"learning rate {plan.learning_rate:.6g}")
    seconds = sum(result.seconds for result in results.values())
    library("utilities.rank_zero").rank_zero_info(f"AutoBatch: {', '.join(parts)} ({seconds:.1f} s)")


def _holders(module: Any, name: str) -> list[Any]:
    """The module, the data module, and their hyperparameters, as far as they have the attribute."""
    owners = [module, getattr(module._trainer, "datamodule", None)]
    holders = [owner for owner in owners if owner is not None and hasattr(owner, name)]
    return holders + [
        owner._hparams for owner in owners if owner is not None and name in getattr(owner, "hparams", {})
    ]


def _get(module: Any, name: str) -> Any:
    holder = _holders(module, name)[-1]
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


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
