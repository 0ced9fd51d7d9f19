"""Every rank does its own work and gets the results of all, while none waits in a collective.

A search of several ranks consists of such exchanges: rank 0 searches, all run the size that it found, and if
it does not fit everywhere, all run the size of the rank where the least fits, until one fits on all.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linnaeus.autobatch.errors import AutoBatchError
from linnaeus.autobatch.finder import CONFIRMATION_GRACE_S
from linnaeus.autobatch.names import ARGUMENTS, Names
from linnaeus.autobatch.observer import gib
from linnaeus.autobatch.ranks.control import ControlPlane, OverdueError
from linnaeus.autobatch.result import AutoBatchResult

GRACE_S = CONFIRMATION_GRACE_S + 30.0
"""Time that the others wait beyond the deadline of the work: a search finishes its last trial first."""

logger = logging.getLogger("linnaeus.autobatch")


@dataclass(frozen=True)
class RankStatus:
    """Says what a rank is doing: `update` gets each new text, such as `train: trying batch size 128`."""

    update: Callable[[str], None] = lambda text: None


Work = Callable[[RankStatus], Any]
"""What a rank does in an exchange."""
Exchange = Callable[[Work], list[Any]]
"""`exchange` with every argument bound except `work`."""


def exchange(
    control: ControlPlane | None,
    work: Work,
    *,
    timeout_minutes: float = 60.0,
    show: Callable[[str], None] = lambda text: None,
    names: Names = ARGUMENTS,
) -> list[Any]:
    """Call `work` on every rank, wait for all ranks, and return their results.

    Waiting uses neither the GPU nor a collective, so that no timeout of the process group applies. Every rank
    must call this, in the same order as all that uses the control plane.

    Args:
        control: the control plane of the ranks; None if there are no others.
        work: updates the status that it is given, uses no collective, and returns a picklable value. An
            update raises the error of another rank.
        timeout_minutes: after this time the work must end by itself; the others wait `GRACE_S` longer.
        show: called with what this rank does, and with whom it waits for then.
        names: what messages call the settings.

    Returns:
        The results in rank order.

    Raises:
        LinnaeusError: another rank has failed, has died or hangs; with its message and exit code.
        AutoBatchError: another rank has not finished in time.
    """

    def tell(text: str) -> None:
        if control is not None:
            control.update(text)
            control.check()
        show(text)

    def tell_waiting(rank: int, doing: str) -> None:
        show(f"waiting for rank {rank}: {doing}")

    status = RankStatus(tell)
    status.update("starting")
    result = work(status)
    if control is None:
        return [result]
    status.update("waiting")
    if control.rank != 0:  # rank 0 logs to the user's console
        logger.info("waiting for rank %d and the others", control.name_of(0))
    try:
        return control.gather(result, limit_s=timeout_minutes * 60 + GRACE_S, on_wait=tell_waiting)
    except OverdueError as error:
        raise AutoBatchError(
            f"AutoBatch: rank {error.rank} has taken longer than {names.timeout_minutes} and "
            f"{GRACE_S:.0f} s more (it is {error.doing}); raise the timeout or lower {names.max_trials}"
        ) from None


def search_on_main(exchange_all: Exchange, rank: int, search: Callable[[RankStatus], AutoBatchResult]) -> Any:
    """The result of rank 0's search, on every rank. Every rank must call this.

    Args:
        exchange_all: `exchange` of the ranks.
        rank: this process.
        search: called on rank 0.

    Raises:
        LinnaeusError: the same on every rank; see `exchange`.
    """

    def work(status: RankStatus) -> AutoBatchResult | None:
        if rank == 0:
            return search(status)
        status.update("waiting")
        return None

    return exchange_all(work)[0]


def agreed(
    result: AutoBatchResult, run_everywhere: Callable[[AutoBatchResult, int], AutoBatchResult]
) -> AutoBatchResult:
    """Run the size found on every rank, and then the smaller ones, until one fits on all of them.

    Args:
        result: the same on every rank.
        run_everywhere: `run_on_every_rank` with all but the result and the size to run.
    """
    size = None
    while result.batch_size != size:
        size = result.batch_size
        result = run_everywhere(result, size)
    return result


def run_on_every_rank(
    exchange_all: Exchange,
    run: Callable[[RankStatus, int], AutoBatchResult],
    result: AutoBatchResult,
    size: int,
    name_of: Callable[[int], int] = lambda rank: rank,
) -> AutoBatchResult:
    """Run the size found, or one below it, on every rank. Every rank must call this.

    Memory does not always grow with the size: a smaller size may not fit.

    Args:
        exchange_all: `exchange` of the ranks.
        run: runs a size on this rank, and searches below it if it does not fit.
        result: of the search; the same on every rank.
        size: to run.
        name_of: the number that messages give to a rank.

    Returns:
        The result with the new trials of rank 0. If the size fits on every rank, it is among those that ran
        there; if not, the largest size that fits on the rank with the smallest is the new batch size.

    Raises:
        LinnaeusError: the same on every rank; see `exchange`.
    """
    verdicts: list[AutoBatchResult] = exchange_all(lambda status: run(status, size))
    smallest = min(verdicts, key=lambda verdict: verdict.batch_size)
    before_bytes, own = result.held_bytes, verdicts[0]
    result = dataclasses.replace(
        result, trials=(*result.trials, *own.trials), held_bytes=own.held_bytes,
        budget_bytes=own.budget_bytes, seconds=result.seconds + max(each.seconds for each in verdicts),
    )  # fmt: skip
    if smallest.batch_size == size:
        return dataclasses.replace(result, ran_on_every_rank=(*result.ran_on_every_rank, size))
    if len(verdicts) > 1:
        logger.info(
            "rank %d fits no more than %d (%s): %s", name_of(verdicts.index(smallest)),
            smallest.batch_size, result.mode, _why(smallest, before_bytes),
        )  # fmt: skip
    predicted = result.prediction and dataclasses.replace(result.prediction, peak_bytes=None)
    return dataclasses.replace(
        result, batch_size=smallest.batch_size, certified=smallest.certified, within=smallest.within,
        limited_by=smallest.limited_by, prediction=predicted,
    )  # fmt: skip


def _why(verdict: AutoBatchResult, before_bytes: int) -> str:
    """Why a rank fits no larger size; `before_bytes` is what rank 0 held when it last ran the size."""
    budget, held, before = map(gib, (verdict.budget_bytes, verdict.held_bytes, before_bytes))
    failed = [trial for trial in verdict.trials if trial.status != "fits"]
    reason = f"its budget is {budget} GiB"
    if failed:
        trial = min(failed, key=lambda trial: trial.size)
        ended = "ran out of memory" if trial.peak_bytes is None else f"takes {gib(trial.peak_bytes)} GiB"
        reason = f"batch size {trial.size} {ended}, the budget is {budget} GiB"
    return (
        f"{reason}, and {held} GiB are held before the first sample (by rank 0 the last time: {before} GiB)"
    )
