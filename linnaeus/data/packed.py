"""Images inside larger files, such as Arrow files: the path `FILE:NAME@OFFSET+SIZE` locates the bytes of one.

Any process can read such paths in any order, without an index or a memory map of the file.
"""

from __future__ import annotations

import os
import re
from io import BufferedReader, BytesIO
from pathlib import Path

_PACKED = re.compile(r"(.+):[^:/]*@(\d+)\+(\d+)", re.DOTALL)


def packed_path(file: str, name: object, offset: int, size: int) -> str:
    """Return the path of an image inside a file.

    >>> container(packed_path("birds.tar", "a/1.jpg", 512, 2041))
    'birds.tar'
    """
    return f"{file}:{re.sub('[:/]', '_', str(name))}@{offset}+{size}"


def container(path: str) -> str:
    """Return the file that holds an image: `path` itself if the image is not packed."""
    found = _PACKED.fullmatch(path) if "@" in path else None
    return path if found is None else found[1]


def unpacked(path: str | Path) -> BytesIO | None:
    """Return the bytes of a packed image; None if the image is not packed."""
    found = _PACKED.fullmatch(str(path)) if "@" in str(path) else None
    if found is None:
        return None
    with open(found[1], "rb") as file:  # noqa: PTH123 (hot path)
        return BytesIO(os.pread(file.fileno(), int(found[3]), int(found[2])))


def opened(path: str | Path) -> BytesIO | BufferedReader:
    """Open an image, packed or not, for reading."""
    return unpacked(path) or Path(path).open("rb")
