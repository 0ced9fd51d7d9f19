"""Names of the files of an evaluation, which never replace those of other data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linnaeus.cli.evaluate.context import Session
from linnaeus.cli.evaluate.describe import describe_data
from linnaeus.cli.evaluate.results import files_of
from linnaeus.data.evaluation import EvaluationData
from linnaeus.errors import ConfigError

_PARTS = ("val", "valid", "validation", "test", "train")
"""Names of folders that say too little without the one above."""


def choose_output(session: Session, data: EvaluationData) -> Path:
    """The beginning of the files' names; never that of an evaluation of other data.

    Raises:
        ConfigError: `--output` names the files of such an evaluation, or they cannot be written.
    """
    wanted, trained = session.options.output, session.trained
    describes = json.loads(json.dumps(describe_data(session, data)))
    if wanted is not None and not wanted.is_dir():
        other = _other_data(wanted, describes)
        if other is not None:
            raise ConfigError(
                f"--output: {files_of(wanted)[0]} holds an evaluation of other data ({other}); choose "
                "another name, or remove the file"
            )
        return wanted
    folder = wanted or (trained.folder or trained.checkpoint.parent) / "evaluations"
    stem = folder / _name(session, data)
    path, number = stem, 1
    while _other_data(path, describes) is not None:
        number += 1
        path = stem.with_name(f"{stem.name}_{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output: {folder} cannot be made: {error.strerror}; choose another folder"
        ) from error
    return path


def _name(session: Session, data: EvaluationData) -> str:
    checkpoint = session.options.checkpoint
    names = [checkpoint if checkpoint in ("best", "last") else Path(checkpoint).stem]
    if session.options.run.is_file():
        names = [session.options.run.stem]
    if not session.is_own_dataset:
        source = Path(data.source)
        is_part = source.name in _PARTS and source.parent.name
        names.append(f"{source.parent.name}_{source.name}" if is_part else source.stem or data.source)
    trained_with, preprocessing = session.trained.spec.preprocessing, data.bundle.preprocessing
    if trained_with is not None and preprocessing is not None and trained_with.size != preprocessing.size:
        names.append("x".join(map(str, preprocessing.size)))
    return re.sub(r"[^\w.-]+", "_", "_".join(names))


def _other_data(path: Path, describes: Mapping[str, Any]) -> str | None:
    """What the evaluation in these files was made on, if that is other data; None where there is none."""
    file = files_of(path)[0]
    if not file.exists():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))["data"]
        is_same = {name: data.get(name) for name in describes} == describes
        return None if is_same else str(data.get("source"))
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return "not an evaluation"
