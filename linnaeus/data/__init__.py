"""Images, labels and batches: datasets, augmentation, sampling, loading."""

EXTENSIONS = frozenset(
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm .avif .jp2 .npy".split()  # noqa: SIM905
)
"""Endings, in lower case, of the files in a folder that are taken for images."""
