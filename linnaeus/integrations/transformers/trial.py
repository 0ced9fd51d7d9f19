"""A step of a Hugging Face `Trainer` as a trial runs it: alone on its rank, leaving no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedType,
    find_batch_size,
    recursively_apply,
    send_to_device,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from linnaeus.autobatch.state.contents import Contents
from linnaeus.autobatch.state.optimizers import UnlistedOptimizerError
from linnaeus.autobatch.state.rng import rng_state, set_rng_state
from linnaeus.integrations.common import WholeLoop

_PROCESS_STATES: list[dict[str, Any]] = [PartialState._shared_state, AcceleratorState._shared_state]


@contextlib.contextmanager
def rehearsal(trainer: Any) -> Iterator[Rehearsal]:
    """Let a trainer run steps before its own loop has prepared anything: `with rehearsal(trainer) as steps`.

    On exit, the trainer's attributes, its model's `forward`, its accelerator and the global random number
    generators are restored. Parameters keep the values of the search. Inside, nothing is logged and no
    callback is called.
    """
    accelerator, device, model = trainer.accelerator, trainer.args.device, trainer.model
    with contextlib.ExitStack() as stack:
        stack.callback(set_rng_state, rng_state(device), device)
        stack.callback(_kept(trainer).restore)
        trainer.log = lambda *_, **__: None
        trainer.callback_handler.call_event = lambda event, args, state, control, **_: control
        # Preparing sets attributes of the model itself: `forward` with autocast, and that it is prepared.
        stack.callback(vars(model).update, dict(vars(model)))
        stack.callback(vars(model).clear)
        several = accelerator.num_processes > 1
        if several:
            for state in _PROCESS_STATES:  # `gather` and the like return their input
                state["distributed_type"] = DistributedType.NO
        prepared = wrapped = accelerator.prepare_model(model, evaluation_mode=True)
        if several:
            handler, is_cpu = accelerator.ddp_handler, accelerator.device.type == "cpu"
            wrapped = DistributedDataParallel(
                prepared,
                device_ids=None if is_cpu else [accelerator.local_process_index],
                **({} if handler is None else handler.to_kwargs()),
            )
        yield Rehearsal(trainer, prepared, wrapped)


class Rehearsal:
    """Training and prediction steps of a trainer.

    Args:
        trainer: within `train()`, before its loop.
        prepared: its model.
        wrapped: the model as training calls it: over several ranks in a wrapper.

    Attributes:
        state: objects that a step changes, for `auto_find_batch_size`.
    """

    def __init__(self, trainer: Any, prepared: nn.Module, wrapped: nn.Module) -> None:
        self._trainer, self._accelerator = trainer, trainer.accelerator
        self._prepared, self._wrapped = prepared, wrapped
        joins = trainer.args.eval_do_concat_batches
        self._run_loop = WholeLoop(trainer.args.device, "validation", joins=joins)
        trainer.create_optimizer()
        modules, optimizers = held_by(trainer)
        trainer.optimizer = self._accelerator.prepare_optimizer(
            trainer.optimizer, device_placement=False
        )
        scaler = self._accelerator.scaler
        self.state = (wrapped, trainer.optimizer, modules, *optimizers, scaler)

    def train(self, batches: Sequence[Any]) -> None:
        """Run an optimizer step as the trainer's loop does, with the first and the last of its micro-batches.

        The others allocate only memory that the first has allocated and freed.

        Args:
            batches: of one step, and one more: the trainer's loader reads ahead.
        """
        trainer, accelerator, model = self._trainer, self._accelerator, self._wrapped
        num_batches = len(batches) - 1
        inputs, num_items = trainer.get_batch_samples(
            iter(batches[:-1]), num_batches, trainer.args.device
        )
        trainer.current_gradient_accumulation_steps = num_batches
        for number in sorted({0, num_batches - 1}):
            is_last = number == num_batches - 1
            accelerator.gradient_state._set_sync_gradients(is_last)
            is_alone = is_last or not isinstance(model, DistributedDataParallel)
            with contextlib.nullcontext() if is_alone else model.no_sync():  # type: ignore[operator]
                try:
                    trainer.training_step(model, inputs[number], num_items)
                except UnlistedOptimizerError as error:
                    remedy = "Keep it in the trainer's attributes, before train() or in create_optimizer()"
                    raise UnlistedOptimizerError(error.optimizer, remedy) from None
        if trainer.args.max_grad_norm:
            accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        model.zero_grad()

    def predict(self, num_samples: int | None, batches: Sequence[Any]) -> None:
        """Run prediction steps as the trainer's evaluation does, beside the outputs kept by its loop.

        Args:
            num_samples: of the loop; None if unknown.
            batches: the batch, and one more.
        """
        trainer, args = self._trainer, self._trainer.args
        loss_only = True if trainer.compute_metrics is None else args.prediction_loss_only
        num_batches = -(-(num_samples or 1) // (find_batch_size(batches[0]) or 1))

        def run() -> Any:
            _, logits, labels = trainer.prediction_step(self._prepared, batches[0], loss_only)
            if logits is not None and trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            # The labels of the next batch are others.
            return (
                None
                if args.batch_eval_metrics
                else (logits, recursively_apply(torch.clone, labels))
            )

        if args.device.type != "cpu":  # the loop moves kept outputs to the CPU
            num_batches = min(num_batches, args.eval_accumulation_steps or num_batches)
        kept = list[Any]()
        for number in (1, 2)[:num_batches]:
            kept.append(self._run_loop(run, number, num_batches))

    def batches(self, ahead: Any, num_batches: int) -> list[Any]:
        """Return copies of a batch on the device, and the batch itself, which is read ahead."""
        # Not `copy.deepcopy`, whose tensors a trial on the CPU does not count.
        copies = (recursively_apply(Tensor.clone, ahead) for _ in range(num_batches))
        return [send_to_device(each, self._accelerator.device) for each in copies] + [ahead]


class _Held(nn.ModuleList):
    """Modules with modes of their own, which a search leaves alone."""

    def train(self, mode: bool = True) -> Self:
        return self


def held_by(trainer: Any) -> tuple[nn.ModuleList, list[torch.optim.Optimizer]]:
    """Return the modules and optimizers among a trainer's attributes, also in containers there.

    Without its model and its optimizer. The modules are one list, so that ranks may hold different ones.
    """
    modules, optimizers = list[nn.Module](), list[torch.optim.Optimizer]()

    def collect(value: Any) -> tuple[Any, ...]:
        if isinstance(value, nn.Module):
            modules.append(value)
        elif isinstance(value, torch.optim.Optimizer):
            optimizers.append(value)
        return ()

    known = [
        *_datasets(trainer),
        trainer.optimizer,
        trainer.model_wrapped,
        *trainer.model.modules(),
    ]
    Contents([vars(trainer)], map(id, known), collect, without_tensors=True)
    return _Held(modules), optimizers


def _datasets(trainer: Any) -> list[Any]:
    return [trainer.train_dataset, trainer.eval_dataset]


def _kept(trainer: Any) -> Contents:
    """Attributes of a trainer and its parts, and accelerate's state of the process."""
    names = ("data_collator", "state", "control", "callback_handler", "accelerator")
    parts = [trainer, *(getattr(trainer, name) for name in names)]
    owners = [
        vars(owner)
        for owner in (*parts, trainer.accelerator.gradient_state)
        if hasattr(owner, "__dict__")
    ]
    return Contents([*owners, *_PROCESS_STATES], map(id, _datasets(trainer)))
