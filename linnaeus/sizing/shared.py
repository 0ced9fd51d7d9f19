"""Batch sizes shared between runs with the same search conditions: one searches, the others reuse its result.

The runs have a folder in common, such as that of a sweep, with a folder in it for each set of conditions:

    <folder>/<hash of the conditions>/sizes.json    what was found, and by whom; written atomically
                                      .lock         locked by the run that searches

The lock is one of the kernel: it is free once the run that searches has ended, in whatever way, and the next
one searches. Nobody waits longer than the deadline of a search; then each searches by itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from linnaeus.autobatch.memory.device import device_memory
from linnaeus.autobatch.ranks.protocol import RankStatus, exchange
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.files import FolderInUseError, FolderLock, not_written, write_text_atomically
from linnaeus.sizing.conditions import shared_key
from linnaeus.sizing.sizes import SizeSearch, find_sizes, still_fit

SIZES = "sizes.json"
POLL_S = 0.5
"""Time between two looks for the result of the run that searches."""

logger = logging.getLogger("linnaeus.run")


@dataclass(frozen=True)
class Sharing:
    """The folder of shared sizes.

    Attributes:
        folder: the same for all runs that share.
        run: name of this run.
    """

    folder: Path
    run: str


def find_shared_sizes(
    search: SizeSearch, key: str, sharing: Sharing
) -> tuple[dict[str, AutoBatchResult], str | None]:
    """Reuse the sizes that a run has found under the same conditions, or search and save them for others.

    Every rank must call this. Rank 0 decides.

    Args:
        search: the search of this run.
        key: its `search_key`.
        sharing: where sizes are saved.

    Returns:
        The sizes by mode, and the run that found them; None if this run found them.

    Raises:
        LinnaeusError: the same on every rank.
    """
    control, timeout_minutes = search.world.control, search.config.AUTOBATCH.TIMEOUT_MINUTES
    keys = exchange(control, lambda status: shared_key(key, search), timeout_minutes=timeout_minutes)
    # The devices and machines of the ranks may differ.
    shared = _SharedSizes(sharing.folder, [json.loads(each) for each in sorted(set(keys))])

    def wait_or_lock(status: RankStatus) -> _Saved | None:
        return shared.wait_or_lock(status, 60 * timeout_minutes) if search.world.is_main else None

    try:
        saved = exchange(control, wait_or_lock, timeout_minutes=timeout_minutes)[0]
        search.world.warm_up_collectives()  # what they hold is in use before a search, too
        if saved is None:
            return _search_and_save(search, shared, sharing.run), None
        return _reuse_or_search(search, saved)
    finally:
        shared.unlock()


def _search_and_save(search: SizeSearch, shared: _SharedSizes, run: str) -> dict[str, AutoBatchResult]:
    """Search, and save the sizes with the growth of the rank that needs most. Every rank must call this."""
    before_bytes = _non_allocator_bytes(search)
    found = find_sizes(search)
    growths = exchange(
        search.world.control, lambda status: max(_non_allocator_bytes(search) - before_bytes, 0)
    )
    if search.world.is_main:
        shared.save(_Saved(run, found, max(growths)))
    return found


def _reuse_or_search(search: SizeSearch, saved: _Saved) -> tuple[dict[str, AutoBatchResult], str | None]:
    """The saved sizes where they fit on every rank, else those of a new search. Every rank must call this."""
    if _can_be_taken(search, saved.sizes, saved.growth_bytes):
        sizes = " and ".join(f"{result.batch_size} ({mode})" for mode, result in saved.sizes.items())
        text = "AutoBatch: batch size %s, found by run %s under the same conditions"
        logger.info(text, sizes, saved.found_by)
        return saved.sizes, saved.found_by
    logger.info(
        "AutoBatch: the sizes found by run %s do not fit into the memory that is free now, on the device or "
        "the host", saved.found_by,
    )  # fmt: skip
    return find_sizes(search), None


def _non_allocator_bytes(search: SizeSearch) -> int:
    """Bytes in use outside the allocator: a search loads kernels and libraries, which a later run lacks yet.

    On the CPU these belong to the process itself, and not to its budget.
    """
    device = search.world.device
    return 0 if device.type == "cpu" else device_memory(device).outside()


def _can_be_taken(search: SizeSearch, found: Mapping[str, AutoBatchResult], growth_bytes: int) -> bool:
    """Whether the sizes fit on every rank: into its device now, and batches of them into host memory.

    Every rank must call this. `growth_bytes` is how much memory outside the allocator grew during the search
    that found the sizes.
    """

    def is_within(status: RankStatus) -> bool:
        return all(result.batch_size <= min(search.limits(result.mode).values()) for result in found.values())

    fits = still_fit(search, found, growth_bytes=growth_bytes)
    return fits and all(exchange(search.world.control, is_within))


class _Saved(NamedTuple):
    """What a run has found: `sizes.json` without the conditions.

    Attributes:
        found_by: name of the run.
        sizes: by mode.
        growth_bytes: how much memory outside the allocator grew during the search, on the rank with most.
    """

    found_by: str
    sizes: dict[str, AutoBatchResult]
    growth_bytes: int


class _SharedSizes:
    """The sizes of runs under the same conditions; only rank 0 of each run reads, locks and saves.

    Args:
        folder: of shared sizes.
        conditions: in full, because the name of the inner folder is a hash.
    """

    def __init__(self, folder: Path, conditions: list[Any]) -> None:
        self._folder = folder / hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]
        self._conditions = conditions
        self._lock: FolderLock | None = None

    def wait_or_lock(self, status: RankStatus, limit_s: float) -> _Saved | None:
        """The saved sizes, waiting for a run that searches; None where this run is to search.

        It holds the lock then, except where the wait has taken too long or nothing can be written.
        """
        deadline = time.monotonic() + limit_s
        is_told = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while (saved := self._read()) is None:
                try:
                    self._lock = FolderLock(self._folder)
                except FolderInUseError:
                    if not is_told:
                        logger.info("AutoBatch: another run is searching under the same conditions, waiting")
                    is_told = True
                    if time.monotonic() > deadline:
                        logger.info("AutoBatch: the other run's search takes too long, so this one searches")
                        return None
                    status.update("waiting for another run's search")
                    time.sleep(POLL_S)
                else:
                    return self._read()  # it may have been saved since the last look
            return saved
        except (OSError, ConfigError) as error:
            self._warn(error)
            return None

    def save(self, saved: _Saved) -> None:
        """Save the sizes for the others. A run goes on where that is not possible."""
        content = {
            "found_by": saved.found_by,
            "autobatch": {mode: result.as_dict() for mode, result in saved.sizes.items()},
            "growth_bytes": saved.growth_bytes,
            "conditions": self._conditions,
        }
        try:
            write_text_atomically(self._folder / SIZES, json.dumps(content, indent=2) + "\n")
        except (OSError, LinnaeusError) as error:
            self._warn(error)

    def unlock(self) -> None:
        """Let the others search or reuse."""
        if self._lock is not None:
            self._lock.release()

    def _warn(self, error: Exception) -> None:
        # A lock names the keys of a run's folder, whose files cannot be written for the same reasons.
        cause = error.__cause__ if isinstance(error, ConfigError) else error
        reason = not_written(self._folder, cause) if isinstance(cause, OSError) else error
        logger.warning("AutoBatch: sizes are not shared: %s (DATA.AUTOBATCH.SHARED_FOLDER)", reason)

    def _read(self) -> _Saved | None:
        """What was saved; None where nothing was, or it is damaged."""
        try:
            content: dict[str, Any] = json.loads((self._folder / SIZES).read_text(encoding="utf-8"))
            sizes = {
                mode: AutoBatchResult.from_dict(mode, entry) for mode, entry in content["autobatch"].items()
            }
            saved = _Saved(content["found_by"], sizes, content["growth_bytes"])
            is_valid = isinstance(saved.found_by, str) and isinstance(saved.growth_bytes, int)
            return saved if is_valid and content["conditions"] == self._conditions else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
