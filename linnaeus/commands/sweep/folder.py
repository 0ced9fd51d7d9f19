"""The files that a sweep keeps in a run's folder: its configuration, and how it ended.

The run's process reads its configuration from `asked.yaml`; `outcome.json` says how the process ended. The
run itself writes `result.json`. An outcome counts as long as the configuration is the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linnaeus.config.load import to_yaml
from linnaeus.config.schema import Config
from linnaeus.files import prepare_run_folder, write_text_atomically
from linnaeus.signals import SIGNALS

ASKED, OUTCOME, RESULT, OUTPUT = "asked.yaml", "outcome.json", "result.json", "logs/output.txt"


@dataclass(frozen=True)
class Outcome:
    """How the process of a run ended.

    Attributes:
        exit_code: the process's; negative for a signal.
        seconds: from start to end, summed over interruptions.
        reason: why the run failed, in its own words; None when it did not.
        result: content of `result.json`; None for a run that did not end well.
    """

    exit_code: int
    seconds: float
    reason: str | None = None
    result: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether the run ended well."""
        return self.exit_code == 0 and self.result is not None

    @property
    def was_interrupted(self) -> bool:
        """Whether somebody stopped the run or ended its process: Ctrl-C, or another signal."""
        return self.exit_code < 0 or self.exit_code - 128 in SIGNALS


def prepare(folder: Path, config: Config) -> Outcome | None:
    """Make a run's folder ready for the run, unless the run has ended well.

    An interrupted run with the same configuration is resumed; a failed one, or one with another
    configuration, is moved aside.

    Returns:
        The outcome of an earlier process with the same configuration that ended well or was interrupted.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    is_same = _read_text(folder / ASKED) == to_yaml(config)
    earlier = read_outcome(folder) if is_same else None
    if earlier is not None and earlier.finished:
        return earlier
    resumes = is_same and (earlier is None or earlier.was_interrupted)
    prepare_run_folder(folder, keep=resumes, suffix=".earlier-")
    (folder / OUTPUT).parent.mkdir(exist_ok=True)
    (folder / OUTCOME).unlink(missing_ok=True)
    write_text_atomically(folder / ASKED, to_yaml(config))
    return earlier if resumes else None


def read_outcome(folder: Path) -> Outcome | None:
    """How the last process in a folder ended; None when no sweep saw its end."""
    written = _read_json(folder / OUTCOME)
    if written is not None:
        return Outcome(**written)
    result = read_result(folder)  # the sweep ended before its run, which ended well
    return None if result is None else Outcome(0, result["training_s"], None, result)


def read_result(folder: Path) -> dict[str, Any] | None:
    """Content of `result.json`; None for a run that has not ended well."""
    return _read_json(folder / RESULT)


def save_outcome(folder: Path, outcome: Outcome) -> None:
    """Write how the process ended, atomically."""
    write_text_atomically(folder / OUTCOME, json.dumps(asdict(outcome), indent=2) + "\n")


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no such file, or it is damaged."""
    try:
        content = json.loads(_read_text(path) or "")
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
