"""Data that a trained model is evaluated on, with the labels of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from linnaeus.config.schema import DataConfig
from linnaeus.data.bundle import DataBundle, OnMain, collate_pairs, dataset_length, on_this_process
from linnaeus.data.datasets import build_data
from linnaeus.data.files import ImageFiles, Listing, Part, encode, name_unknown, several, without_damaged
from linnaeus.data.imagefolder import INAT_RANKS, evaluated_folder
from linnaeus.data.manifest import evaluated_manifest
from linnaeus.data.target import UserCollate, UserDataset, build_target_val
from linnaeus.data.taxonomy import UNKNOWN, LabelIndex, Lineage, Taxonomy
from linnaeus.data.transforms import Preprocessing
from linnaeus.errors import ConfigError, DataError
from linnaeus.words import counted

SKIP_REMEDY = "--unknown skip evaluates the other samples"


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
class Request:
    """What is to be evaluated, as a trained run sees it.

    Attributes:
        config: the DATA node.
        index: the run's classes; None where its dataset declared none.
        preprocessing: how an image becomes an input; None where the run's dataset gave tensors.
        seed: of the run; seeds the random numbers that a user's dataset draws when it is made.
        is_own: whether `config.DATASET` is the run's own.
        skips_unknown: leave out samples of classes that the run does not know.
    """

    config: DataConfig
    index: LabelIndex | None
    preprocessing: Preprocessing | None
    seed: int
    is_own: bool
    skips_unknown: bool = False


def build_evaluation_data(request: Request, on_main: OnMain = on_this_process) -> EvaluationData:
    """The samples that a request names, with the labels of the run.

    Args:
        request: what to evaluate on.
        on_main: decodes every file, for `ON_BAD_IMAGE skip`, on one process only.

    Raises:
        ConfigError: a key that does not fit the data or the run.
        DataError: data that cannot be used, classes that the run does not know, or none that it knows.
    """
    dataset = request.config.DATASET
    if isinstance(dataset, Mapping):
        return _user_data(request, on_main)
    if dataset.NAME in ("imagefolder", "manifest"):
        return _files(request, on_main)
    return _built_in(request, dataset.NAME)


# Files.


def _files(request: Request, on_main: OnMain) -> EvaluationData:
    config, index, preprocessing = request.config, request.index, request.preprocessing
    dataset = config.DATASET
    if index is None or preprocessing is None:
        raise ConfigError(
            f"DATA.DATASET.NAME: {dataset.NAME!r} has files and class names, but the dataset of the run "
            "gave tensors or declared no classes: evaluate the run on a `_target_` dataset like its own"
        )
    if dataset.NAME == "imagefolder":
        part = evaluated_folder(dataset, is_own=request.is_own)
    else:
        part = evaluated_manifest(dataset, _source_names(index), is_own=request.is_own)
    if part.index is not None and part.index != index:
        raise DataError(_changed_classes(part, index))
    report = list(part.report)
    listing, missing = _aligned(part, index, report)
    if config.ON_BAD_IMAGE == "skip":
        listing = without_damaged(listing, on_main, report)
    targets, unknown = encode(listing, index)
    listing, targets, num_left_out = _known(listing, targets, unknown, report, skips=request.skips_unknown)
    if not listing.paths:
        raise DataError(f"{listing.source}: no sample to evaluate")
    fill_missing(targets, missing, index.taxonomy)
    report.insert(0, f"{listing.source}: {counted(len(listing.paths), 'sample')} ({part.kind})")
    images = ImageFiles(
        listing.root, listing.paths, targets, preprocessing.channels, preprocessing.transform()
    )
    bundle = DataBundle(
        images, images, index.taxonomy, preprocessing.channels, preprocessing.size, collate_pairs, report,
        preprocessing, index,
    )  # fmt: skip
    return EvaluationData(bundle, listing.source, part.kind, num_left_out)


def _source_names(index: LabelIndex) -> list[str | None]:
    """Names of the levels that lineages have, coarse to fine; None where the run has left a level out."""
    names: list[str | None] = [None] * len(index.lookup)
    for name, column in zip(index.taxonomy.names, index.columns, strict=True):
        names[column] = name
    return names


def _changed_classes(part: Part, index: LabelIndex) -> str:
    """Why samples held out of training cannot be found again."""
    assert part.index is not None
    changes = []
    pairs = zip(part.index.taxonomy.levels, index.taxonomy.levels, strict=False)
    for now, before in pairs:
        new, gone = (sorted({*a.classes} - {*b.classes}) for a, b in ((now, before), (before, now)))
        changes += [f"{now.name} {several(new)} new"] * bool(new)
        changes += [f"{before.name} {several(gone)} gone"] * bool(gone)
    found = f" ({', '.join(changes)})" if changes else ""
    return (
        f"{part.listing.source}: its classes are not those of the run any more{found}, so the samples that "
        "it held out cannot be told from others; name the data to evaluate in DATA.DATASET.VAL"
    )


def _aligned(part: Part, index: LabelIndex, report: list[str]) -> tuple[Listing, list[int]]:
    """The listing with lineages as the index reads them, and the positions of the levels that it lacks.

    Levels are matched by name. Where the source names none, as nested folders, its finest level is the
    finest of the run.
    """
    names, depth = part.level_names, len(index.lookup)
    width = len(part.listing.lineages[0])
    if names is None:
        columns = [level + width - depth for level in range(depth)]
    elif names == INAT_RANKS and depth == len(INAT_RANKS):
        columns = list(range(depth))
    else:
        columns = [names.index(name) if name in names else -1 for name in _source_names(index)]
    if columns == list(range(width)):
        return part.listing, []
    levels = [position for position, column in enumerate(index.columns) if columns[column] < 0]
    if len(levels) == len(index.columns):
        raise DataError(
            f"{part.listing.source}: its taxonomic ranks {', '.join(names or ())} are not those of the run, "
            f"{', '.join(index.taxonomy.names)}"
        )
    if levels:
        missing = ", ".join(index.taxonomy.names[level] for level in levels)
        report.append(
            f"{part.listing.source}: no {missing} there; labels follow from the rank below, as in training"
        )
    if names is None and width > depth:
        report.append(f"{part.listing.source}: of {width} levels of folders, the finest {depth} count")
    unique: dict[Lineage, Lineage] = {
        lineage: tuple(None if column < 0 else lineage[column] for column in columns)
        for lineage in set(part.listing.lineages)
    }
    return replace(part.listing, lineages=[unique[lineage] for lineage in part.listing.lineages]), levels


def fill_missing(targets: Tensor, missing: Sequence[int], taxonomy: Taxonomy) -> None:
    """Give levels that the data does not have the parents of the labels one level below, in place.

    Args:
        targets: [N, R], int64, -1 where unknown.
        missing: positions of those levels.
        taxonomy: that of the run.
    """
    for level in sorted(missing, reverse=True):
        if level + 1 < len(taxonomy.levels):
            parents = torch.tensor([*taxonomy.parents[level], UNKNOWN])  # the last one is that of -1
            targets[:, level] = parents[targets[:, level + 1]]


def _known(
    listing: Listing, targets: Tensor, unknown: Mapping[str, Sequence[int]], report: list[str], *, skips: bool
) -> tuple[Listing, Tensor, int]:
    """The samples of classes that the run knows, and the number of others.

    Raises:
        DataError: there are others and they are not to be skipped, or there are only others.
    """
    if not unknown:
        return listing, targets, 0
    left_out = {position for positions in unknown.values() for position in positions}
    num_classes, named = name_unknown(unknown, listing)
    found = _UnknownFound(listing.source, num_classes, len(left_out), named)
    found.report_or_raise(report, skips=skips, is_all=len(left_out) == len(listing.paths))
    kept = [position for position in range(len(listing.paths)) if position not in left_out]
    return listing.take(kept), targets[kept], len(left_out)


@dataclass(frozen=True)
class _UnknownFound:
    """Samples of classes that the run does not know.

    Attributes:
        source: where they are.
        num_classes: number and noun of the classes.
        num_samples: number of the samples.
        named: the first few classes.
    """

    source: str
    num_classes: str
    num_samples: int
    named: str

    def report_or_raise(self, report: list[str], *, skips: bool, is_all: bool) -> None:
        """Report them as left out.

        Raises:
            DataError: they are not to be skipped, or there are no others.
        """
        num_samples = counted(self.num_samples, "sample")
        text = f"the run does not know {self.num_classes} with {num_samples}: {self.named}"
        if is_all:
            raise DataError(f"{self.source}: {text}; these are all samples, so there is nothing to evaluate")
        if not skips:
            raise DataError(f"{self.source}: {text}; {SKIP_REMEDY}")
        report.append(f"left out: {text}")


# Other datasets.


def _built_in(request: Request, name: str) -> EvaluationData:
    bundle = build_data(request.config, seed=request.seed)
    if request.index is None or bundle.taxonomy != request.index.taxonomy:
        raise DataError(f"DATA.DATASET.NAME: the classes of {name!r} are not those of the run")
    if request.preprocessing is not None:
        bundle.val.transform = request.preprocessing.transform()  # type: ignore[attr-defined]
    report = [f"{name}: {counted(dataset_length(bundle.val), 'sample')} (validation split)"]
    return EvaluationData(_only_val(bundle, request, report), name, "validation split")


def _only_val(bundle: DataBundle, request: Request, report: list[str]) -> DataBundle:
    return replace(
        bundle, train=bundle.val, report=report, preprocessing=request.preprocessing, index=request.index
    )


def _user_data(request: Request, on_main: OnMain) -> EvaluationData:
    dataset, bundle = build_target_val(request.config, request.preprocessing, seed=request.seed)
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
    elif index is not None and declared is not None and not _are_same_classes(declared, index.taxonomy):
        num_left_out = _relabel(dataset, Relabel(declared, index, name), request, on_main, report)
    report.insert(0, f"{name}: {counted(len(dataset), 'sample')} (split val)")
    bundle = replace(bundle, taxonomy=None if index is None else index.taxonomy)
    return EvaluationData(_only_val(bundle, request, report), name, "split val", num_left_out)


def _are_same_classes(declared: Taxonomy, taxonomy: Taxonomy) -> bool:
    """Whether labels of one are labels of the other: the same names, and no class with another parent."""
    if declared.levels != taxonomy.levels:
        return False
    pairs = [
        pair
        for rows in zip(declared.parents, taxonomy.parents, strict=True)
        for pair in zip(*rows, strict=True)
    ]
    return all(one == other or UNKNOWN in (one, other) for one, other in pairs)


def _relabel(
    dataset: UserDataset, relabel: Relabel, request: Request, on_main: OnMain, report: list[str]
) -> int:
    """Give the dataset the labels of the run, and leave out samples of other classes; how many these are.

    Raises:
        DataError: labels cannot be changed, or there are samples of classes that the run does not know and
            these are not to be skipped, or are all samples.
    """
    name = dataset.name
    if dataset.raw:
        raise DataError(
            f"{name}: its classes are not those of the run, and as it has a collate_fn of its own, its "
            "labels cannot be matched by name; give the dataset the classes of the run, in their order"
        )
    num_left_out = 0
    if relabel.unknown:
        kept, num_left_out = on_main(partial(_positions_known, dataset, relabel))
        if num_left_out:
            num_classes = counted(len(relabel.unknown), "class")
            found = _UnknownFound(name, num_classes, num_left_out, several(relabel.unknown))
            found.report_or_raise(report, skips=request.skips_unknown, is_all=not kept)
        dataset.take(kept)
    dataset.relabel = relabel
    return num_left_out


def _positions_known(dataset: UserDataset, relabel: Relabel) -> tuple[list[int], int]:
    """Positions of the samples that have no label of an unknown class, and the number of the others."""
    kept = [i for i in range(len(dataset)) if not relabel.is_unknown(dataset[i][1])]
    return kept, len(dataset) - len(kept)


class Relabel:
    """Turns labels of a dataset into those of a run, by the names of the classes and of their ancestors.

    Args:
        declared: levels and classes of the dataset. Where parents are unknown, on either side, a name alone
            identifies a class.
        index: those of the run.
        name: of the dataset, for messages.

    Attributes:
        unknown: the dataset's classes that the run does not know, as paths from their coarsest ancestor.

    Raises:
        DataError: no level of the dataset is one of the run, or a name stands for several classes of the run
            and no parent tells which.
    """

    def __init__(self, declared: Taxonomy, index: LabelIndex, name: str) -> None:
        taxonomy = self._taxonomy = index.taxonomy
        self.unknown: list[str] = []
        self._tables: list[tuple[int, Tensor] | None] = []
        only = len(declared.levels) == len(taxonomy.levels) == 1
        for position, level in enumerate(taxonomy.levels):
            column = 0 if only else _position(declared.names, level.name)
            if column is None:
                self._tables.append(None)
                continue
            matches = self._matches(declared, column, index, position)
            for label, found in enumerate(matches):
                if not found:
                    self.unknown.append(_path(declared, column, label))
                elif len(found) > 1:
                    raise DataError(
                        f"{name}: {level.name} {declared.levels[column].classes[label]!r} stands for several "
                        f"classes of the run, {', '.join(level.classes[other] for other in found)}; give the "
                        "dataset a `taxonomy` with the parents of its classes"
                    )
            table = torch.tensor([*(found[0] if found else UNKNOWN for found in matches), UNKNOWN])
            self._tables.append((column, table))
        if not any(self._tables):
            raise DataError(
                f"{name}: its taxonomic ranks {', '.join(declared.names)} are not those of the run, "
                f"{', '.join(taxonomy.names)}"
            )

    def _matches(self, declared: Taxonomy, column: int, index: LabelIndex, position: int) -> list[list[int]]:
        """For each class of a column of the dataset, the classes of a level of the run that it may be.

        They have its name, and no ancestor that is another one than its own. Coarser levels have their tables
        already.
        """
        classes = index.taxonomy.levels[position].classes
        by_name: dict[str, list[int]] = {}
        for (_, short_name), label in index.lookup[index.columns[position]].items():
            for name in {short_name, classes[label]}:
                by_name.setdefault(name, []).append(label)
        found = [by_name.get(name, []) for name in declared.levels[column].classes]
        for high, entry in enumerate(self._tables):
            if entry is None:
                continue
            above, table = entry
            ancestors = index.taxonomy.ancestors(position, high)
            for label, ancestor in enumerate(declared.ancestors(column, above)):
                if ancestor != UNKNOWN:
                    own = (int(table[ancestor]), UNKNOWN)
                    found[label] = [other for other in found[label] if ancestors[other] in own]
        return found

    def __call__(self, targets: Tensor) -> Tensor:
        """Labels [..., R] of the run for labels [..., levels of the dataset]; -1 is unknown in both."""
        rows = targets.reshape(-1, targets.shape[-1])
        found = torch.full((len(rows), len(self._tables)), UNKNOWN)
        for level, entry in enumerate(self._tables):
            if entry is not None:
                column, table = entry
                found[:, level] = table[rows[:, column]]
        fill_missing(found, [i for i, entry in enumerate(self._tables) if entry is None], self._taxonomy)
        return found.reshape(*targets.shape[:-1], -1)

    def is_unknown(self, target: Tensor) -> bool:
        """Whether a sample's labels [levels of the dataset] have a class that the run does not know."""
        entries = [entry for entry in self._tables if entry is not None]
        return any(
            target[column] != UNKNOWN and table[target[column]] == UNKNOWN for column, table in entries
        )


def _position(names: Sequence[str], name: str) -> int | None:
    return names.index(name) if name in names else None


def _path(taxonomy: Taxonomy, level: int, label: int) -> str:
    """The names of a class and of its known ancestors, from the coarsest one."""
    names = [taxonomy.levels[level].classes[label]]
    while level and (label := taxonomy.parents[level - 1][label]) != UNKNOWN:
        level -= 1
        names.insert(0, taxonomy.levels[level].classes[label])
    return "/".join(names)
