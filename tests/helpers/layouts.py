"""Data sets as they lie on disks: folders of empty images, manifests, and the bundles that they give."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data

CLASSES = ("cat", "dog", "fox")


def folders(
    root: Path, names: Sequence[str], classes: Sequence[str] = CLASSES, num: int = 4
) -> Path:
    """Class folders of empty files in folders; `{}` in a name is the class, else it comes last."""
    for name in names:
        for each in classes:
            folder = root / (name.format(each) if "{}" in name else f"{name}/{each}".strip("/"))
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(num):
                (folder / f"{i}.jpg").touch()
    return root


def table(
    root: Path, header: str, row: Callable[[int], str], *, name: str = "train.csv", num: int = 24
) -> Path:
    """A manifest with a row for each of some empty files; `row` gives the cells after the path."""
    (root / "img").mkdir(exist_ok=True)
    for i in range(num):
        (root / "img" / f"{i}.jpg").touch()
    separator = next((sign for sign in ";\t|" if sign in header), ",")
    rows = [header, *(f"img/{i}.jpg{separator}{row(i)}" for i in range(num))]
    (root / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return root


def build(root: Path | str, name: str = "imagefolder", **dataset: Any) -> DataBundle:
    """The data of a root; keys are those of DATA.DATASET."""
    node = DatasetConfig(NAME=name, ROOT=str(root), **dataset)
    return build_data(DataConfig(DATASET=node, IMG_SIZE=16), seed=0)


def levels(bundle: DataBundle) -> dict[str, tuple[str, ...]]:
    """The classes of each level."""
    assert bundle.taxonomy is not None
    return {level.name: level.classes for level in bundle.taxonomy.levels}


def sizes(bundle: DataBundle) -> list[int]:
    """Samples of training, validation and, where there is one, test."""
    return [len(each) for each in (bundle.train, bundle.val, bundle.test) if each is not None]  # type: ignore[arg-type]


def paths(dataset: Any) -> list[str]:
    """The path of each image, relative to the folder of its split."""
    return [os.fsdecode(path) for path in dataset.listing.paths]
