"""From the words of a command line to paths of images, one at a time. Imports no torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from linnaeus.data.endings import EXTENSIONS

STDIN = "-"
"""The word for a list of paths on standard input, one per line."""


@dataclass(frozen=True)
class Unreadable:
    """An image, or a folder of images, that cannot be read.

    Attributes:
        source: its path.
        reason: why, in words.
    """

    source: str
    reason: str


def walk(words: Iterable[str], lines: Iterable[str] = ()) -> Iterator[str | Unreadable]:
    """The paths that words name, in the order of the words.

    Folders are walked by ascending name, files before folders, hidden ones left out; of a folder, only files
    with the ending of an image count. Beside the folders above it, the names of one folder are held at a
    time.

    Args:
        words: files, folders, patterns with `*`, `?`, `[...]` or `**`, and `-`.
        lines: what `-` stands for: paths of files or folders, one per line. Empty lines do not count.
    """
    for word in words:
        if word == STDIN:
            for line in lines:
                if path := line.rstrip("\r\n"):
                    yield from _below(path)
        elif os.path.lexists(word) or not glob.has_magic(word):
            yield from _below(word)
        else:
            for path in glob.iglob(word, recursive=True):  # noqa: PTH207 (that one sorts nothing either)
                yield from _below(path, is_part_of_pattern="**" in word)


def problem_of(word: str) -> str | None:
    """Why a word names no image, or None. It looks no further than the first image, and reads none."""
    if word == STDIN or next(walk([word]), None) is not None:
        is_there = word == STDIN or os.path.lexists(word) or glob.has_magic(word)
        return None if is_there else "there is no such file or folder"
    if glob.has_magic(word) and not os.path.lexists(word):
        return "no file matches"
    return f"no image in it or below (looked for {', '.join(sorted(EXTENSIONS))})"


def _below(path: str, *, is_part_of_pattern: bool = False) -> Iterator[str | Unreadable]:
    if not os.path.isdir(path):  # noqa: PTH112 (hot path)
        yield path
    elif not is_part_of_pattern:  # `**` names what is below the folder by itself
        yield from _walk_folder(path, frozenset())


def _walk_folder(folder: str, above: frozenset[str]) -> Iterator[str | Unreadable]:
    real = os.path.realpath(folder)
    if real in above:
        yield Unreadable(folder, "a symbolic link leads back to a folder above it")
        return
    try:
        files, folders = _entries(folder)
    except OSError as error:
        yield Unreadable(folder, f"the folder cannot be read: {error.strerror}")
        return
    files.sort()
    for name in files:
        yield os.path.join(folder, name)  # noqa: PTH118
    del files
    for name in sorted(folders):
        yield from _walk_folder(os.path.join(folder, name), above | {real})  # noqa: PTH118


def _entries(folder: str) -> tuple[list[str], list[str]]:
    """Names of the images and of the folders in a folder, unsorted."""
    files, folders = list[str](), list[str]()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:  # noqa: PTH122
                files.append(entry.name)
    return files, folders
