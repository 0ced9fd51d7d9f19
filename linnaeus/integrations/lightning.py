"""AutoBatch as a callback of Lightning's trainer.

    from linnaeus.integrations.lightning import AutoBatch

    Trainer(callbacks=[AutoBatch(target_memory_fraction=0.85, max_batch_size=512)]).fit(model)

The search runs while the strategy sets up the model: it is on its device, and neither optimizers nor loaders
nor the wrapper of DDP exist. The search makes its own, throws them away, and training makes its own with the
size found, as it would with that size by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch.nn.modules.batchnorm import _BatchNorm

from linnaeus.autobatch import AutoBatchResult, auto_find_batch_size
from linnaeus.autobatch.arguments import check_choice, check_count
from linnaeus.batching.scaling import scale_factor
from linnaeus.batching.stages import MANY_ACCUMULATION_STEPS, Split, nearest, split_samples
from linnaeus.errors import AutoBatchError
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

LR_NAMES = ("lr", "learning_rate")
"""Attributes that hold the learning rate, in this order; Lightning's own finder looks for the same."""

_NOT_ALONE = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy")
"""Strategies, by name, that are kinds of the searchable ones and still cannot be searched."""

logger = logging.getLogger("linnaeus.autobatch")


@dataclass
class _Plan:
    """What a run is to use. Sizes are None where nothing was searched."""

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
        for given in (options, val_options or {}):
            _check_options(given)
        for name, count in (
            ("effective_batch_size", effective_batch_size), ("base_batch_size", base_batch_size)
        ):  # fmt: skip
            if count is not None:
                check_count(name, count)
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
        self._options = {"train": dict(options), "val": {**options, **(val_options or {})}}
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
        search = _Search(self, library, trainer, module)
        with rehearsal(library, trainer):
            found = search.run()
        self.results, self._earlier = search.results, {}
        plan = self._plan(trainer, module, found)
        self.batch_size, self.val_batch_size = plan.train, plan.val
        search.apply(plan)
        _say(library, plan, self.results)

    def _plan(self, trainer: Any, module: Any, found: dict[str, int]) -> _Plan:
        plan = _Plan(found["train"], found.get("val"))
        world_size, effective = trainer.world_size, self._effective_batch_size
        if effective is not None:
            split = _split(effective, world_size, plan.train, _min_samples(module))
            plan.train, plan.accumulation_steps = split.micro_batch_size, split.accumulation_steps
        steps = plan.accumulation_steps or trainer.accumulate_grad_batches
        if self._scale_lr is not None:
            assert self._base_batch_size is not None
            rate = self._configured_lr(module)
            factor = scale_factor(self._scale_lr, plan.train * steps * world_size, self._base_batch_size)
            plan.learning_rate = rate * factor
            self._lrs = rate, plan.learning_rate
        return plan

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


class _Search:
    """The searches of one `fit`."""

    def __init__(self, callback: AutoBatch, library: Library, trainer: Any, module: Any) -> None:
        self.results: dict[str, AutoBatchResult] = {}
        self._callback = callback
        self._library = library
        self._trainer = trainer
        self._module = module
        self._averages = averages(trainer)
        self._loaders: dict[str, Loaders] = {}
        self._follows: dict[str, str] = {}  # the attribute that a mode's loaders follow
        callback_name = callback._names["train"]
        _check_step(library, module)
        if callback._effective_batch_size is not None:
            _check_effective(callback._effective_batch_size, trainer, module)
        if callback._scale_lr is not None:
            callback.lr_name(module)
        is_module = trainer.fit_loop._data_source.is_module()
        if is_module and not _holders(module, callback_name):
            raise AutoBatchError(
                f"AutoBatch: neither {type(module).__name__} nor its data module nor their hparams have "
                f"{callback_name}. Let train_dataloader take its batch size from such an attribute, name "
                "another one with batch_arg_name, or hand the loaders to fit"
            )

    def run(self) -> dict[str, int]:
        """The sizes found; inside of `rehearsal`."""
        callback, trainer = self._callback, self._trainer
        self._loaders["train"] = self._loaders_of("train", callback._names["train"])
        if not self._loaders["train"].follow:
            raise AutoBatchError(
                f"AutoBatch: train_dataloader gives the same batch size whatever {callback._names['train']} "
                f"is; let it take the size from self.{callback._names['train']}"
            )
        effective, most = callback._effective_batch_size, self._loaders["train"].most
        if effective is not None and most is not None and effective > most * trainer.world_size:
            raise AutoBatchError(
                f"AutoBatch: effective_batch_size is {effective}, above what one epoch holds, "
                f"{most * trainer.world_size} samples; lower it"
            )
        found = {"train": self._search_train()}
        if callback._val and trainer.enable_validation:
            self._add_validation(found)
        return found

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

    def _search_train(self) -> int:
        callback, trainer = self._callback, self._trainer
        effective = callback._effective_batch_size
        bounds = {}
        if effective is not None:
            bounds["effective_batch"] = effective // trainer.world_size
        is_accumulating = trainer.accumulate_grad_batches > 1 or effective is not None
        held = 2 if is_accumulating and self._module.automatic_optimization else 1
        trainer.accumulate_grad_batches = held
        step = TrainStep(self._library, trainer, held, self._averages)
        make = callback._make_batch["train"] or self._loaders["train"].batch

        def make_batches(size: int) -> Any:
            self._set_size("train", size)
            return (make(size) for _ in range(held))

        size = self._find("train", step, make_batches, bounds)
        while effective is None and (lower := self._without_single_samples(size)) < size:
            # The size is run, as every one that is found.
            size = self._find("train", step, make_batches, {**bounds, "last_batch": lower}, start=lower)
        return size

    def _without_single_samples(self, size: int) -> int:
        """The largest size up to this one whose last batch is not too small for BatchNorm."""
        if _min_samples(self._module) == 1:
            return size
        sizes = range(size, 1, -1)
        return next((lower for lower in sizes if not self._loaders["train"].leaves_one(lower)), size)

    def _add_validation(self, found: dict[str, int]) -> None:
        """Search validation on its own, or see that it fits at the size that it shares with training."""
        callback = self._callback
        has_own = not self._trainer.fit_loop.epoch_loop.val_loop._data_source.is_module() or bool(
            _holders(self._module, callback._names["val"])
        )
        loaders = self._loaders_of("val", callback._names["val" if has_own else "train"])
        if not loaders.follow:
            return
        self._loaders["val"] = loaders
        step = ValidationStep(self._library, self._trainer, loaders)
        given = callback._make_batch["val"]

        def make_batches(size: int) -> Any:
            self._set_size("val", size)
            return iter([(given(size), 0)]) if given is not None else step.make_batch(size)

        if has_own:
            found["val"] = self._find("val", step, make_batches, {})
            return
        fitting = self._find("val", step, make_batches, {}, at_most=found["train"])
        if fitting < min(found["train"], loaders.most or found["train"]):
            logger.warning(
                "AutoBatch: validation fits at batch size %d only, and shares %s with training, which fits "
                "at %d; give validation an attribute of its own (val_batch_arg_name)",
                fitting, callback._names["train"], found["train"],
            )  # fmt: skip
            found["train"] = fitting

    def _find(
        self, mode: Literal["train", "val"], step: Callable[[Any], object], make_batch: Callable[[int], Any],
        bounds: dict[str, int], at_most: int | None = None, start: int | None = None,
    ) -> int:  # fmt: skip
        callback = self._callback
        options = dict(callback._options[mode])
        bounds = {**(options.pop("bounds", None) or {}), **bounds}
        most = self._loaders[mode].most
        if most is not None and callback._make_batch[mode] is None:
            bounds["dataset"] = most
        least = self._loaders[mode].least
        options["min_batch_size"] = max(options.get("min_batch_size", 1), least)
        earlier = callback._earlier.get(mode)
        limit = at_most if earlier is None or at_most is not None else self._searched_before(mode, earlier)
        if limit is not None:
            options["min_batch_size"] = min(options["min_batch_size"], limit)
            options.update(max_batch_size=limit, start=limit, strategy="guided")
            if limit % options.get("multiple_of", 1):
                options["multiple_of"] = 1
        result = auto_find_batch_size(
            step, make_batch, state=trial_state(self._trainer, self._averages), mode=mode,
            device=self._trainer.strategy.root_device, bounds=bounds, predict=False,
            **{"start": start, **options},
        )  # fmt: skip
        if earlier is not None and at_most is None and result.batch_size < (limit or 0):
            logger.warning(
                "AutoBatch (%s): batch size %d of the run that is resumed no longer fits; going on with %d",
                mode, earlier, result.batch_size,
            )  # fmt: skip
        self.results[mode] = result
        return result.batch_size

    def _searched_before(self, mode: str, earlier: int) -> int:
        """The size of an earlier run, within what is asked for now."""
        return min(earlier, int(self._callback._options[mode].get("max_batch_size", earlier)))

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


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what is no argument of the search, or is set by the callback."""
    allowed = (auto_find_batch_size.__kwdefaults__ or {}).keys() - {
        "state", "mode", "device", "start", "predict", "group"
    }  # fmt: skip
    unknown = sorted(set(options) - allowed)
    if unknown:
        raise TypeError(
            f"AutoBatch has no option {unknown[0]!r}; its options are {', '.join(sorted(allowed))}"
        )


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
    if effective % trainer.world_size:
        raise AutoBatchError(
            f"AutoBatch: effective_batch_size is {effective}, which does not divide by {trainer.world_size} "
            f"processes; {-(-effective // trainer.world_size) * trainer.world_size} would"
        )
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


def _min_samples(module: Any) -> int:
    """Fewest samples of a micro-batch: BatchNorm needs two."""
    return 2 if any(isinstance(part, _BatchNorm) for part in module.modules()) else 1


def _split(effective: int, world_size: int, largest: int, min_samples: int) -> Split:
    """The largest micro-batch that fits and divides the part of each process.

    Raises:
        AutoBatchError: only micro-batches of fewer samples than `min_samples` divide it.
    """
    split = split_samples(effective // world_size, largest)
    few = split.accumulation_steps <= max(MANY_ACCUMULATION_STEPS, -(-split.samples_per_rank // largest))
    if few and split.micro_batch_size >= min_samples:
        return split

    def suits(samples: int) -> bool:
        other = split_samples(samples, largest)
        return other.accumulation_steps <= MANY_ACCUMULATION_STEPS and other.micro_batch_size >= min_samples

    better = [str(samples * world_size) for samples in nearest(split.samples_per_rank, 2 * effective, suits)]
    text = (
        f"effective_batch_size is {effective}, {split.samples_per_rank} for each process, of which {largest} "
        f"fit at once, and the largest part that divides it is {split.micro_batch_size}; "
        f"{' or '.join(better) or 'a smaller size'} would do better"
    )
    if split.micro_batch_size < min_samples:
        raise AutoBatchError(f"AutoBatch: {text}, because BatchNorm needs two samples")
    logger.warning("AutoBatch: %d accumulation steps are slow: %s", split.accumulation_steps, text)
    return split


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
