"""The folder of a sweep and those of its runs: whose they are, and what a run was asked to do.

A run reads its configuration from `asked.yaml`. How it ended counts as long as the configuration is the same.
"""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from linnaeus.config.load import load_config, to_yaml
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.files import prepare_run_folder, write_text_atomically
from linnaeus.launchers.outcome import OUTCOME, OUTPUT, Outcome, read_outcome
from linnaeus.launchers.record import forget_record

ASKED, SWEEP = "asked.yaml", "sweep.json"
"""What a run was asked for, in its folder; and the figures of all runs, in that of the sweep."""
LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Lock the folder of a sweep against other sweeps; its runs do not keep the lock.

    The file is for the numbers of the processes at work.

    Raises:
        ConfigError: the folder is locked already, or cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"EXPERIMENT.OUTPUT_DIR: {folder} cannot be written to: {error.strerror}; choose another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"{folder}: another sweep is at work here (process {', '.join(lock.read().split())}); look "
                f"at it with linnaeus sweep --status {folder}, wait for it or end it, or set another "
                "EXPERIMENT.NAME"
            ) from None
        yield lock


def is_asked(folder: Path, config: Config) -> bool:
    """Whether the run in a folder has this configuration.

    A key that an older version did not have counts as its default, so that an upgrade repeats no run.
    """
    path = folder / ASKED
    try:
        if path.read_text(encoding="utf-8") == to_yaml(config):
            return True
        return _chosen(load_config(["--cfg", str(path)]).config) == _chosen(config)
    except (OSError, UnicodeDecodeError, ConfigError):
        return False


def _chosen(config: Config) -> Config:
    """The configuration without what a sweep sets by itself, and no result depends on."""
    autobatch = dataclasses.replace(config.DATA.AUTOBATCH, SHARED_FOLDER=None)
    return dataclasses.replace(config, DATA=dataclasses.replace(config.DATA, AUTOBATCH=autobatch))


def ended_well(folder: Path, config: Config) -> Outcome | None:
    """The outcome of an earlier process with this configuration, if it ended well."""
    outcome = read_outcome(folder) if is_asked(folder, config) else None
    return outcome if outcome is not None and outcome.finished else None


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
    write_text_atomically(folder / ASKED, to_yaml(config))
    return earlier if resumes else None
