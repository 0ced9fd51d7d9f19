"""The folder of a sweep and those of its runs: the lock, and the configuration that a run was started with.

A run reads its configuration from `asked.yaml`. How it ended counts as long as the configuration is the same.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from linnaeus.config.load import load_config, to_yaml
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.files import (
    ASKED,
    AUTOBATCH,
    OUTCOME,
    FolderInUseError,
    FolderLock,
    prepare_run_folder,
    read_holder,
    take_run_folder,
    write_text_atomically,
)
from linnaeus.launchers.outcome import OUTPUT, Outcome, read_outcome
from linnaeus.launchers.record import forget_record

STARTS = {"START": "train", "START_VAL": "val"}
"""The keys with the sizes that a search tries first, and their modes."""


def lock_folder(folder: Path) -> FolderLock:
    """Make the folder of a sweep and lock it against other sweeps; its runs do not keep the lock.

    Raises:
        ConfigError: another sweep has locked the folder, or it cannot be written to.
    """
    try:
        return take_run_folder(folder, keep=True)[1]
    except FolderInUseError:
        holder = read_holder(folder) or "it does not say which"
        raise ConfigError(
            f"{folder}: another sweep is at work here ({holder}); look at it with linnaeus sweep --status "
            f"{folder}, wait for it or end it, or set another EXPERIMENT.NAME"
        ) from None


def is_asked(folder: Path, config: Config) -> bool:
    """Whether the run in a folder has this configuration.

    A key that an older version did not have counts as its default, so that an upgrade repeats no run.
    """
    path = folder / ASKED
    try:
        if path.read_text(encoding="utf-8") == to_yaml(config):
            return True
        return _with_starts(load_config(["--cfg", str(path)]).config) == _with_starts(config)
    except (OSError, UnicodeDecodeError, ConfigError):
        return False


def _with_starts(config: Config, **starts: Any) -> Config:
    """The configuration with no other start: a sweep sets them itself, and no result depends on them."""
    autobatch = dataclasses.replace(config.DATA.AUTOBATCH, **{**dict.fromkeys(STARTS), **starts})
    return dataclasses.replace(config, DATA=dataclasses.replace(config.DATA, AUTOBATCH=autobatch))


def _newest_sizes(sweep: Path) -> dict[str, int]:
    """What the run of a sweep that has searched last has found, by key."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # there is none, or it is damaged
        newest = max(sweep.glob(f"*/{AUTOBATCH}"), key=lambda file: file.stat().st_mtime)
        found = json.loads(newest.read_text(encoding="utf-8"))
        return {key: found[mode]["batch_size"] for key, mode in STARTS.items() if found[mode]}
    return {}


def prepare(folder: Path, config: Config) -> Outcome | None:
    """Make a run's folder ready for the run, unless the run has ended well.

    An interrupted run with the same configuration is resumed; a failed one, or one with another
    configuration, is moved aside.

    Returns:
        The outcome of an earlier process with the same configuration that ended well or was interrupted.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    is_same = is_asked(folder, config)
    earlier = read_outcome(folder) if is_same else None
    if earlier is not None and earlier.finished:
        return earlier
    resumes = is_same and (earlier is None or earlier.was_interrupted)
    prepare_run_folder(folder, keep=resumes, suffix=".earlier-")
    (folder / OUTPUT).parent.mkdir(exist_ok=True)
    (folder / OUTCOME).unlink(missing_ok=True)
    forget_record(folder)
    given = {key: size for key in STARTS if (size := getattr(config.DATA.AUTOBATCH, key)) is not None}
    config = _with_starts(config, **{**_newest_sizes(folder.parent), **given})
    write_text_atomically(folder / ASKED, to_yaml(config))
    return earlier if resumes else None
