"""The data of an evaluation, with the labels of the runfor any classes, order and levels of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import call
from os.path import exists
from pathlib import Path

import torch
from torch import Tensor

from linnaeus.config.schema import IMAGE_FILES, DataConfig
from linnaeus.data.bundle import DataBundle, OnMain, collate_pairs, dataset_length
from linnaeus.data.datasets import TABLES, build_data
from linnaeus.data.image_files import (
    ImageFiles,
    Listing,
    distinct,
    hold_out,
    make_split,
    require_files,
)
from linnaeus.data.imagefolder import read_folders
from linnaeus.data.manifest import read_evaluated_tables
from linnaeus.data.packed import container
from linnaeus.data.split_file import read_split
from linnaeus.data.taxonomy import UNKNOWN, LabelIndex, Taxonomy
from linnaeus.data.transforms import Preprocessing
from linnaeus.data.user_dataset import UserCollate, build_user_dataset
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.words import counted

_VALIDATION = "validation split"


@dataclass(frozen=True)
class EvaluationData:
    """The samples of an evaluation.

    Attributes:
        bundle: nothing is trained, so that both of its splits are the samples to evaluate.
        source: the folder, the manifest or the name of the dataset.
        part: which part of it is evaluated, in words.
        num_left_out: samples of classes that the run does not know, which are left out.
    """

    bundle: DataBundle
    source: str
    part: str
    num_left_out: int = 0


@dataclass(frozen=True)
class EvaluationRequest:
    """Data to evaluate, as a trained run sees it.

    Attributes:
        config: the DATA node.
        index: the run's classes; None where its dataset declared none.
        preprocessing: how an image becomes an input; None where the run's dataset gave tensors.
        seed: of the run; seeds the random numbers that a user's dataset draws when it is made.
        is_run_dataset: whether `config.DATASET` is the run's own.
        skip_unknown: leave out samples of classes that the run does not know.
        split_file: of the run, where it has written one; read where `is_run_dataset`.
    """

    config: DataConfig
    index: LabelIndex | None
    preprocessing: Preprocessing | None
    seed: int
    is_run_dataset: bool
    skip_unknown: bool = False
    split_file: Path | None = None


def build_evaluation_data(request: EvaluationRequest, on_main: OnMain = call) -> EvaluationData:
    """Return the samples of a request with the labels of the run. `on_main` is passed to `build_data`.

    Raises:
        ConfigError: a key that does not fit the data or the run.
        DataError: data that cannot be used, classes that the run does not know, or none that it knows.
    """
    dataset = request.config.DATASET
    if isinstance(dataset, Mapping):
        return _user_data(request)
    if dataset.NAME in IMAGE_FILES:
        return _files(request, on_main)
    config = request.config
    names = [] if request.index is None else [*request.index.taxonomy.names]
    has_default_names = request.is_run_dataset and dataset.LEVELS is None
    if has_default_names and len(names) == len(dataset.NUM_CLASSES):
        # They may be other ones in the version that trained the run.
        config = replace(config, DATASET=replace(dataset, LEVELS=names))
    # Without the training transforms: code that the file of a run names would be called.
    config = replace(config, AUGMENT=replace(config.AUGMENT, TRAIN=[]))
    bundle = build_data(config, seed=request.seed)
    if request.index is None or bundle.taxonomy != request.index.taxonomy:
        raise DataError(f"DATA.DATASET.NAME: the classes of {dataset.NAME!r} differ from the run's")
    if request.preprocessing is not None:
        bundle.val.transform = request.preprocessing.transform()  # type: ignore[attr-defined]
    return _evaluated(bundle, request, dataset.NAME, _VALIDATION, [])


def _evaluated(
    bundle: DataBundle,
    request: EvaluationRequest,
    source: str,
    part: str,
    report: list[str],
    num_left_out: int = 0,
) -> EvaluationData:
    """Return the validation split of a bundle, for evaluation alone."""
    report = [f"{source}: {counted(dataset_length(bundle.val), 'sample')} ({part})", *report]
    index = request.index
    bundle = replace(
        bundle,
        train=bundle.val,
        report=report,
        preprocessing=request.preprocessing,
        index=index,
        taxonomy=None if index is None else index.taxonomy,
    )
    return EvaluationData(bundle, source, part, num_left_out)


def _files(request: EvaluationRequest, on_main: OnMain) -> EvaluationData:
    index, preprocessing = request.index, request.preprocessing
    if index is None or preprocessing is None:
        raise ConfigError(
            f"DATA.DATASET.NAME: {request.config.DATASET.NAME!r} has files and class names, but the dataset "
            "of the run gave tensors or declared no classes: evaluate the run on a `_target_` dataset like "
            "its own"
        )
    images, part, report, num_left_out = on_main(
        lambda: _labeled_files(request, index, preprocessing)
    )
    require_files(images.listing, request.config)
    images.transform = preprocessing.transform()
    bundle = DataBundle(
        images, images, index.taxonomy, images.channels, preprocessing.size, collate_pairs
    )
    return _evaluated(bundle, request, images.listing.source, part, report, num_left_out)


def _labeled_files(
    request: EvaluationRequest, index: LabelIndex, preprocessing: Preprocessing
) -> tuple[ImageFiles, str, list[str], int]:
    """Return the files to evaluate, the part of the dataset that they are, notes, and the number left out."""
    report: list[str] = []
    part, level_names = _VALIDATION, None
    listing = _saved_validation(request) if request.is_run_dataset else None
    if listing is not None:
        index = LabelIndex.of(index.taxonomy)
    else:
        listing, part, level_names = _found_listing(request, index, report)
    listing, missing = _aligned(listing, level_names, index, report)
    images, num_left_out = make_split(
        listing,
        index=index,
        config=request.config,
        channels=preprocessing.channels,
        decoding=preprocessing.decoding,
        report=report,
        remedy=None if request.skip_unknown else "unknown=skip evaluates the others",
        needs_labels=False,
    )
    _fill_missing(images.labels, missing, index.taxonomy)
    return images, part, report, num_left_out


def _found_listing(
    request: EvaluationRequest, index: LabelIndex, report: list[str]
) -> tuple[Listing, str, tuple[str, ...] | None]:
    """Return the files to evaluate, the part of the dataset that they are, and the names of their levels."""
    dataset, is_run_dataset = request.config.DATASET, request.is_run_dataset
    taxonomy = index.taxonomy
    if dataset.NAME == "imagefolder":
        depth = len(taxonomy.levels) if is_run_dataset else None
        files = read_folders(dataset, evaluated=True, num_run_levels=depth)
    else:
        files = read_evaluated_tables(
            dataset, TABLES[dataset.NAME], taxonomy, is_run_dataset=is_run_dataset
        )
    split = next((split for split in ("val", "test", "train") if split in files.splits), None)
    if split is None:
        raise DataError("; ".join(files.notes))
    listing = files.splits[split]
    report += files.notes
    if split != "train":
        return listing, _VALIDATION, files.level_names
    if not is_run_dataset:
        return listing, "all samples, as there is no validation split", files.level_names
    if files.make_index() != index:
        raise DataError(
            f"{listing.source}: its classes have changed since the run, so its held-out samples "
            "are unknown; name the data to evaluate in "
            "DATA.DATASET.VAL"
        )
    _, held_out = hold_out(listing, dataset, report, taxonomy)
    return held_out, "samples held out of training", files.level_names


def _saved_validation(request: EvaluationRequest) -> Listing | None:
    """The validation split that the run has saved; None if it has not, or its images are elsewhere now."""
    file = request.split_file
    if file is None or not file.is_file():
        return None
    paths, lineages = read_split(file, "val")
    if not any(map(exists, map(container, paths))):
        return None
    return Listing.of(str(file), Path(), paths, lineages, is_table=True)


def _aligned(
    listing: Listing, level_names: Sequence[str] | None, index: LabelIndex, report: list[str]
) -> tuple[Listing, list[int]]:
    """The listing with lineages as the index reads them, and the positions of the levels that it lacks.

    Levels are matched by name. Where the source names none (None), as nested folders, its finest level is the
    finest of the run.

    Raises:
        DataError: no level of the source is one of the run.
    """
    source, wanted, num_names = listing.source, index.taxonomy.names, len(listing.lineages[0])
    if level_names is None:
        columns = [max(-1, level + num_names - len(wanted)) for level in range(len(wanted))]
    else:
        columns = [level_names.index(name) if name in level_names else -1 for name in wanted]
    missing = [level for level, column in enumerate(columns) if column < 0]
    if len(missing) == len(wanted):
        raise DataError(
            f"{source}: its levels {', '.join(level_names or ())} differ from the run's levels "
            f"{', '.join(wanted)}"
        )
    if missing:
        names = ", ".join(wanted[level] for level in missing)
        report.append(
            f"{source}: no {names} there; labels follow from the level below, as in training"
        )
    lineages, places = distinct(
        tuple(None if column < 0 else lineage[column] for column in columns)
        for lineage in listing.lineages
    )
    return replace(listing, lineages=lineages, lineage_ids=places[listing.lineage_ids]), missing


def _fill_missing(targets: Tensor, missing: Sequence[int], taxonomy: Taxonomy) -> None:
    """Give the missing columns of targets [N, L] the parents of the labels one level below, in place."""
    for level in sorted(missing, reverse=True):
        if level + 1 < len(taxonomy.levels):
            parents = torch.tensor([*taxonomy.parents[level], UNKNOWN])  # index -1 is the last one
            targets[:, level] = parents[targets[:, level + 1]]


def _user_data(request: EvaluationRequest) -> EvaluationData:
    preprocessing, index = request.preprocessing, request.index
    bundle = build_user_dataset(
        request.config, seed=request.seed, splits=("val",), preprocessing=preprocessing
    )
    name, declared = bundle.source, bundle.taxonomy
    report: list[str] = []
    if bundle.preprocessing is not None and preprocessing is None:
        raise DataError(f"{name}: gives Pillow images, but the dataset of the run gave tensors")
    if index is None:
        if declared is not None:
            raise DataError(f"{name}: has classes, but the dataset of the run declared none")
    elif declared is None:
        report.append(f"{name}: declares no classes; its labels are assumed to be the run's")
        bundle.val.taxonomy = index.taxonomy  # type: ignore[attr-defined]
        if isinstance(bundle.collate, UserCollate):
            bundle.collate.taxonomy = index.taxonomy
    elif (declared.levels, declared.is_multilabel) != (
        index.taxonomy.levels,
        index.taxonomy.is_multilabel,
    ):
        raise DataError(
            f"{name}: its classes differ from the run's, and labels of a `_target_` dataset are numbers; "
            "give it the classes of the run in their order"
        )
    return _evaluated(bundle, request, name, "split val", report)
