"""Passes over image files: which are damaged, range of values.

Readable files are remembered by path, size, time of modification and use.
"""

# ruff: noqa: PTH109, PTH116 (hot paths)
from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import PIL

from linnaeus.data.image import (
    Decoding,
    bits_of,
    file_range,
    find_damage,
)
from linnaeus.data.packed import container
from linnaeus.runtime.errors import DataError
from linnaeus.runtime.words import counted

T = TypeVar("T")

logger = logging.getLogger("linnaeus.data")

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS readable "
    "(path BLOB, decoding TEXT, size INTEGER, mtime_ns INTEGER, PRIMARY KEY (path, decoding)) WITHOUT ROWID"
)
_KNOWN = "SELECT path, size, mtime_ns FROM readable WHERE decoding = ? AND path IN ({})"
_REMEMBER = "REPLACE INTO readable (decoding, path, size, mtime_ns) VALUES (?, ?, ?, ?)"
_FORGET = "DELETE FROM readable WHERE path = ?"
MOST_IMAGES = 1000
"""Images that ranges are measured on."""

_CHUNK = 4096
"""Files after which results are stored, so that an interrupted check resumes there."""


def find_damaged(
    paths: Sequence[str], channels: int, decoding: Decoding
) -> tuple[dict[int, str], int]:
    """Read the image files that are not known to be readable, as `load_image` reads them.

    Returns:
        The position of each damaged file with the reason, and the number of files known to be readable.
    """
    damaged: dict[int, str] = {}
    num_known = 0
    use, here = repr((channels, decoding)), os.getcwd()
    find = partial(find_damage, channels=channels, decoding=decoding)
    logger.info("checking %d images", len(paths))
    with closing(_open_cache()) as cache, ThreadPool(_num_threads()) as pool:
        for start in range(0, len(paths), _CHUNK):
            keys = [_key(path, here) for path in paths[start : start + _CHUNK]]
            asked = [key[0] for key in keys]
            known = {*cache.execute(_KNOWN.format(",".join("?" * len(asked))), (use, *asked))}
            unread = [i for i, key in enumerate(keys, start) if key not in known]
            num_known += len(keys) - len(unread)
            reasons = pool.map(find, [paths[i] for i in unread], chunksize=64)
            damaged |= {
                i: reason for i, reason in zip(unread, reasons, strict=True) if reason is not None
            }
            with suppress(sqlite3.Error), cache:  # read-only, full, or locked for long
                found = [(use, *keys[i - start]) for i in unread if i not in damaged]
                cache.executemany(_REMEMBER, found)
                gone = [key[:1] for key in keys if key[1] < 0]
                cache.executemany(_FORGET, gone)
    return damaged, num_known


def measure_ranges(
    splits: Mapping[str, Sequence[str]], channels: int, decoding: Decoding
) -> tuple[Decoding, list[str]]:
    """Return the decoding with the ranges of wide integers and of floats that it lacks, and notes.

    The first split that has such values decides: the training files, as a rule. Notes say the range, and
    which splits exceed it. At most `MOST_IMAGES` files of a split are read, evenly spread. Damaged ones do
    not count.

    Raises:
        DataError: values are negative, or use little of the range; the message names a file.
    """
    notes: list[str] = []
    for split, files in splits.items():
        wide = [file for file in files if not file.lower().endswith((".jpg", ".jpeg"))]
        found = _measured(file_range, wide, channels, decoding)
        for key in ("bit_depth", "float_bits"):
            ranges = [each for each in found if each[2] == key]
            if not ranges:
                continue
            lowest, highest = min(ranges), max(ranges, key=itemgetter(1))
            bits: Any = bits_of(highest[1], key)
            known = getattr(decoding, key)
            white = 2 ** (known or bits) - 1
            if known is None:
                is_negative = lowest[0] * 510 < -white  # which would not round to 0
                if is_negative or highest[1] - lowest[0] < white / 20 or bits > 32:
                    low, high, _, file = lowest if is_negative else highest
                    raise DataError(
                        f"{file}: its values, {low:g} to {high:g}, do not match the range 0 to {white:g}; "
                        "scale the values of all files to 0..1 or 0..255"
                    )
                decoding = replace(decoding, **{key: bits})
                notes.append(
                    f"values 0 to {white} (measured on {counted(len(ranges), 'file')}) are scaled to 0 to 255"
                )
            elif bits > known:
                notes.append(f"{split}: values above {white} are clipped, such as in {highest[3]}")
    return decoding, notes


def _num_threads() -> int:
    """Threads that decode images together; Pillow releases Python's global lock while it decodes."""
    return min(32, len(os.sched_getaffinity(0)))


def _measured(
    function: Callable[..., T | None],
    files: Sequence[str],
    channels: int,
    decoding: Decoding,
) -> list[T]:
    """Results of the function, other than None, for up to `MOST_IMAGES` intact files, spread evenly."""

    def measure(file: str) -> T | None:
        with suppress(Exception):  # a damaged file may raise anything
            return function(file, channels, decoding)
        return None

    number = min(len(files), MOST_IMAGES)
    some = [files[i * len(files) // number] for i in range(number)]
    with ThreadPool(_num_threads()) as pool:
        return [each for each in pool.imap(measure, some) if each is not None]


def _open_cache() -> sqlite3.Connection:
    """Return the cache of the user and this version of Pillow; one in memory where it fails."""
    with suppress(OSError, RuntimeError, sqlite3.Error):  # RuntimeError: no home folder
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linnaeus"
        folder.mkdir(parents=True, exist_ok=True)
        return _connect(folder / f"images-pillow-{PIL.__version__}.sqlite")
    return _connect(":memory:")


def _connect(place: Path | str) -> sqlite3.Connection:
    cache = sqlite3.connect(place, timeout=10)
    try:
        cache.execute(_SCHEMA)
    except sqlite3.Error:
        cache.close()
        raise
    return cache


def _key(path: str, here: str) -> tuple[bytes, int, int]:
    """Path, size in bytes and time of modification; -1 if there is no such file."""
    whole = path if path[:1] == "/" else f"{here}/{path}"  # `os.path.join` takes as long as `stat`
    name = whole.encode("utf-8", "surrogateescape")
    try:
        status = os.stat(container(whole))
    except OSError:
        return name, -1, -1
    return name, status.st_size, status.st_mtime_ns
