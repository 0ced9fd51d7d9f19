"""From the words of a command line to paths of images, one at a time. Imports no torch."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from linnaeus.data import EXTENSIONS_TEXT, is_ignored, is_image, unread_note

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


def walk(
    words: Iterable[str], lines: Iterable[str] = (), unread: Counter[str] | None = None
) -> Iterator[str | Unreadable]:
    """The paths that words name, in the order of the words.

    Folders are walked by ascending name, files before folders, without hidden ones. In a folder, only files
    with the ending of an image count. Matches of a pattern are sorted by their parts. Memory holds the names
    of one folder and its parents at a time, and all matches of a pattern.

    Args:
        words: files, folders, patterns with `*`, `?`, `[...]` or `**`, and `-`.
        lines: the paths for `-`: files or folders, one per line. Empty lines do not count.
        unread: is given the number of files in folders that have each other ending.
    """
    unread = Counter() if unread is None else unread
    for word in words:
        if word == STDIN:
            for line in lines:
                if path := line.rstrip("\r\n"):
                    yield from _below(path, unread)
        elif os.path.lexists(word) or not glob.has_magic(word):
            yield from _below(word, unread)
        else:
            yield from _matching(word, unread)


def problem_of(word: str) -> str | None:
    """Return why a word names no image, or None. It looks no further than the first image, and reads none."""
    is_pattern = glob.has_magic(word) and not os.path.lexists(word)
    if not is_pattern and word != STDIN and not os.path.lexists(word):
        if "://" in word:
            return "is a URL; download it first, and name the file"
        return "there is no such file or folder"
    unread = Counter[str]()
    if word == STDIN or next(walk([word], unread=unread), None) is not None:
        return None
    if is_pattern:
        return "no file matches"
    note = f"; {unread_note(unread)}" if unread else ""
    return f"no image in it or below (looked for {EXTENSIONS_TEXT}){note}"


def _matching(pattern: str, unread: Counter[str]) -> Iterator[str | Unreadable]:
    """Yield the matches of a pattern. A matching folder stands for all files in it."""
    walked: str | None = None
    matches = glob.iglob(pattern, recursive=True)  # noqa: PTH207 (that one sorts nothing either)
    for path in sorted(matches, key=lambda path: path.replace(os.sep, "\0")):
        if walked is not None and path.startswith(walked):
            continue
        if os.path.isdir(path):  # noqa: PTH112 (hot path)
            walked = os.path.join(path, "")  # noqa: PTH118
        yield from _below(path, unread)


def _below(
    path: str, unread: Counter[str], above: frozenset[str] = frozenset()
) -> Iterator[str | Unreadable]:
    """The file, or the images in the folder and below; `above` are real paths of the folders above it."""
    if not os.path.isdir(path):  # noqa: PTH112 (hot path)
        yield path
        return
    real = os.path.realpath(path)
    if real in above:
        yield Unreadable(path, "a symbolic link leads back to a folder above it")
        return
    problems = list[OSError]()
    _, folders, files = next(os.walk(path, onerror=problems.append), (path, [], []))
    for error in problems:
        yield Unreadable(path, f"the folder cannot be read: {error.strerror}")
    for name in sorted(files):
        if is_image(name, unread):
            yield os.path.join(path, name)  # noqa: PTH118
    del files
    for name in sorted(folders):
        if not is_ignored(name):
            yield from _below(os.path.join(path, name), unread, above | {real})  # noqa: PTH118
