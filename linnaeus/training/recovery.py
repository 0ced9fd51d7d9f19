"""After a step ran out of memory: it is taken again in smaller parts, or the run says why it cannot be."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from linnaeus.autobatch.ranks.control import ControlPlane, Keys
from linnaeus.batching.plan import BatchPlan
from linnaeus.batching.stages import Stage
from linnaeus.config.schema import TrainConfig
from linnaeus.dist import World
from linnaeus.errors import OutOfMemoryError, first_line
from linnaeus.models.build import batchnorm_kind
from linnaeus.training.build import Assembly
from linnaeus.training.checkpoint import CheckpointFolder
from linnaeus.training.out_of_memory import (
    SizeOrigin,
    train_remedies,
    update_remedies,
    validation_remedies,
    what_held_memory,
    write_snapshot,
)
from linnaeus.training.step_guard import Phase, StepGuard

logger = logging.getLogger("linnaeus.training.recovery")

CHECKPOINT_LIMIT_S = 600.0
"""How long a rank without memory waits for rank 0 to write the last checkpoint."""


@dataclass
class Recovery:
    """Decides what follows an exception that reports failed allocations.

    Call its methods in the handler of that exception: it holds the activations, which the error counts.

    Attributes:
        config: the TRAIN node.
        assembly: the model and what belongs to it; its state is restored from `guard`.
        world: the processes.
        guard: of the training steps.
        checkpoints: takes the checkpoint with which several ranks end.
        content: makes the content of a checkpoint with a limit on the samples of a micro-batch, but without
            the generators' states.
        origins: where the batch sizes come from, for `train` and `val`.
    """

    config: TrainConfig
    assembly: Assembly
    world: World
    guard: StepGuard
    checkpoints: CheckpointFolder
    content: Callable[[int], dict[str, Any]]
    origins: Mapping[str, SizeOrigin] = field(default_factory=dict)

    def limit_after(self, error: Exception, step: int, stage: Stage, plan: BatchPlan) -> tuple[int, str]:
        """Restore the state before the training step that failed.

        Args:
            error: what it raised.
            step: its number, from 1.
            stage: its sizes.
            plan: of the run.

        Returns:
            The most samples that a micro-batch may have from now on, and what has happened, for a warning.

        Raises:
            OutOfMemoryError: from `error`; the step cannot be taken again, or is not to be.
        """
        limit = -(-stage.micro_batch_size // 2)
        text = (
            f"out of memory in optimizer step {step}, with micro-batches of {stage.micro_batch_size} (x "
            f"{stage.accumulation_steps} accumulation x {stage.world_size} processes): {first_line(error)}"
        )
        obstacle = self._obstacle_to_split(stage, plan.limited(limit))
        if obstacle is not None:
            remedies = self._remedies(stage)
            raise OutOfMemoryError(self._explain(text, "train", obstacle, remedies)) from error
        if self.world.is_distributed:
            self._end_with_checkpoint(error, text, limit)
        self.guard.restore()
        return limit, text

    def validation_error(self, error: Exception, epoch: int) -> OutOfMemoryError:
        """The error for the validation after so many epochs, which has raised `error`."""
        origin = self.origins.get("val")
        size = "" if origin is None else f", with batches of {origin.size}"
        text = f"out of memory in the validation after epoch {epoch}{size}: {first_line(error)}"
        remedies = validation_remedies(origin)
        return OutOfMemoryError(self._explain(text, "val", "Validation is never split", remedies))

    def error_between_steps(self, error: Exception, step: int) -> OutOfMemoryError:
        """The error for anything but a step or a validation, after so many steps, that has raised `error`."""
        text = f"out of memory after optimizer step {step}: {first_line(error)}"
        traceback.clear_frames(error.__traceback__)  # the message needs memory too
        remedies = validation_remedies(self.origins.get("train"))
        return OutOfMemoryError(self._explain(text, "train", "No training step failed", remedies))

    def save_before_step(self, limit: int) -> None:
        """Write a checkpoint of the state before the current step, with a limit on the micro-batches.

        On rank 0 alone, and in another thread if another rank ran out of memory: the main thread waits for it
        in a collective, or soon will. If the other rank failed after it had sent its gradients (while it
        clipped them), rank 0 may have made that step's update already, and writes the state after it: the
        update of all gradients is the one that every rank would have made.

        Raises:
            LinnaeusError: the last update has failed on this rank; nothing is written.
        """
        with self.guard.held(), self.guard.beside_training():
            self.checkpoints.save(self.guard.before(self.content(limit)))
            self.checkpoints.wait()

    def _obstacle_to_split(self, stage: Stage, limited: BatchPlan) -> str | None:
        """Why the step cannot be taken again with the smaller micro-batches of a plan; None if it can."""
        key = "TRAIN.ON_OUT_OF_MEMORY"
        if self.guard.phase is Phase.BETWEEN:
            return f"The copy of the model's buffers, which {key} split makes before each step, did not fit"
        if self.guard.phase is Phase.UPDATE:
            return f"The update had begun, which cannot be undone, so {key} split cannot help"
        if stage.micro_batch_size == 1:
            return "A micro-batch of one sample cannot be split"
        if limited.smallest_micro_batch < 2 and batchnorm_kind(self.assembly.model) == "local":
            return "Split further, a micro-batch would have one sample, too few for BatchNorm"
        if self.config.ON_OUT_OF_MEMORY != "split":
            return f"{key} split would go on with smaller micro-batches"
        return None

    def _remedies(self, stage: Stage) -> Iterable[str]:
        """What helps against the failure of a training step."""
        if self.guard.phase is not Phase.BEFORE_UPDATE:  # there were no activations
            return update_remedies(self.assembly)
        return train_remedies(
            self.config, self.assembly, stage.micro_batch_size, stage.effective_batch_size,
            self.origins.get("train"),
        )  # fmt: skip

    def _explain(self, text: str, mode: str, obstacle: str, remedies: Iterable[str]) -> str:
        """The message, in lines: what failed, where the size comes from, what held the memory, what to do.

        It also writes the allocator's history, if one was recorded, to the run's folder.
        """
        origin = self.origins.get(mode)
        snapshot = write_snapshot(self.checkpoints.folder.parent, self.world)
        is_saved = self.checkpoints.last.exists()
        lines = (
            text,
            "" if origin is None else origin.sentence,
            what_held_memory(self.assembly, self.world.device),
            "" if snapshot is None else f"The allocator's history is in {snapshot}",
            obstacle,
            f"What helps: {'; '.join(remedies)}",
            "The last checkpoint is kept" if is_saved else "No checkpoint has been written yet",
        )
        return ".\n".join(filter(None, lines))

    def _end_with_checkpoint(self, error: Exception, text: str, limit: int) -> NoReturn:
        """End all ranks with a checkpoint from which the next attempt goes on with smaller micro-batches.

        This rank cannot take the step again by itself: the others wait for its gradients in a collective.
        """
        traceback.clear_frames(error.__traceback__)  # frees the activations
        if self.world.is_main:
            self.save_before_step(limit)
            is_saved = True
        else:
            assert self.world.control is not None
            is_saved = ask_main(self.world.control, limit, limit_s=CHECKPOINT_LIMIT_S)
        outcome = (
            "all ranks end with a checkpoint. With TRAIN.AUTO_RESUME True the next attempt (torchrun "
            f"--max-restarts, or the same command again) takes micro-batches of at most {limit} and the same "
            "effective batch"
            if is_saved
            else "rank 0 could not save a checkpoint; the last one is kept"
        )
        raise OutOfMemoryError(f"{text}. TRAIN.ON_OUT_OF_MEMORY split: {outcome}") from error


def ask_main(control: ControlPlane, request: Any, *, limit_s: float) -> bool:
    """Ask rank 0 to do what it serves by `serve_request`, and wait until it is done; for another rank than 0.

    Args:
        control: the control plane of the ranks.
        request: a small picklable value. If ranks ask at once, rank 0 gets one of their requests.
        limit_s: how long to wait.

    Returns:
        Whether it was done: not if it failed, rank 0 died or the job has failed meanwhile.
    """
    control.keys.put_first("request", request)
    deadline = control.clock.monotonic() + limit_s
    while not control.keys.exist(["answer"]):
        is_dead = any(rank == 0 for rank, _ in control.dead_neighbours())
        if is_dead or control.failure is not None or control.clock.monotonic() > deadline:
            return False
        control.clock.sleep(0.05)
    return bool(control.keys.get("answer"))


def serve_request(control: ControlPlane, function: Callable[[Any], object]) -> None:
    """On rank 0, do what another rank asks for, once.

    It is done in a thread of its own: the main thread may wait in a collective for the rank that asks, and
    the heartbeat has to go on.
    """

    def answer(request: Any) -> None:
        is_done = False
        try:
            function(request)
            is_done = True
        except Exception:
            logger.exception("what another rank has asked for could not be done")
        finally:
            control.keys.put("answer", is_done)

    def look(keys: Keys) -> None:
        request = keys.get("request")
        if request is not None:
            control.on_look = lambda keys: None
            threading.Thread(target=answer, args=(request,), name="answer", daemon=True).start()

    if control.rank == 0:
        control.on_look = look
