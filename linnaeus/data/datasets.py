"""Builds the data of a run, whatever its source, and that of an evaluation with the labels of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import call
from os.path import exists
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Subset

from linnaeus.autobatch.rng import preserved_generators
from linnaeus.config.schema import DataConfig
from linnaeus.data import unread_note
from linnaeus.data.builtin import build_digits, build_fashion_mnist, build_synthetic
from linnaeus.data.bundle import DataBundle, OnMain, collate_pairs, dataset_length, training_targets
from linnaeus.data.image_files import (
    EvaluatedFiles,
    ImageFiles,
    Listing,
    encode,
    hold_out,
    name_unknown,
    report_coarse,
    require_files,
    without_damaged,
)
from linnaeus.data.imagefolder import INAT_RANKS, build_imagefolder, evaluated_folder
from linnaeus.data.manifest import build_manifest, evaluated_manifest
from linnaeus.data.mixing import build_mixing
from linnaeus.data.split_file import read_split
from linnaeus.data.taxonomy import UNKNOWN, LabelIndex, Lineage, Taxonomy
from linnaeus.data.transforms import Preprocessing
from linnaeus.data.user_dataset import UserCollate, UserDataset, build_user_dataset, build_user_val
from linnaeus.errors import ConfigError, DataError
from linnaeus.words import counted, several

_BUILT_IN = {
    "digits": build_digits,
    "fashion_mnist": build_fashion_mnist,
    "synthetic": build_synthetic,
}
_FILES = {"imagefolder": build_imagefolder, "manifest": build_manifest}
_KEYS_OF = {
    **dict.fromkeys(("LABEL_SEPARATOR", "SPLIT_COLUMN", "GROUP_COLUMN"), ("manifest",)),
    "FOLD": ("imagefolder", "manifest"),
}
_VALIDATION = "validation split"


def build_data(data_config: DataConfig, *, seed: int, on_main: OnMain = call) -> DataBundle:
    """Build training and validation data.

    Every process of a run builds the same bundle: the order of samples, the split and the labels depend on
    the files and the configuration alone.

    Args:
        data_config: the `DATA` node.
        seed: seeds the random numbers that a user's dataset may draw when it is made.
        on_main: used to look for damaged files on one process only.

    Raises:
        ConfigError: a key that is missing, or that does not fit the data.
        DataError: files, folders or labels that cannot be used; an error in a user's dataset.
    """
    dataset = data_config.DATASET
    is_users = isinstance(dataset, Mapping)
    for name, kinds in {} if is_users else _KEYS_OF.items():
        if getattr(dataset, name) is not None and dataset.NAME not in kinds:
            raise ConfigError(
                f"DATA.DATASET.{name}: is for NAME {' and '.join(kinds)}, not {dataset.NAME}"
            )
    if is_users:
        data = build_user_dataset(data_config, seed=seed)
    elif dataset.NAME in _BUILT_IN:
        data = _BUILT_IN[dataset.NAME](data_config)
    else:
        data = _FILES[dataset.NAME](data_config, on_main)
    data.report.insert(0, data.description)
    # A user's collate function may give a batch that it keeps.
    is_fresh = not isinstance(data.collate, UserCollate)
    data.mixing = build_mixing(data_config.AUGMENT, data.taxonomy, in_place=is_fresh)
    if data.mixing is not None and is_users:
        with preserved_generators():
            data.mixing.to_soft_targets(
                data.collate([data.train[0]])
            )  # an error must show now, not in training
    if data_config.SAMPLER == "balanced":
        training_targets(data, "DATA.SAMPLER balanced")
    return data


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
    """What is to be evaluated, as a trained run sees it.

    Attributes:
        config: the DATA node.
        index: the run's classes; None where its dataset declared none.
        preprocessing: how an image becomes an input; None where the run's dataset gave tensors.
        seed: of the run; seeds the random numbers that a user's dataset draws when it is made.
        is_own: whether `config.DATASET` is the run's own.
        skips_unknown: leave out samples of classes that the run does not know.
        split_file: of the run, where it has written one; read where `is_own`.
    """

    config: DataConfig
    index: LabelIndex | None
    preprocessing: Preprocessing | None
    seed: int
    is_own: bool
    skips_unknown: bool = False
    split_file: Path | None = None


def build_evaluation_data(request: EvaluationRequest, on_main: OnMain = call) -> EvaluationData:
    """The samples that a request names, with the labels of the run; `on_main` is that of `build_data`.

    Raises:
        ConfigError: a key that does not fit the data or the run.
        DataError: data that cannot be used, classes that the run does not know, or none that it knows.
    """
    dataset = request.config.DATASET
    if isinstance(dataset, Mapping):
        return _user_data(request, on_main)
    if dataset.NAME in ("imagefolder", "manifest"):
        return _files(request, on_main)
    bundle = build_data(request.config, seed=request.seed)
    if request.index is None or bundle.taxonomy != request.index.taxonomy:
        raise DataError(
            f"DATA.DATASET.NAME: the classes of {dataset.NAME!r} are not those of the run"
        )
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
    """The validation split of a bundle, for evaluation alone."""
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
    config, index, preprocessing = request.config, request.index, request.preprocessing
    dataset = config.DATASET
    if index is None or preprocessing is None:
        raise ConfigError(
            f"DATA.DATASET.NAME: {dataset.NAME!r} has files and class names, but the dataset of the run "
            "gave tensors or declared no classes: evaluate the run on a `_target_` dataset like its own"
        )
    saved = _saved_validation(request) if request.is_own else None
    if saved is not None:
        files, index = EvaluatedFiles([saved], None, is_val=True), LabelIndex.of(index.taxonomy)
    elif dataset.NAME == "imagefolder":
        files = evaluated_folder(dataset, len(index.lookup) if request.is_own else None)
    else:
        files = evaluated_manifest(
            dataset,
            _source_names(index),
            is_own=request.is_own,
            separator=index.taxonomy.separator,
        )
    report = [*filter(None, [unread_note(Listing.joined(files.listings).unread)])]
    part = _VALIDATION if files.is_val else "all samples, as there is no validation split"
    listing = Listing.joined(files.listings)
    if files.index is not None:
        if files.index != index:
            raise DataError(
                f"{listing.source}: its classes are not those of the run any more, so the samples that "
                "it held out cannot be told from others; name the data to evaluate in DATA.DATASET.VAL"
            )
        held_out = [hold_out(each, dataset, report, index.taxonomy)[1] for each in files.listings]
        listing, part = Listing.joined(held_out), "samples held out of training"
    listing, missing = _aligned(listing, files.level_names, index, report)
    if config.ON_BAD_IMAGE == "skip":
        listing = without_damaged(
            listing, preprocessing.channels, preprocessing.decoding, on_main, report
        )
    require_files(listing, config)
    targets, unknown = encode(listing.lineages, index)
    left_out = {position for positions in unknown.values() for position in positions}
    if unknown:
        kept = [position for position in range(len(listing.paths)) if position not in left_out]
        names = name_unknown(unknown, listing)
        _leave_out(listing.source, names, len(left_out), request, report, is_all=not kept)
        listing, targets = listing.take(kept), targets[kept]
    if not listing.paths:
        raise DataError(f"{listing.source}: no sample to evaluate")
    report_coarse(listing, report)
    _fill_missing(targets, missing, index.taxonomy)
    channels = preprocessing.channels
    images = ImageFiles(
        listing.root,
        listing.paths,
        targets,
        channels,
        preprocessing.transform(),
        preprocessing.decoding,
    )
    bundle = DataBundle(images, images, index.taxonomy, channels, preprocessing.size, collate_pairs)
    return _evaluated(bundle, request, listing.source, part, report, len(left_out))


def _saved_validation(request: EvaluationRequest) -> Listing | None:
    """The validation split that the run has saved; None where it has not, or its images are elsewhere now."""
    file = request.split_file
    if file is None or not file.is_file():
        return None
    paths, lineages = read_split(file, "val")
    return Listing(str(file), Path(), paths, lineages) if any(map(exists, paths)) else None


def _source_names(index: LabelIndex) -> list[str | None]:
    """Names of the levels that lineages have, coarse to fine; None where the run has left a level out."""
    names: list[str | None] = [None] * len(index.lookup)
    for name, column in zip(index.taxonomy.names, index.columns, strict=True):
        names[column] = name
    return names


def _columns(
    source: str, names: Sequence[str] | None, num_names: int, index: LabelIndex
) -> tuple[list[int], list[int]]:
    """Match the levels of a source with those of the run, by name.

    Where the source names none (None), as nested folders, its finest level is the finest of the run.

    Returns:
        For each element of the run's lineages, the position of that level in the source, -1 where it has
        none; and the positions of the run's levels that the source does not have.

    Raises:
        DataError: no level of the source is one of the run.
    """
    depth = len(index.lookup)
    if names is None:
        columns = [level + num_names - depth for level in range(depth)]
    elif names == INAT_RANKS and depth == len(INAT_RANKS):  # also those that the run has left out
        columns = list(range(depth))
    else:
        columns = [names.index(name) if name in names else -1 for name in _source_names(index)]
    missing = [position for position, column in enumerate(index.columns) if columns[column] < 0]
    if len(missing) == len(index.columns):
        raise DataError(
            f"{source}: its taxonomic ranks {', '.join(names or ())} are not those of the run, "
            f"{', '.join(index.taxonomy.names)}"
        )
    return columns, missing


def _aligned(
    listing: Listing, level_names: Sequence[str] | None, index: LabelIndex, report: list[str]
) -> tuple[Listing, list[int]]:
    """The listing with lineages as the index reads them, and the positions of the levels that it lacks."""
    source, lineages = listing.source, listing.lineages
    columns, missing = _columns(source, level_names, len(lineages[0]), index)
    if missing:
        names = ", ".join(index.taxonomy.names[level] for level in missing)
        report.append(
            f"{source}: no {names} there; labels follow from the rank below, as in training"
        )
    unique: dict[Lineage, Lineage] = {
        lineage: tuple(None if column < 0 else lineage[column] for column in columns)
        for lineage in set(lineages)
    }
    return replace(listing, lineages=[unique[lineage] for lineage in lineages]), missing


def _fill_missing(targets: Tensor, missing: Sequence[int], taxonomy: Taxonomy) -> None:
    """Give the missing columns of targets [N, R] the parents of the labels one level below, in place."""
    for level in sorted(missing, reverse=True):
        if level + 1 < len(taxonomy.levels):
            parents = torch.tensor(
                [*taxonomy.parents[level], UNKNOWN]
            )  # the last one is that of -1
            targets[:, level] = parents[targets[:, level + 1]]


def _leave_out(
    source: str,
    classes: Sequence[str],
    num_samples: int,
    request: EvaluationRequest,
    report: list[str],
    *,
    is_all: bool,
) -> None:
    """Report unknown samples as left out; a `DataError` if they are not to be skipped, or all are unknown."""
    counts = f"{counted(len(classes), 'class')} with {counted(num_samples, 'sample')}"
    text = f"the run does not know {counts}: {several(classes)}"
    if is_all:
        raise DataError(f"{source}: {text}; these are all samples, so there is nothing to evaluate")
    if not request.skips_unknown:
        raise DataError(f"{source}: {text}; --unknown skip evaluates the other samples")
    report.append(f"left out: {text}")


def _user_data(request: EvaluationRequest, on_main: OnMain) -> EvaluationData:
    dataset, bundle = build_user_val(request.config, request.preprocessing, seed=request.seed)
    name, index, declared = dataset.name, request.index, bundle.taxonomy
    report: list[str] = []
    num_left_out = 0
    if index is None and declared is not None:
        raise DataError(f"{name}: has classes, but the dataset of the run declared none")
    if index is not None and declared is None:
        report.append(f"{name}: declares no classes, so its labels are taken for those of the run")
        dataset.taxonomy = index.taxonomy
        if isinstance(bundle.collate, UserCollate):
            bundle.collate.taxonomy = index.taxonomy
    elif (
        index is not None
        and declared is not None
        and (
            declared.levels != index.taxonomy.levels
            or declared.is_multilabel != index.taxonomy.is_multilabel
        )
    ):
        if declared.is_multilabel or index.taxonomy.is_multilabel:
            raise DataError(
                f"{name}: several labels for a sample are not matched by name; give the dataset the classes "
                "of the run, in their order, and its `multilabel`"
            )
        num_left_out = _relabel(dataset, Relabel(declared, index, name), request, on_main, report)
    return _evaluated(bundle, request, name, "split val", report, num_left_out)


def _relabel(
    dataset: UserDataset,
    relabel: Relabel,
    request: EvaluationRequest,
    on_main: OnMain,
    report: list[str],
) -> int:
    """Give the dataset the labels of the run, and leave out samples of other classes; how many these are."""
    if dataset.raw:
        raise DataError(
            f"{dataset.name}: its classes are not those of the run, and as it has a collate_fn of its own, "
            "its labels cannot be matched by name; give the dataset the classes of the run, in their order"
        )
    num_left_out = 0
    if relabel.unknown:
        kept = on_main(
            lambda: [i for i in range(len(dataset)) if not relabel.is_unknown(dataset[i][1])]
        )
        num_left_out = len(dataset) - len(kept)
    if num_left_out:
        _leave_out(dataset.name, relabel.unknown, num_left_out, request, report, is_all=not kept)
        dataset.dataset = Subset(dataset.dataset, kept)
    dataset.relabel = relabel
    return num_left_out


class Relabel:
    """Turns labels of a dataset into those of a run, by the names of the classes and of their ancestors.

    Where parents are unknown, on either side, a name alone identifies a class.

    Attributes:
        unknown: the dataset's classes that the run does not know, as paths from their coarsest ancestor.

    Raises:
        DataError: no level of the dataset is one of the run.
    """

    def __init__(self, declared: Taxonomy, index: LabelIndex, name: str) -> None:
        names = None if len(declared.levels) == len(index.columns) == 1 else declared.names
        columns, self._missing = _columns(name, names, len(declared.levels), index)
        self._taxonomy = index.taxonomy
        self._tables: dict[int, tuple[int, Tensor]] = {}
        """For levels of the run that the dataset has: the column there, and the label of each class there."""
        unknown: dict[str, None] = {}
        classes = [
            (*level.classes, None) for level in declared.levels
        ]  # the last one is that of -1
        for level, low in enumerate(columns[column] for column in index.columns):
            if low < 0:
                continue
            rows = [
                [None] * len(declared.levels[low].classes)
                if column < 0
                else [classes[column][label] for label in declared.ancestors(low, column)]
                for column in columns
            ]
            targets, lacking = encode(list(zip(*rows, strict=True)), index)
            unknown |= dict.fromkeys(lacking)
            self._tables[level] = low, torch.cat([targets[:, level], torch.tensor([UNKNOWN])])
        self.unknown = list(unknown)

    def __call__(self, targets: Tensor) -> Tensor:
        """Labels [N, R] of the run for labels [N, levels of the dataset]; -1 is unknown in both."""
        found = torch.full((len(targets), len(self._taxonomy.levels)), UNKNOWN)
        for level, (column, table) in self._tables.items():
            found[:, level] = table[targets[:, column]]
        _fill_missing(found, self._missing, self._taxonomy)
        return found

    def is_unknown(self, target: Tensor) -> bool:
        """Whether a sample's labels [levels of the dataset] have a class that the run does not know."""
        tables = self._tables.values()
        return any(target[c] != UNKNOWN and table[target[c]] == UNKNOWN for c, table in tables)
