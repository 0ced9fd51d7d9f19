"""Every rank does its own work and gets the results of all, while none waits in a collective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linnaeus.autobatch.find import CONFIRMATION_GRACE_S
from linnaeus.control import OverdueError
from linnaeus.dist import World
from linnaeus.errors import AutoBatchError

GRACE_S = CONFIRMATION_GRACE_S + 30.0
"""Time that the others wait beyond the deadline of the work: a search finishes its last trial first."""

logger = logging.getLogger("linnaeus.autobatch")


@dataclass(frozen=True)
class RankStatus:
    """Says what a rank is doing: `update` gets each new text, such as `train: trying batch size 128`."""

    update: Callable[[str], None] = lambda text: None


def exchange(
    world: World,
    work: Callable[[RankStatus], Any],
    *,
    timeout_minutes: float = 60.0,
    show: Callable[[str], None] = lambda text: None,
) -> list[Any]:
    """Call `work` on every rank, wait for all ranks, and return their results.

    Waiting uses neither the GPU nor a collective, so that no timeout of the process group applies. Every rank
    must call this, in the same order as all that uses the control plane.

    Args:
        world: the processes.
        work: updates the status that it is given, uses no collective, and returns a picklable value.
        timeout_minutes: after this time the work must end by itself; the others wait `GRACE_S` longer.
        show: called with what this rank does, and with whom it waits for then.

    Returns:
        The results in rank order.

    Raises:
        LinnaeusError: another rank has failed, has died or hangs; with its message and exit code.
        AutoBatchError: another rank has not finished in time.
    """

    def tell(text: str) -> None:
        world.update(text)
        show(text)

    def tell_waiting(rank: int, doing: str) -> None:
        show(f"waiting for rank {rank}: {doing}")

    status = RankStatus(tell)
    status.update("starting")
    result = work(status)
    if world.control is None:
        return [result]
    status.update("waiting")
    if not world.is_main:  # rank 0 logs to the user's console
        logger.info("waiting for rank 0 and the others")
    try:
        return world.control.gather(result, limit_s=timeout_minutes * 60 + GRACE_S, on_wait=tell_waiting)
    except OverdueError as error:
        raise AutoBatchError(
            f"AutoBatch: rank {error.rank} has taken longer than DATA.AUTOBATCH.TIMEOUT_MINUTES and "
            f"{GRACE_S:.0f} s more (it is {error.doing}); raise the timeout or lower "
            "DATA.AUTOBATCH.MAX_TRIALS"
        ) from None
