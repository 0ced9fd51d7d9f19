import pytest

from linnaeus.inference.paths import Unreadable, problem_of, walk


@pytest.fixture
def photos(tmp_path, monkeypatch):
    names = ["b.jpg", "a.PNG", "notes.txt", ".hidden.jpg", "z/c.jpg", "m/n/d.webp", ".cache/e.jpg"]
    for name in [*names, "m[1].jpg"]:
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def test_words_keep_their_order_and_folders_are_walked_by_name(photos):
    images = [
        "photos/a.PNG",
        "photos/b.jpg",
        "photos/m[1].jpg",
        "photos/m/n/d.webp",
        "photos/z/c.jpg",
    ]
    assert list(walk(["photos"])) == images
    words = ["photos/z", "photos/notes.txt", "photos/m[1].jpg", "missing.jpg"]
    assert list(walk(words)) == ["photos/z/c.jpg", *words[1:]]
    assert list(walk(["-"], ["photos/b.jpg\n", "\n", "photos/z\r\n"])) == [
        "photos/b.jpg",
        "photos/z/c.jpg",
    ]


def test_patterns(photos):
    """A folder that matches comes with all below it, and each file once."""
    assert list(walk(["photos/*.jpg"])) == ["photos/b.jpg", "photos/m[1].jpg"]
    assert list(walk(["photos/**/*.webp"])) == ["photos/m/n/d.webp"]
    assert list(walk(["photos/[mz]"])) == ["photos/m/n/d.webp", "photos/z/c.jpg"]
    assert list(walk(["photos/**"])) == list(walk(["photos"]))
    assert list(walk(["photos/**/m"])) == list(walk(["photos/**/n"])) == ["photos/m/n/d.webp"]


def test_words_without_an_image_are_problems(photos):
    (photos / "empty").mkdir()
    for word in (
        "photos",
        "photos/notes.txt",
        "photos/*.jpg",
        "photos/m[1].jpg",
        "photos/**/n",
        "-",
    ):
        assert problem_of(word) is None
    for word in ("photo", "photos/*.gif", "photos/empty", "photos/**/q"):
        assert problem_of(word)


def test_loops_of_links_end(photos):
    (photos / "z" / "up").symlink_to(photos)
    found = list(walk(["photos/z"]))
    assert sum(isinstance(path, Unreadable) for path in found) == 1
    assert "photos/z/c.jpg" in found
