"""WebDataset: tar files that hold the image and the labels of each sample, such as `7.jpg` and `7.cls`.

Each tar file is scanned once for the offsets of its images, so samples can be read in any order.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from linnaeus.config.schema import DatasetConfig
from linnaeus.data import EXTENSIONS
from linnaeus.data.image_files import encoded
from linnaeus.data.manifest import Table, categories
from linnaeus.data.packed import packed_path
from linnaeus.data.splits import SPLITS, find_names
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.files import suggest_path
from linnaeus.runtime.words import counted, several

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd")
"""First bytes of files of gzip, bzip2, xz and zstd."""


def find_webdataset(dataset: DatasetConfig, notes: list[str]) -> dict[str, Callable[[], Table]]:
    """Map each split of a folder of tar files to a function that reads it.

    A subfolder or a file name prefix names the split, unless TRAIN, VAL or TEST is a file pattern.

    Raises:
        ConfigError: there is no such file.
    """
    root = Path(dataset.ROOT or "").expanduser()
    shards: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(root.rglob("*.t*")):
        name = re.sub(r"\.(tar\.|t)(gz|bz2|xz|zst)$", ".tar", file.name)
        if name.endswith(".tar") and (name == file.name or not file.with_name(name).exists()):
            place = re.sub(r"[\W_]*\d*\.tar", "", name)
            shards[place if file.parent == root else file.parent.name].append(file)
    splits = {split: shards[name] for split, name in find_names([*shards]).items()}
    for split in SPLITS:
        pattern = getattr(dataset, split.upper())
        if pattern is not None:
            splits[split] = sorted(root.glob(pattern))
            if not splits[split]:
                raise ConfigError(f"DATA.DATASET.{split.upper()}: no file {root / pattern}")
    if not splits and not shards:
        place = suggest_path(root) if not root.exists() else "; name the folder of the tar files"
        raise ConfigError(f"DATA.DATASET.ROOT: no tar files in {root}{place}")
    if not splits:
        raise ConfigError(
            f"DATA.DATASET.ROOT: {root} has tar files of {several([*shards])}, not as "
            "`train-0000.tar`; set DATA.DATASET.TRAIN, such as `birds-*.tar`"
        )
    return {s: partial(_read, files, s, root, dataset, notes) for s, files in splits.items()}


def _read(
    files: Sequence[Path], split: str, root: Path, dataset: DatasetConfig, notes: list[str]
) -> Table:
    """Return the labels of all samples of a split, and the path of each image."""
    endings, image = set[str](), dataset.IMAGE_COLUMN
    parts = [_samples(file, root, image, endings) for file in files]
    samples = [sample for part in parts for sample in part.values()]
    found = [sample for sample in samples if "" in sample]
    path = root / split
    if num_twice := len(samples) - len(set[str]().union(*parts)):
        notes.append(
            f"{path}: {counted(num_twice, 'sample key')} of one tar file also in another; remove copies"
        )
    if len(found) < len(samples):
        notes.append(
            f"{path}: {counted(len(samples) - len(found), 'sample')} without an image left out"
        )
    if not found:
        raise DataError(
            f"{path}: no image in {counted(len(files), 'tar file')}, but the endings "
            f"{several(sorted(endings))}; name the images' in DATA.DATASET.IMAGE_COLUMN. A sample's key ends "
            "at the first dot"
        )
    images = encoded(sample.pop("") for sample in found)
    columns = [*dict.fromkeys(name for sample in found for name in sample)]
    if dataset.LEVELS is None and "cls" in columns:
        columns = ["cls"]
    rows = {name: categories(sample.get(name) for sample in found) for name in columns}
    return Table(path, image or "image", images, pd.DataFrame(rows), dataset, root=root)


def _samples(
    file: Path, root: Path, image: str | None, endings: set[str]
) -> dict[str, dict[str, Any]]:
    """The samples of a tar file by key: labels by name, and the path of the image under "".

    Adds the endings.
    """
    samples: dict[str, dict[str, Any]] = defaultdict(dict)
    seen = set[str]()
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                tar.members = []  # type: ignore[attr-defined]  # otherwise it keeps every header
                if not (member.isfile() and stem and ending):
                    continue
                endings.add(ending)
                key = f"{folder}/{stem}"
                if ending == image or (image is None and f".{ending.lower()}" in EXTENSIONS):
                    ending = ""
                if (part := f"{key}.{ending}") in seen:
                    raise DataError(
                        f"{file}: {member.name}: {stem!r} has one already; give each sample its own key, "
                        "or name the images' ending in DATA.DATASET.IMAGE_COLUMN"
                    )
                seen.add(part)
                sample = samples[key]
                if not ending:
                    place = str(file.relative_to(root))
                    sample[""] = packed_path(place, name, member.offset_data, member.size)
                elif ending in ("cls", "txt", "json"):
                    content = tar.extractfile(member)
                    assert content is not None
                    try:
                        text = content.read().decode()
                        sample |= _flat(json.loads(text) if ending == "json" else {ending: text})
                    except ValueError as error:
                        raise DataError(f"{file}: {member.name}: {error}") from error
            # tarfile takes a damaged header for the end, which is a block of zeros.
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"no header at byte {tar.offset}")
    except tarfile.ReadError as error:
        with file.open("rb") as content:
            is_packed = content.read(6).startswith(_COMPRESSED)
        remedy = (
            "it must be a tar file without compression: run `gunzip`"
            if is_packed
            else "the file is incomplete or damaged: copy or download it again"
        )
        raise DataError(f"{file}: {error}; {remedy}") from error
    return samples


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values of nested JSON by names such as `label.family`."""
    if not isinstance(value, dict):
        return {name or "json": value}
    return {
        k: v
        for key, each in value.items()
        for k, v in _flat(each, f"{name}.{key}" if name else key).items()
    }
