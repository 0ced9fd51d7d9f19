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
    images = [f"photos/{name}" for name in ("a.PNG", "b.jpg", "m[1].jpg", "m/n/d.webp", "z/c.jpg")]
    assert list(walk(["photos"])) == images
    words = ["photos/z", "photos/notes.txt", "photos/m[1].jpg", "missing.jpg"]
    assert list(walk(words)) == ["photos/z/c.jpg", *words[1:]]
    lines = ["photos/b.jpg\n", "\n", "photos/z\r\n"]
    assert list(walk(["-"], lines)) == ["photos/b.jpg", "photos/z/c.jpg"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("photos/*.jpg", ["photos/b.jpg", "photos/m[1].jpg"]),
        ("photos/**/*.webp", ["photos/m/n/d.webp"]),
        ("photos/[mz]", ["photos/m/n/d.webp", "photos/z/c.jpg"]),
        ("photos/**/m", ["photos/m/n/d.webp"]),
    ],
)
def test_patterns(photos, pattern, found):
    """A folder that matches comes with all below it, and each file once."""
    assert problem_of(pattern) is None
    assert list(walk([pattern])) == found


def test_words_without_an_image_are_problems(photos):
    (photos / "empty").mkdir()
    for word in ("photos", "photos/notes.txt", "photos/m[1].jpg", "-"):
        assert problem_of(word) is None
    for word in ("photo", "photos/*.gif", "photos/empty", "photos/**/q"):
        assert problem_of(word)


def test_loops_of_links_end(photos):
    (photos / "z" / "up").symlink_to(photos)
    found = list(walk(["photos/z"]))
    assert sum(isinstance(path, Unreadable) for path in found) == 1
    assert "photos/z/c.jpg" in found
