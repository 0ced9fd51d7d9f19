"""How ranks agree: rank 0 searches, the others wait at the store, and all get one outcome.

    rank 0                                 store                       other ranks
    heartbeat every second  ─────────────▶ beat: "trying 128"  ──────▶ still alive? else give up after 30 s
    result, or its error    ─────────────▶ outcome             ──────▶ take it
                                           taken/<rank>        ◀────── so that rank 0 may leave

One process takes the same path without a store.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as torch_dist

from linnaeus.dist import World
from linnaeus.errors import AutoBatchError, LinnaeusError

BEAT_S = 1.0
POLL_S = 0.2
SILENCE_S = 30.0
"""Without a heartbeat for this long, rank 0 counts as dead or hung."""
REPORT_S = 60.0
FAREWELL_S = 3.0
"""How long rank 0, ending with an error, waits for the others to have read it."""

logger = logging.getLogger("linnaeus.autobatch")


class Status:
    """What rank 0 is doing, in words, for the heartbeat."""

    def __init__(self) -> None:
        self.text = "starting"


def search_on_main(
    world: World, search: Callable[[Status], dict[str, Any]], *, timeout_minutes: float
) -> dict[str, Any]:
    """Run the search on rank 0 and give every rank its outcome.

    Args:
        world: the processes.
        search: runs on rank 0 alone, must use no collective, gives a JSON-serialisable result.
        timeout_minutes: how long the other ranks wait. The search has the same deadline and ends by itself.

    Raises:
        LinnaeusError: on the other ranks, with rank 0's message, when the search raised; an `AutoBatchError`
            when rank 0 fell silent or the time passed. On rank 0 whatever the search raised.
    """
    if not world.is_distributed or world.store is None:
        return search(Status())
    store = torch_dist.PrefixStore("autobatch", world.store)
    if world.is_main:
        return _search(world, store, search)
    return _wait(world, store, timeout_minutes)


def _search(
    world: World, store: torch_dist.Store, search: Callable[[Status], dict[str, Any]]
) -> dict[str, Any]:
    status, done = Status(), threading.Event()
    heart = threading.Thread(target=_beat, args=(store, status, done), daemon=True)
    heart.start()
    try:
        result = search(status)
    except BaseException as error:
        message = str(error) if isinstance(error, LinnaeusError) else f"{type(error).__name__}: {error}"
        store.set("outcome", json.dumps({"error": message, "exit_code": getattr(error, "exit_code", 1)}))
        _wait_until_read(world, store)
        raise
    finally:
        done.set()
        heart.join()
    store.set("outcome", json.dumps({"result": result}))
    return result


def _beat(store: torch_dist.Store, status: Status, done: threading.Event) -> None:
    count = 0
    while not done.wait(BEAT_S if count else 0):
        count += 1
        try:
            store.set("beat", json.dumps([count, status.text]))
        except MemoryError:  # the thread shares the cap of a trial
            continue


def _wait(world: World, store: torch_dist.Store, timeout_minutes: float) -> dict[str, Any]:
    started = last_beat = last_report = time.monotonic()
    beat = b""
    logger.info("rank %d waits for rank 0's batch-size search", world.rank)
    while not store.check(["outcome"]):
        now = time.monotonic()
        newest = store.get("beat") if store.check(["beat"]) else b""
        if newest != beat:
            beat, last_beat = newest, now
        if now - last_beat > SILENCE_S:
            raise AutoBatchError(
                f"AutoBatch: rank 0 gave no sign of life for {SILENCE_S:.0f} s; it died or hangs"
            )
        if now - started > timeout_minutes * 60 + SILENCE_S:
            raise AutoBatchError(
                f"AutoBatch: rank 0 took longer than DATA.AUTOBATCH.TIMEOUT_MINUTES = {timeout_minutes:g}"
            )
        if now - last_report > REPORT_S:
            last_report = now
            doing = json.loads(beat)[1] if beat else "nothing known"
            logger.info("rank %d has waited %.0f s; rank 0: %s", world.rank, now - started, doing)
        time.sleep(POLL_S)
    outcome = json.loads(store.get("outcome"))
    store.set(f"taken/{world.rank}", "1")
    if "error" in outcome:
        error = LinnaeusError(outcome["error"])
        error.exit_code = outcome["exit_code"]
        raise error
    return outcome["result"]  # type: ignore[no-any-return]


def _wait_until_read(world: World, store: torch_dist.Store) -> None:
    """Stay until the others have the error: torchrun ends them as soon as one process has failed."""
    keys = [f"taken/{rank}" for rank in range(1, world.world_size)]
    deadline = time.monotonic() + FAREWELL_S
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)
