"""Sizes that runs under the same conditions find for each other: one searches, the others take what it found.

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
from typing import Any

from linnaeus.autobatch.conditions import shared_key
from linnaeus.autobatch.protocol import RankStatus, exchange
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.sizes import SizeSearch, find_sizes, still_fit
from linnaeus.errors import ConfigError, LinnaeusError
from linnaeus.files import FolderInUseError, FolderLock, write_text_atomically

SIZES = "sizes.json"
POLL_S = 0.5
"""Time between two looks at what the run that searches has left."""

logger = logging.getLogger("linnaeus.run")


@dataclass(frozen=True)
class Sharing:
    """Where runs leave the sizes that they find.

    Attributes:
        folder: the same for all runs that share.
        run: name of this run.
    """

    folder: Path
    run: str


def find_shared_sizes(
    search: SizeSearch, key: str, sharing: Sharing
) -> tuple[dict[str, AutoBatchResult], str | None]:
    """Take the sizes that a run has found under the same conditions, or search and leave them for others.

    Every rank must call this. Rank 0 decides.

    Args:
        search: the search of this run.
        key: its `search_key`.
        sharing: where sizes are left.

    Returns:
        The sizes by mode, and the run that found them; None where this one has.

    Raises:
        LinnaeusError: the same on every rank.
    """
    place: _Place | None = None

    def take(status: RankStatus) -> dict[str, Any] | None:
        nonlocal place
        if not search.world.is_main:
            return None
        conditions = shared_key(key, search)
        place = _Place(sharing.folder / hashlib.sha256(conditions.encode()).hexdigest()[:16], conditions)
        return place.take(status, 60 * search.config.AUTOBATCH.TIMEOUT_MINUTES)

    try:
        timeout_minutes = search.config.AUTOBATCH.TIMEOUT_MINUTES
        content = exchange(search.world.control, take, timeout_minutes=timeout_minutes)[0]
        if content is not None:
            found, run = _results(content), str(content["found_by"])
            if _can_be_taken(search, found):
                sizes = " and ".join(f"{result.batch_size} ({mode})" for mode, result in found.items())
                logger.info("AutoBatch: batch size %s, found by run %s under the same conditions", sizes, run)
                return found, run
            logger.info("AutoBatch: the sizes found by run %s need more memory than is free now", run)
            return find_sizes(search), None
        found = find_sizes(search)
        if place is not None:
            place.leave(found, sharing.run)
        return found, None
    finally:
        if place is not None:
            place.release()


def _can_be_taken(search: SizeSearch, found: Mapping[str, AutoBatchResult]) -> bool:
    """Whether the sizes fit on every rank: into its device now, and batches of them into host memory.

    Every rank must call this.
    """

    def is_within(status: RankStatus) -> bool:
        return all(result.batch_size <= min(search.limits(result.mode).values()) for result in found.values())

    return still_fit(search, found) and all(exchange(search.world.control, is_within))


def _results(content: Mapping[str, Any]) -> dict[str, AutoBatchResult]:
    return {mode: AutoBatchResult.from_dict(mode, entry) for mode, entry in content["autobatch"].items()}


class _Place:
    """What runs under the same conditions share; only rank 0 of each has one.

    Args:
        folder: theirs.
        conditions: in full, because the name of the folder is a hash.
    """

    def __init__(self, folder: Path, conditions: str) -> None:
        self._folder, self._conditions = folder, conditions
        self._lock: FolderLock | None = None

    def take(self, status: RankStatus, limit_s: float) -> dict[str, Any] | None:
        """The sizes that are there, waiting for a run that searches; None where this run is to search.

        It holds the lock then, except where the wait has taken too long or nothing can be written.
        """
        deadline = time.monotonic() + limit_s
        is_told = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while (content := self._read()) is None:
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
                    content = self._read()  # it may have been left since the last look
                    break
            return content
        except (OSError, ConfigError) as error:
            logger.warning("AutoBatch: sizes cannot be shared in %s (%s)", self._folder, error)
            return None

    def leave(self, found: Mapping[str, AutoBatchResult], run: str) -> None:
        """Leave the sizes for the others. A run goes on where that is not possible."""
        content = {
            "found_by": run,
            "autobatch": {mode: result.as_dict() for mode, result in found.items()},
            "conditions": json.loads(self._conditions),
        }
        try:
            write_text_atomically(self._folder / SIZES, json.dumps(content, indent=2) + "\n")
        except (OSError, LinnaeusError) as error:
            logger.warning("AutoBatch: sizes cannot be shared in %s (%s)", self._folder, error)

    def release(self) -> None:
        """Let the others search or take."""
        if self._lock is not None:
            self._lock.release()

    def _read(self) -> dict[str, Any] | None:
        """What is there; None where nothing is, or it is damaged."""
        try:
            content: dict[str, Any] = json.loads((self._folder / SIZES).read_text(encoding="utf-8"))
            _results(content)
            is_same = content["conditions"] == json.loads(self._conditions)
            return content if is_same and isinstance(content["found_by"], str) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
