"""The folder of a sweep: `sweep.json` lists its runs, and each run has a folder beside it."""

from __future__ import annotations

import json
import shlex
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from linnaeus.config.dump import to_yaml
from linnaeus.config.keys import dotted
from linnaeus.config.load import load_config
from linnaeus.config.overrides import leaves
from linnaeus.config.schema import Config
from linnaeus.runtime.errors import EXIT_INTERRUPTED, ConfigError
from linnaeus.runtime.files import (
    STUDY,
    SWEEP,
    link_new,
    read_json,
    suggest_path,
    write_text_atomically,
)
from linnaeus.runtime.run_folder import (
    Claim,
    FolderInUseError,
    LostFolderError,
    cannot_write,
    holds_run,
    read_state,
)
from linnaeus.sweep.space import NOT_SWEPT, Combination, title_of

if TYPE_CHECKING:
    from linnaeus.sweep.search import Study

ASKED = "logs/config.yaml"
"""The configuration with which a worker starts a run, in the run directory."""


Plan = tuple[Combination, Config]
"""A point of a grid and the configuration of its run, with its own name and folder."""


def plan_run(
    combination: Combination,
    sweep: str | None = None,
    *,
    references: bool = False,
    compositions: dict[Any, Any] | None = None,
) -> Config:
    """Return the configuration of a run, which trains and resumes in its own folder in the sweep's.

    Args:
        combination: combination of values.
        sweep: the sweep's folder; None uses `EXPERIMENT.NAME` of the configuration.
        references: whether files, classes and timm's names must exist; see `load_config`.
        compositions: as for `load_config`.

    Raises:
        ConfigError: lists all mistakes in the configuration.
    """
    config = load_config(combination.argv, references=references, compositions=compositions).config
    sweep = sweep or str(config.EXPERIMENT.folder)
    experiment = replace(config.EXPERIMENT, NAME=combination.name, OUTPUT_DIR=sweep)
    return replace(config, EXPERIMENT=experiment, TRAIN=replace(config.TRAIN, AUTO_RESUME=True))


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        folder: the run directory.
        values: the text of each swept key's value.
        config: its configuration as YAML.
    """

    folder: Path
    values: dict[str, str]
    config: str

    @property
    def title(self) -> str:
        """The values as on a command line."""
        return title_of(self.values)


@dataclass
class Sweep:
    """Content of `sweep.json`.

    Attributes:
        folder: folder of the sweep.
        argv: the command's keys and values, as typed.
        runs: all runs of a grid; for a search, its first corner, which is never run.
        metric: the metric to compare; None for the metric that selects the best checkpoint.
        trials: number of trials of a search; None for a grid.
        prune: whether a search stops runs that are worse than the median of the others.
        cwd: working directory of the command; relative paths in a configuration start there.
        id: distinguishes it from a later sweep in the same folder.
    """

    folder: Path
    argv: list[str]
    runs: list[dict[str, Any]] = field(default_factory=list)
    metric: str | None = None
    trials: int | None = None
    prune: bool = True
    cwd: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @classmethod
    def of(cls, folder: Path, argv: Sequence[str], plans: Sequence[Plan], **rest: Any) -> Sweep:
        """Return a new sweep, not written yet."""
        entries = [
            {"name": combination.name, "values": combination.values, "config": to_yaml(config)}
            for combination, config in plans
        ]
        return cls(folder, list(argv), entries, cwd=str(Path.cwd()), **rest)

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Read `sweep.json`.

        Raises:
            ConfigError: the file is missing or damaged.
        """
        path = folder / SWEEP
        content = read_json(path)
        if content is None:
            if not folder.is_dir():
                raise ConfigError(f"'{folder}': no such folder{suggest_path(folder)}")
            reason = "is damaged" if path.exists() else "is missing"
            raise ConfigError(
                f"'{folder}': is not the folder of a sweep: {SWEEP} {reason}; to show its runs, run "
                f"linnaeus compare {shlex.quote(str(folder))}"
            )
        with suppress(TypeError, KeyError, AttributeError):
            sweep = cls(folder, **content)
            if sweep._is_valid():
                return sweep
        raise ConfigError(f"'{folder}': {SWEEP} is damaged or from another version of Linnaeus")

    def _is_valid(self) -> bool:
        """Whether all fields have the right types and the runs are folders in this one.

        Raises:
            TypeError, KeyError, AttributeError: a field has another type.
        """
        texts = [*self.argv, self.cwd, self.id, "" if self.metric is None else self.metric]
        for run in self.runs:
            texts += [run["name"], run["config"], *run["values"], *run["values"].values()]
        names = [run["name"] for run in self.runs]
        is_number = self.trials is None or type(self.trials) is int
        return (
            is_number
            and all(isinstance(text, str) for text in texts)
            and all(Path(name).name == name != ".." and "\0" not in name for name in names)
        )

    def check(self) -> None:
        """Refuse a folder that holds something else.

        Raises:
            ConfigError: the folder belongs to another sweep or is a run directory.
        """
        if holds_run(self.folder):
            raise ConfigError(
                f"EXPERIMENT.NAME: {self.folder} is a run directory, but a sweep needs its own folder; give "
                "the sweep another name"
            )
        if (self.folder / SWEEP).exists():
            self._check_same(Sweep.read(self.folder))
        elif (
            any(holds_run(self.folder / run["name"]) for run in self.runs)
            or (self.folder / STUDY).exists()
        ):
            raise ConfigError(
                f"EXPERIMENT.NAME: {self.folder} has runs of these values but no {SWEEP}; give the sweep "
                "another name"
            )

    def check_is_there(self) -> None:
        """Check that the folder still belongs to this sweep. Call this before each run.

        Raises:
            LostFolderError: the folder was renamed or deleted, or belongs to another sweep now.
        """
        if (read_json(self.folder / SWEEP) or {}).get("id") != self.id:
            raise LostFolderError(
                f"{self.folder} no longer belongs to this sweep: it was renamed or deleted; to resume, run "
                "linnaeus work FOLDER with its new name"
            )

    def write(self) -> None:
        """Write `sweep.json`, or raise the number of trials in an existing one.

        Raises:
            ConfigError: as for `check`, or the folder cannot be written to.
        """
        temporary = self.folder / f".{uuid.uuid4().hex}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(self._text(), encoding="utf-8")
                link_new(temporary, self.folder / SWEEP)
            except FileExistsError:
                earlier = Sweep.read(self.folder)
                self._check_same(earlier)
                self.id = earlier.id
                if (self.trials or 0) > (earlier.trials or 0):
                    write_text_atomically(self.folder / SWEEP, self._text())
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _text(self) -> str:
        content = {key: value for key, value in vars(self).items() if key != "folder"}
        return json.dumps(content, indent=1) + "\n"

    def _check_same(self, earlier: Sweep) -> None:
        """Refuse a folder that holds other runs."""
        if differs := self._difference(earlier):
            typed = shlex.join(["linnaeus", "sweep", *earlier.argv])
            raise ConfigError(
                f"EXPERIMENT.NAME: {self.folder} belongs to {differs} ({typed}); give this sweep "
                "another name, or delete the folder"
            )

    def _difference(self, earlier: Sweep) -> str:
        """Describe the owner of the folder if it holds other runs than these; else return an empty text."""
        mine, others = (
            {run["name"]: run["config"] for run in sweep.runs} for sweep in (self, earlier)
        )
        if (self.trials is None) != (earlier.trials is None):
            return f"a {'grid' if earlier.trials is None else 'search'}"
        if self.trials is not None and (self.metric, _space(self)) != (
            earlier.metric,
            _space(earlier),
        ):
            return "a search with other keys, values or another metric"
        if mine.keys() != others.keys():
            return "a sweep with other values"
        if changed := [name for name in mine if not _is_same(mine[name], others[name])]:
            return f"a sweep whose run {changed[0]} has another configuration"
        return ""

    def grid(self) -> list[SweepRun]:
        """Return the runs of a grid in order; none for a search."""
        entries = self.runs if self.trials is None else []
        return [
            SweepRun(self.folder / run["name"], run["values"], run["config"]) for run in entries
        ]

    def known_runs(self, study: Study | None) -> list[SweepRun]:
        """Return all runs of a grid, or the trials of a search so far, each folder once."""
        found = self.grid() if study is None else [run for _, run in study.runs()]
        return [*{run.folder: run for run in found}.values()]

    def repeat_failed(self) -> None:
        """Mark failed runs of a grid as interrupted, so that workers resume them."""
        for run in self.grid():
            if read_state(run.folder).status == "failed":
                with suppress(FolderInUseError, OSError):  # another worker has claimed it
                    claim = Claim(run.folder)
                    if claim.state.status == "failed":
                        claim.end(EXIT_INTERRUPTED, "to be tried again")
                    claim.release()


def _space(sweep: Sweep) -> set[str]:
    """Return the search space: the tokens that define the values."""
    return {token for token in sweep.argv if not token.startswith(NOT_SWEPT)}


def _is_same(text: str, other: str) -> bool:
    """Whether two configurations are equal, except for the place of their files."""
    if text == other:
        return True
    ignored = dict.fromkeys(NOT_SWEPT)
    mine, others = (flattened(yaml.safe_load(one)) | ignored for one in (text, other))
    return bool(mine == others)


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a nested configuration by dotted key. Empty groups are omitted.

    >>> flattened({"A": {"B": 1, "C": {}}, "D": [2]})
    {'A.B': 1, 'D': [2]}
    """
    return {dotted(path): value for path, value in leaves(config) if value != {}}
