"""The folder of a sweep: `sweep.json` has its runs, each of which has a folder of its own below it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from linnaeus.config.load import load_config, to_yaml
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.files import CHECKPOINTS, SWEEP, link_new, read_json
from linnaeus.run_folder import RUN_FILES, Claim, FolderInUseError, cannot_write, read_state
from linnaeus.sweep.grid import Combination

ASKED = "logs/config.yaml"
"""The configuration with which a worker starts a run, in the run's folder."""


@dataclass(frozen=True)
class PlannedRun:
    """One run before it has begun.

    Attributes:
        combination: its point of the grid.
        config: its configuration, with a name and a folder of its own.
    """

    combination: Combination
    config: Config

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return Path(self.config.EXPERIMENT.OUTPUT_DIR) / self.config.EXPERIMENT.NAME


def plan_run(combination: Combination) -> PlannedRun:
    """The run of a combination: in a folder of its own below the sweep's, and resumed there.

    Raises:
        ConfigError: lists everything that is wrong with its configuration.
    """
    config = load_config(combination.argv).config
    sweep = str(Path(config.EXPERIMENT.OUTPUT_DIR) / config.EXPERIMENT.NAME)
    experiment = dataclasses.replace(config.EXPERIMENT, NAME=combination.name, OUTPUT_DIR=sweep)
    train = dataclasses.replace(config.TRAIN, AUTO_RESUME=True)
    return PlannedRun(combination, dataclasses.replace(config, EXPERIMENT=experiment, TRAIN=train))


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        folder: where its files are.
        values: the text of each swept key's value.
        config: its configuration as YAML.
    """

    folder: Path
    values: dict[str, str]
    config: str

    @property
    def title(self) -> str:
        """The values as they are typed on a command line."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())


@dataclass
class Sweep:
    """What `sweep.json` says.

    Attributes:
        folder: of the sweep.
        argv: the command's keys and values, as typed.
        runs: those of a grid; the first corner of a search, which is never run.
        metric: the one to compare; None for the one that decides which checkpoint is best.
        trials: how many a search may have; None for a grid.
        prune: whether a search ends runs that are worse than the median of the others.
        cwd: the folder in which the command was typed: paths in a configuration begin there.
    """

    folder: Path
    argv: list[str]
    runs: list[dict[str, Any]] = field(default_factory=list)
    metric: str | None = None
    trials: int | None = None
    prune: bool = True
    cwd: str = ""

    @classmethod
    def of(cls, folder: Path, argv: Sequence[str], runs: Sequence[PlannedRun], **rest: Any) -> Sweep:
        """A sweep that is not written yet."""
        entries = [
            {"name": run.combination.name, "values": run.combination.values, "config": to_yaml(run.config)}
            for run in runs
        ]
        return cls(folder, list(argv), entries, cwd=str(Path.cwd()), **rest)

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Read `sweep.json`.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        path = folder / SWEEP
        content = read_json(path)
        if content is None:
            reason = "is damaged" if path.exists() else "is missing"
            raise ConfigError(f"'{folder}': is not the folder of a sweep: {SWEEP} {reason}")
        try:
            sweep = cls(folder, **content)
            if all({"name", "values", "config"} <= {*run} for run in sweep.runs):
                return sweep
        except (TypeError, KeyError):
            pass
        raise ConfigError(f"'{folder}': {SWEEP} is of another version of Linnaeus, or no sweep's")

    def check(self) -> None:
        """Refuse a folder that holds something else.

        Raises:
            ConfigError: the folder is that of another sweep or of a run.
        """
        if any((self.folder / name).exists() for name in (*RUN_FILES, CHECKPOINTS)):
            raise ConfigError(
                f"EXPERIMENT.NAME: {self.folder} is the folder of a run, and a sweep keeps its runs in one "
                "of its own: give the sweep another name"
            )
        if (self.folder / SWEEP).exists():
            self._check_same(Sweep.read(self.folder))

    def write(self) -> None:
        """Write `sweep.json`, unless it is there and says the same; more trials than it says are added.

        Raises:
            ConfigError: as for `check`, or the folder cannot be written to.
        """
        content = {key: value for key, value in vars(self).items() if key != "folder"}
        temporary = self.folder / f".{uuid.uuid4().hex}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                link_new(temporary, self.folder / SWEEP)
                return
            except FileExistsError:
                earlier = Sweep.read(self.folder)
                self._check_same(earlier)
                if (self.trials or 0) > (earlier.trials or 0):
                    temporary.replace(self.folder / SWEEP)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def _check_same(self, earlier: Sweep) -> None:
        """Refuse a folder that holds other runs."""
        mine, others = ({run["name"]: run["config"] for run in sweep.runs} for sweep in (self, earlier))
        differs = ""
        if (self.trials is None) != (earlier.trials is None):
            differs = f"a {'grid' if earlier.trials is None else 'search'}"
        elif self.trials is not None and (self.metric, {*self.argv}) != (earlier.metric, {*earlier.argv}):
            differs = "a search with other keys, values or another metric"
        elif mine.keys() != others.keys():
            differs = "a sweep with other values"
        elif changed := [name for name in mine if not _is_same(mine[name], others[name])]:
            differs = f"a sweep with another configuration, such as that of {changed[0]}"
        if differs:
            typed = shlex.join(["linnaeus", "sweep", *earlier.argv])
            raise ConfigError(
                f"EXPERIMENT.NAME: {self.folder} is the folder of {differs} ({typed}); give this sweep "
                "another name"
            )

    def grid(self) -> list[SweepRun]:
        """The runs of a grid, in their order; none of a search."""
        entries = self.runs if self.trials is None else []
        return [SweepRun(self.folder / run["name"], run["values"], run["config"]) for run in entries]

    def repeat_failed(self) -> None:
        """Forget that runs of a grid have failed: workers take them again, from their checkpoints."""
        for run in self.grid():
            if read_state(run.folder).status == "failed":
                with suppress(FolderInUseError, OSError):  # somebody has it again
                    claim = Claim(run.folder)
                    claim.begin()
                    claim.release()


def _is_same(text: str, other: str) -> bool:
    """Whether two configurations are equal. A key that an older version did not have is at its default."""
    if text == other:
        return True
    defaults = flattened(yaml.safe_load(to_yaml(Config())))
    return defaults | flattened(yaml.safe_load(text)) == defaults | flattened(yaml.safe_load(other))


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a nested configuration by dotted key; an empty group has none.

    >>> flattened({"A": {"B": 1, "C": {}}, "D": [2]})
    {'A.B': 1, 'D': [2]}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in flattened(value).items()}
        else:
            flat[str(name)] = value
    return flat
