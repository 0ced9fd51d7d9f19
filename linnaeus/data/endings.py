"""Which files in a folder are taken for images. Imports no torch."""

EXTENSIONS = frozenset(
    f".{ending}"
    for ending in "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm pgm pbm pnm avif jp2".split()  # noqa: SIM905
)
"""Endings, in lower case, of the files in a folder that are taken for images."""
