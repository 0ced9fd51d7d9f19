"""Which paths the words of a command line name."""

from __future__ import annotations

from pathlib import Path

import pytest

from linnaeus.inference.paths import Unreadable, problem_of, walk


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    names = ["b.jpg", "a.PNG", "notes.txt", ".hidden.jpg", "z/c.jpg", "m/n/d.webp", ".cache/e.jpg"]
    for name in [*names, "m[1].jpg"]:
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def test_folders_are_walked_in_order(photos: Path) -> None:
    names = ["a.PNG", "b.jpg", "m[1].jpg", "m/n/d.webp", "z/c.jpg"]
    assert list(walk(["photos"])) == [f"photos/{name}" for name in names]


def test_words_keep_their_order_and_files_need_no_ending(photos: Path) -> None:
    words = ["photos/z", "photos/notes.txt", "photos/m[1].jpg", "missing.jpg"]
    assert list(walk(words)) == ["photos/z/c.jpg", *words[1:]]


def test_patterns(photos: Path) -> None:
    assert list(walk(["photos/*.jpg"])) == ["photos/b.jpg", "photos/m[1].jpg"]
    assert list(walk(["photos/**/*.webp"])) == ["photos/m/n/d.webp"]
    assert list(walk(["photos/[mz]"])) == ["photos/m/n/d.webp", "photos/z/c.jpg"]


def test_folders_that_a_recursive_pattern_matches(photos: Path) -> None:
    """With all below them, and each file once."""
    images = ["photos/a.PNG", "photos/b.jpg", "photos/m[1].jpg", "photos/m/n/d.webp", "photos/z/c.jpg"]
    assert list(walk(["photos/**"])) == images
    (photos / "notes.txt").unlink()
    assert sorted(map(str, walk(["photos/**/*"]))) == sorted(images)
    assert list(walk(["photos/**/z"])) == ["photos/z/c.jpg"]
    assert list(walk(["photos/**/m"])) == list(walk(["photos/**/n"])) == ["photos/m/n/d.webp"]
    assert problem_of("photos/**/n") is None
    assert problem_of("photos/**/q")


def test_a_list_may_name_folders(photos: Path) -> None:
    assert list(walk(["-"], ["photos/b.jpg\n", "\n", "photos/z\r\n"])) == ["photos/b.jpg", "photos/z/c.jpg"]


def test_words_without_an_image_are_problems(photos: Path) -> None:
    (photos / "empty").mkdir()
    for word in ("photos", "photos/notes.txt", "photos/*.jpg", "photos/m[1].jpg", "-"):
        assert problem_of(word) is None
    for word in ("photo", "photos/*.gif", "photos/empty"):
        assert problem_of(word)


def test_loops_of_links_end(photos: Path) -> None:
    (photos / "z" / "up").symlink_to(photos)
    found = list(walk(["photos/z"]))
    assert sum(isinstance(path, Unreadable) for path in found) == 1
    assert "photos/z/c.jpg" in found
