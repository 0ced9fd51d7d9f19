"""Finds damaged image files, and remembers intact ones by path, size and time of modification."""

# ruff: noqa: PTH100, PTH116 (hot paths)
from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path

import PIL

from linnaeus.data.image import find_damage

logger = logging.getLogger("linnaeus.data")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, is_damaged INTEGER);
CREATE INDEX IF NOT EXISTS damaged ON files (path) WHERE is_damaged;
"""
_INTACT = "SELECT path FROM files WHERE path = ? AND size = ? AND mtime_ns = ? AND NOT is_damaged"
_CHUNK = 4096
"""Files after which results are stored, so that an interrupted check goes on there."""


def find_damaged(paths: Sequence[str], *, only_suspects: bool = False) -> tuple[dict[int, str], int]:
    """Read the image files that are not known to be intact.

    Files found damaged before are read again, as a network disk may have failed for a moment. With
    `only_suspects`, no others are.

    Returns:
        The position of each damaged file with the reason, and the number of files known to be intact.
    """
    damaged: dict[int, str] = {}
    num_known = 0
    with (
        closing(_open_cache(is_made=not only_suspects)) as cache,
        ThreadPool(min(32, len(os.sched_getaffinity(0)))) as pool,
    ):
        positions: Sequence[int] = range(len(paths))
        if only_suspects:
            rows = _rows(cache, "SELECT path FROM files WHERE is_damaged")
            suspects = {os.fsdecode(path) for (path,) in rows}
            positions = [i for i in positions if suspects and os.path.abspath(paths[i]) in suspects]
        else:
            logger.info("checking %d images", len(paths))
        for start in range(0, len(positions), _CHUNK):
            keys = {i: _key(paths[i]) for i in positions[start : start + _CHUNK]}
            unread = [i for i, key in keys.items() if not _rows(cache, _INTACT, key)]
            num_known += len(keys) - len(unread)
            # Pillow releases Python's global lock while it decodes.
            reasons = pool.map(find_damage, [paths[i] for i in unread], chunksize=64)
            damaged |= {i: reason for i, reason in zip(unread, reasons, strict=True) if reason is not None}
            found = [(*keys[i], i in damaged) for i in unread]
            with suppress(sqlite3.Error), cache:  # read-only, full, or locked for long
                cache.executemany("REPLACE INTO files VALUES (?, ?, ?, ?)", found)
    return damaged, num_known


def _open_cache(*, is_made: bool) -> sqlite3.Connection:
    """The cache of the user and this version of Pillow; an empty one, without tables, where it fails.

    With `is_made`, it is made where there is none.
    """
    with suppress(OSError, RuntimeError, sqlite3.Error):  # RuntimeError: no home folder
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linnaeus"
        file = folder / f"images-pillow-{PIL.__version__}.sqlite"
        if is_made:
            folder.mkdir(parents=True, exist_ok=True)
        elif not file.is_file():
            return sqlite3.connect(":memory:")
        cache = sqlite3.connect(file, timeout=10)
        cache.executescript(_SCHEMA)
        return cache
    return sqlite3.connect(":memory:")


def _rows(cache: sqlite3.Connection, query: str, values: Sequence[object] = ()) -> list[tuple[bytes]]:
    with suppress(sqlite3.Error):
        return cache.execute(query, values).fetchall()
    return []


def _key(path: str) -> tuple[bytes, int, int]:
    """Path, size in bytes and time of modification; -1 where there is no such file."""
    with suppress(OSError):
        status = os.stat(path)
        return os.fsencode(os.path.abspath(path)), status.st_size, status.st_mtime_ns
    return os.fsencode(os.path.abspath(path)), -1, -1
