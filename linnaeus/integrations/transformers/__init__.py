"""AutoBatch for the `Trainer` of Hugging Face's transformers and its subclasses, such as TRL's.

from linnaeus.integrations.transformers import autobatch

autobatch(trainer, target_memory_fraction=0.85).train()
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import TrainerState

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.ranks.group import joined_ranks, of_main
from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.autobatch.settings import check_choice, check_count, kind_of
from linnaeus.integrations.budget import search_within
from linnaeus.integrations.common import (
    checked_options,
    divisor_of,
    find_size,
    warn_of_growth,
)
from linnaeus.integrations.transformers.data import budget_loader, ends_of, trial_data
from linnaeus.integrations.transformers.trial import rehearsal

AnyTrainer = TypeVar("AnyTrainer")

_LOOP, _SHARDED = "_inner_training_loop", "is_distributed_loading_by_transformers"
_LOADER = "get_train_dataloader"
_ACCEPTED = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "_BaseTrainer", "BaseTrainer")
"""The trainers of TRL that can be searched: others generate, or pair samples for one batch size."""

logger = logging.getLogger("linnaeus.autobatch")


def autobatch(
    trainer: AnyTrainer,
    target_memory_fraction: float = 0.8,
    *,
    budget: Literal["tokens"] | None = None,
    effective_batch_size: int | None = None,
    evaluation: bool | None = None,
    eval_options: Mapping[str, Any] | None = None,
    samples: Sequence[Any] | None = None,
    eval_samples: Sequence[Any] | None = None,
    **options: Any,
) -> AnyTrainer:
    """Let a trainer find its batch sizes when `train()` is called: `autobatch(trainer).train()`.

    The search runs the trainer's own steps on the longest samples of its own datasets. Training is then
    bit-identical to a trainer with `per_device_train_batch_size` set by hand. All ranks use the same size. A
    resumed run tries the size in its checkpoint once and keeps it. If it no longer fits, a warning says so,
    and a smaller one is searched.

    `trainer.args` then holds the sizes, and `trainer.autobatch_results` the results by mode, `train` and
    `val`. The first `train()` searches. With `model_init`, each `train()` does, such as in
    `hyperparameter_search`.

    Args:
        trainer: a `Trainer`, your own subclass or TRL's `SFTTrainer`, `DPOTrainer` or
            `RewardTrainer`.
        target_memory_fraction: fraction of the device's total memory that may be in use, in (0, 1].
        budget: "tokens" makes batches of as many tokens as fit, few long samples or many short ones, with
            `BudgetBatchSampler`, in place of batches of as many samples. `per_device_train_batch_size` then
            holds the tokens. Lengths come from the column `args.length_column_name`, else from `input_ids`.
            `max_batch_size` bounds the tokens.
        effective_batch_size: samples per optimizer step of all ranks; the size becomes a divisor of it,
            and `gradient_accumulation_steps` follow. By default they stay as they are. No divisor is below
            `min_batch_size`, or 2 for a model with BatchNorm.
        evaluation: find `per_device_eval_batch_size` too; by default where `eval_strategy` evaluates.
        eval_options: further or other arguments of `auto_find_batch_size`, for the search of evaluation.
        samples: samples to make batches of, such as `longest(dataset, 512)`, in place of the samples of the
            dataset for which the collator gives the largest batches. Few samples repeat.
        eval_samples: the same for evaluation.
        options: further arguments of `auto_find_batch_size`: `min_batch_size`, `max_batch_size` (None is no
            upper bound), `memory_limit_gb`, `multiple_of` and others.

    Returns:
        The trainer.

    Raises:
        AutoBatchError: the trainer cannot be searched; in `train()`: no size fits, none within the bounds
            divides the effective batch, or an epoch has fewer samples.
        TypeError, ValueError: an argument of the wrong type or out of its range.
    """
    if isinstance(trainer, type) or not hasattr(trainer, _LOOP):
        raise TypeError(
            f"trainer is {kind_of(trainer)}; it must be an object of transformers.Trainer"
        )
    options["target_memory_fraction"] = target_memory_fraction
    eval_options = {**options, **(eval_options or {})}
    if budget is not None:
        check_choice("budget", budget, ["tokens"])
        if effective_batch_size is not None or samples is not None:
            raise ValueError(
                "budget is 'tokens': batches then differ in their samples; leave effective_batch_size and "
                "samples out"
            )
        options.setdefault("max_batch_size", None)
    options = checked_options("autobatch()", options)
    eval_options = checked_options("eval_options", eval_options)
    check_supported(trainer)
    if effective_batch_size is not None:
        check_count("effective_batch_size", effective_batch_size)
    by_mode: dict[Mode, dict[str, Any]] = {"train": options, "val": eval_options}
    given: dict[Mode, Sequence[Any] | None] = {"train": samples, "val": eval_samples}
    setattr(
        trainer, _LOOP, _Search(trainer, by_mode, effective_batch_size, evaluation, given, budget)
    )
    return trainer


def check_supported(trainer: Any) -> None:
    """Check that a trainer's batch size can be searched, and that nothing else searches it.

    Raises:
        AutoBatchError: it cannot; names the obstacle and the reason.
        ValueError: `auto_find_batch_size` is set in its arguments.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if args.auto_find_batch_size:
        raise ValueError(
            "args.auto_find_batch_size is True: it shrinks the batch size after each crash, beside the "
            "search of autobatch(). Set auto_find_batch_size=False"
        )
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    refused = [kind.__name__ for kind in kinds if kind.__name__ not in _ACCEPTED]
    optim = str(getattr(args.optim, "value", args.optim))
    sizes = trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()
    is_split = accelerator.num_processes > 1 and accelerator.split_batches
    unsupported = {
        f"TRL's {' '.join(refused)}; SFTTrainer, DPOTrainer and RewardTrainer can be searched": refused,
        "DeepSpeed, whose steps communicate between the ranks": trainer.is_deepspeed_enabled,
        "FSDP, whose steps communicate between the ranks": trainer.is_fsdp_enabled,
        "tensor, context or sequence parallelism": max(sizes) > 1,
        "a model sharded when it was loaded": getattr(trainer, _SHARDED, False),
        "a model on several devices (device_map)": trainer.is_model_parallel,
        "DataParallel on several GPUs in one process; start it with torchrun": args.n_gpu > 1,
        f"optim={optim!r}, which steps within the backward pass": re.search(
            "layerwise|lomo", optim
        ),
        "batch_rebalance, whose batches vary in size": args.train_sampling_strategy
        == "batch_rebalance",
        "accelerator_config.split_batches over several ranks": is_split,
    }
    for what, is_there in unsupported.items():
        if is_there:
            raise AutoBatchError(
                f"AutoBatch cannot search the batch size of this {type(trainer).__name__} with {what}. Set "
                "per_device_train_batch_size by hand."
            )


@dataclass
class _Search:
    """Stands in for a trainer's loop: searches, then runs the loop with the size found."""

    trainer: Any
    options: Mapping[Mode, dict[str, Any]]
    effective_batch_size: int | None
    evaluation: bool | None
    samples: Mapping[Mode, Sequence[Any] | None]
    budget: str | None = None

    def __call__(self, batch_size: int | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Run the loop. `batch_size` is the trainer's original batch size."""
        trainer = self.trainer
        checkpoint = keywords.get("resume_from_checkpoint")
        with joined_ranks() as control:  # so that an error of one rank ends all
            check_supported(trainer)  # arguments may have been set meanwhile
            # Not every machine need see the checkpoint's folder.
            self._find(of_main(control, checkpoint and size_in_checkpoint(checkpoint)), control)
        if trainer.model_init is None:  # else the next model may be another one
            del vars(trainer)[_LOOP]
        loop = getattr(type(trainer), _LOOP)
        return loop(trainer, trainer._train_batch_size, *arguments, **keywords)

    def _find(self, earlier: int | None, control: ControlPlane | None) -> None:
        trainer, args, effective = self.trainer, self.trainer.args, self.effective_batch_size
        vars(trainer).pop(_LOADER, None)  # of an earlier search
        search = self._search if self.budget is None else self._search_budget
        results = {"train": search("train", control, earlier)}
        size, steps = results["train"].batch_size, args.gradient_accumulation_steps
        if effective is not None:
            size = self._divisor(effective, size)
            args.gradient_accumulation_steps = effective // (self._num_processes * size)
        elif earlier is None and self.budget is None:
            warn_of_growth(args.per_device_train_batch_size * steps, size * steps)
        trainer._train_batch_size = args.per_device_train_batch_size = size
        if self.budget is not None:
            setattr(trainer, _LOADER, partial(budget_loader, trainer, self._ends, size))
        if self._evaluates:
            results["val"] = self._search("val", control)
            args.per_device_eval_batch_size = results["val"].batch_size
        logger.info(
            "AutoBatch: per_device_train_batch_size %d, per_device_eval_batch_size %d",
            size,
            args.per_device_eval_batch_size,
        )
        trainer.autobatch_results = results

    @property
    def _num_processes(self) -> int:
        return self.trainer.accelerator.num_processes  # type: ignore[no-any-return]

    @property
    def _evaluates(self) -> bool:
        args = self.trainer.args
        generates = getattr(args, "predict_with_generate", False)
        if self.evaluation and generates:
            raise AutoBatchError(
                "AutoBatch cannot search per_device_eval_batch_size with predict_with_generate, whose memory "
                "grows with the generated tokens. Set evaluation=False."
            )
        if self.evaluation is None:
            strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
            return not generates and (strategy != "no" or args.eval_on_start)
        return self.evaluation

    def _search(
        self, mode: Mode, control: ControlPlane | None, earlier: int | None = None
    ) -> AutoBatchResult:
        """Search one mode; where an earlier run has used a size, run this, and search below if it must be."""
        trainer, options, bounds = self.trainer, self.options[mode], dict[str, int]()
        args = trainer.args
        with rehearsal(trainer) as steps:
            look, num_samples = trial_data(
                trainer, mode, self.samples[mode], options["timeout_minutes"]
            )
            if num_samples is not None:  # a batch cannot have more
                is_dropped = mode == "train" and args.dataloader_drop_last
                filled = 0 if is_dropped else self._num_processes - 1
                bounds["dataset"] = (num_samples + filled) // self._num_processes
            effective = self.effective_batch_size if mode == "train" else None
            if effective is not None:  # an error comes before the search
                self._divisor(effective, options["max_batch_size"], bounds.get("dataset"))
                bounds["effective_batch"] = effective // self._num_processes

            def make_batches(size: int) -> list[Any]:
                num_batches = 1 if mode == "val" else int(args.gradient_accumulation_steps)
                if effective is not None:
                    num_batches = -(-bounds["effective_batch"] // size)
                return steps.batches(look.batch(size), num_batches)

            return find_size(
                steps.train if mode == "train" else partial(steps.predict, num_samples),
                make_batches,
                options,
                earlier,
                control=control,
                looks=[look],
                state=steps.state,
                mode=mode,
                device=args.device,
                bounds=bounds,
            )

    def _search_budget(
        self, mode: Mode, control: ControlPlane | None, earlier: int | None
    ) -> AutoBatchResult:
        """Search the tokens of a batch; trials run the batches of the longest and of the most samples."""
        trainer, args = self.trainer, self.trainer.args
        with rehearsal(trainer) as steps:
            self._ends = ends = ends_of(trainer)

            def step(batch: Any) -> None:
                steps.train(steps.batches(batch, int(args.gradient_accumulation_steps)))

            return search_within(
                ends,
                partial(ends.run, step),
                self.options[mode],
                earlier,
                control=control,
                state=steps.state,
                device=args.device,
            )

    def _divisor(self, effective: int, largest: int, epoch: int | None = None) -> int:
        model, options = self.trainer.model, self.options["train"]
        return divisor_of(effective, self._num_processes, largest, model, options, epoch)


def size_in_checkpoint(folder: str) -> int | None:
    """The batch size per rank of a trainer's checkpoint; None where it holds none."""
    path = Path(folder) / "trainer_state.json"
    return TrainerState.load_from_json(str(path)).train_batch_size if path.is_file() else None
