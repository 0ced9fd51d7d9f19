"""One batch size for all ranks: rank 0 searches, then all run the size found; none waits in a collective.

If the size does not fit everywhere, all run the size of the rank where the least fits, until one fits on all.
Between two rounds the ranks exchange their results through the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from linnaeus.autobatch.errors import AutoBatchError, TooSmallError
from linnaeus.autobatch.finder import CONFIRMATION_GRACE_S, BatchSizeFinder
from linnaeus.autobatch.observer import gib, sized
from linnaeus.autobatch.ranks.collectives import lockstep
from linnaeus.autobatch.ranks.exchange import JobFailedError, OverdueError
from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.search import OutOfMemory
from linnaeus.autobatch.settings import SearchSettings

GRACE_S = CONFIRMATION_GRACE_S + 30.0
"""Time that the other ranks wait beyond the deadline of a search, for its last trial."""
JOINT_STEPS = 4
"""Steps of a joint trial: without a cap, a third step may reserve more than the first two."""

logger = logging.getLogger("linnaeus.autobatch")


class RankStatus:
    """Reports the activity of this rank, and exchanges results with the others.

    Args:
        show: called with each new activity, such as `train: trying batch size 128`, and with the rank that
            this one waits for.
        control: the control plane of the ranks; None if there are no others.
    """

    def __init__(
        self, show: Callable[[str], None] = lambda text: None, control: ControlPlane | None = None
    ) -> None:
        self._show, self._control = show, control

    def update(self, text: str) -> None:
        """Set the activity of this rank.

        Raises:
            LinnaeusError: another rank has failed or died; with its message and exit code.
        """
        if self._control is not None:
            self._control.update(text)
            self._control.check()
        self._show(text)

    def gather(self, result: Any, *, timeout_minutes: float = 60.0) -> list[Any]:
        """Return the picklable results of all ranks, in rank order; without a collective. All must call this.

        Args:
            timeout_minutes: deadline of the others' work; they are waited for `GRACE_S` longer.

        Raises:
            LinnaeusError: another rank has failed, has died, hangs or has not finished in time.
        """
        control = self._control
        if control is None:
            return [result]
        self.update("waiting")
        if control.rank != 0:  # rank 0 logs to the user's console
            logger.info("waiting for rank %d and the others", control.name_of(0))
        try:
            return control.gather(
                result,
                limit_s=timeout_minutes * 60 + GRACE_S,
                on_wait=lambda rank, doing: self._show(f"waiting for rank {rank}: {doing}"),
            )
        except OverdueError as error:
            raise AutoBatchError(
                f"AutoBatch: rank {error.rank} has taken longer than timeout_minutes and "
                f"{GRACE_S:.0f} s more (it is {error.doing}); raise the timeout or lower max_trials"
            ) from None

    @contextlib.contextmanager
    def joint_steps(self) -> Iterator[AbstractContextManager[object]]:
        """Raise an error of any rank on all ranks, inside the context; yield the context of joint steps.

        Raises:
            JobFailedError: the first failure, this rank's own included; its cause is this rank's error.
        """
        control = self._control
        if control is None:
            yield contextlib.nullcontext()
            return
        before, control.communicates = control.communicates, True
        try:
            yield lockstep(control)
        except JobFailedError:
            raise
        except Exception as error:
            control.publish(error, always_raise=True)
        finally:
            control.communicates = before


def search_on_ranks(
    finder_for: Callable[[RankStatus, SearchSettings], AbstractContextManager[BatchSizeFinder]],
    settings: SearchSettings,
    control: ControlPlane | None,
    *,
    found: AutoBatchResult | None = None,
    size: int | None = None,
    show: Callable[[str], None] = lambda text: None,
    agree: bool = False,
) -> AutoBatchResult:
    """Search on rank 0, then run the size found on every rank, until one fits on all. All must call this.

    Args:
        finder_for: makes the finder of this rank, whose trials use no collective, and which updates the
            status.
        settings: of the search, the same on every rank.
        control, show: see `RankStatus`.
        found: result of an earlier call; each rank runs `size` once and searches below it if it does not
            fit. Memory does not always grow with the size: a smaller size may not fit either.
        size: chosen earlier. It is tried first, and no larger one is.
        agree: where a rank finds no size, all ranks raise a `TooSmallError`, and can continue.

    Returns:
        The result with the trials of rank 0. If the last size run fits on every rank, it is among those that
        ran there; if not, the largest size that fits on the rank with the smallest is the new batch size.

    Raises:
        AutoBatchError: no size fits.
        LinnaeusError: see `RankStatus.gather`.
    """
    status, is_once = RankStatus(show, control), found is not None
    while True:
        status.update("starting")
        verdict: Any = None
        if found is not None or control is None or control.rank == 0:
            try:
                with finder_for(
                    status, settings if size is None else settings.at_most(size)
                ) as finder:
                    verdict = finder.find()
            except AutoBatchError as error:
                if not agree:
                    raise
                verdict = TooSmallError(str(error), None)
        verdicts = status.gather(verdict, timeout_minutes=settings.timeout_minutes)
        if errors := [each for each in verdicts if isinstance(each, TooSmallError)]:
            raise errors[0]
        found = (
            verdicts[0]
            if found is None or size is None
            else _merged(found, verdicts, size, control)
        )
        if control is None or is_once or size in found.ran_on_every_rank:
            return found
        size = found.batch_size


def confirm_jointly(
    found: AutoBatchResult,
    make_finder: Callable[[SearchSettings], AbstractContextManager[BatchSizeFinder]],
    search: Callable[..., AutoBatchResult],
    status: RankStatus,
    settings: SearchSettings,
    *,
    agree: bool = False,
    unit: str | None = None,
) -> AutoBatchResult:
    """Run the size found in a joint step of all ranks, and smaller sizes until one is within every budget.

    A rank alone does not see the memory of real collectives and communication hooks. In a joint step every
    rank takes the same steps regardless of its measurements. The peak is compared with the budget afterwards.
    All ranks raise the first failure, such as a device that is really full. All must call this.

    Args:
        found: result of `search`; each rank has run its size alone.
        make_finder: makes the finder of this rank, whose trials use the real process groups.
        search: `search_on_ranks`, with all but `found` and `size` given.
        status, settings, agree: as there.
        unit: of the sizes in messages, where they do not count samples.

    Raises:
        AutoBatchError: the smallest size is above the budget, or memory ran out on a rank.
        LinnaeusError: see `RankStatus.gather`.
    """
    num_steps = max(settings.steps_per_trial, JOINT_STEPS)
    while True:
        size, mode = found.batch_size, found.mode
        status.update(f"{mode}: joint step with {sized(size, unit)}")
        logger.info("AutoBatch %s: all ranks step together with %s", mode, sized(size, unit))
        with (
            make_finder(dataclasses.replace(settings, steps_per_trial=num_steps)) as finder,
            status.joint_steps() as lockstep,
        ):
            try:
                own_excess = finder.measure_jointly(size, lockstep)
            except OutOfMemory as error:
                raise AutoBatchError(
                    f"AutoBatch: memory ran out in a joint step of all ranks with {mode} {sized(size, unit)} "
                    f"({error}); set max_batch_size below it, or lower target_memory_fraction"
                ) from error
        excess_bytes = max(status.gather(own_excess, timeout_minutes=settings.timeout_minutes))
        if excess_bytes <= 0:
            ran = dict.fromkeys((*found.ran_on_every_rank, size))
            return dataclasses.replace(found, ran_on_every_rank=tuple(ran))
        above = f"{sized(size, unit)} is {gib(excess_bytes)} GiB above the budget in a joint step"
        logger.info("%s (%s)", above, mode)
        if size <= finder.min_size:
            text = f"AutoBatch ({mode}): {above}; raise target_memory_fraction"
            raise TooSmallError(text, None) if agree else AutoBatchError(text)
        growth_bytes = max(found.budget_bytes + excess_bytes - found.held_bytes, 1)
        smaller = min(size - 1, int(size * (1 - excess_bytes / growth_bytes)))
        smaller = max(smaller, finder.min_size)
        found = search(found=found, size=smaller)
        if smaller in found.ran_on_every_rank:
            found = dataclasses.replace(
                found,
                batch_size=smaller,
                certified=smaller == size - 1,
                limited_by="memory",
                within=(size - 1 - smaller) / smaller,
            )


def _merged(
    found: AutoBatchResult,
    verdicts: Sequence[AutoBatchResult],
    size: int,
    control: ControlPlane | None,
) -> AutoBatchResult:
    """Merge the results of all ranks that have run a size or searched below it."""
    smallest = min(verdicts, key=lambda verdict: verdict.batch_size)
    own = verdicts[0]
    found = dataclasses.replace(
        found,
        trials=(*found.trials, *own.trials),
        held_bytes=own.held_bytes,
        budget_bytes=own.budget_bytes,
        seconds=found.seconds + max(each.seconds for each in verdicts),
    )
    if smallest.batch_size == size:
        return dataclasses.replace(found, ran_on_every_rank=(*found.ran_on_every_rank, size))
    if control is not None:
        logger.info(
            "rank %d fits no more than %d (%s): its budget is %s GiB, and %s GiB are held before the first "
            "sample",
            control.name_of(verdicts.index(smallest)),
            smallest.batch_size,
            found.mode,
            gib(smallest.budget_bytes),
            gib(smallest.held_bytes),
        )
    return dataclasses.replace(
        found,
        batch_size=smallest.batch_size,
        certified=smallest.certified,
        within=smallest.within,
        limited_by=smallest.limited_by,
    )
