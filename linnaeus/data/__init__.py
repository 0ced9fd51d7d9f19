"""Images, labels and batches: datasets, augmentation, sampling, loading."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec

from linnaeus.runtime.words import several

EXTENSIONS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm .avif .jp2 .npy".split()  # noqa: SIM905
)
"""Endings, in lower case, of the files in a folder that are taken for images."""
EXTENSIONS_TEXT = ", ".join(sorted(EXTENSIONS))
"""The endings for messages."""
_HEIC = frozenset((".heic", ".heif"))

if find_spec("pillow_heif") is not None:
    EXTENSIONS |= _HEIC

_SYSTEM_NAMES = frozenset(
    (
        *("@eadir", "__macosx", "lost+found", "$recycle.bin", "system volume information"),
        *("#recycle", "thumbs.db", "desktop.ini"),
    )
)


def is_ignored(name: str) -> bool:
    """Whether a folder or file is hidden, or one that a system makes: thumbnails, archives, lost files."""
    return name.startswith(".") or name.casefold() in _SYSTEM_NAMES


def is_image(name: str, unread: Counter[str]) -> bool:
    """Whether a file has the ending of an image; counts the endings of others, but for ignored files."""
    ending = os.path.splitext(name)[1].lower()  # noqa: PTH122 (hot path)
    if ending in EXTENSIONS:
        return not name.startswith(".")
    if not is_ignored(name):
        unread[ending] += 1
    return False


def unread_note(unread: Mapping[str, int]) -> str:
    """Count files that are not read because of their endings, and name their reader; empty for none.

    >>> unread_note({".txt": 1, "": 2})
    '3 files with other endings are not read: no ending 2, .txt 1'
    """
    number = sum(unread.values())
    if not number:
        return ""
    endings = [f"{ending or 'no ending'} {n}" for ending, n in Counter(unread).most_common()]
    remedy = "; pip install pillow-heif" if _HEIC & unread.keys() else ""
    files = "file with another ending is" if number == 1 else "files with other endings are"
    return f"{number} {files} not read: {several(endings)}{remedy}"
