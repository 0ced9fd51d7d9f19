"""Images, labels and batches: datasets, augmentation, sampling, loading."""

EXTENSIONS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm .avif .jp2".split()  # noqa: SIM905
)
"""Endings, in lower case, of the files in a folder that are taken for images."""

_NOT_OF_PEOPLE = frozenset(
    ("@eadir", "__macosx", "lost+found", "$recycle.bin", "system volume information", "#recycle")
)


def is_ignored_folder(name: str) -> bool:
    """Whether a folder is hidden, or one that a system makes: thumbnails, archives, lost files."""
    return name.startswith(".") or name.casefold() in _NOT_OF_PEOPLE
