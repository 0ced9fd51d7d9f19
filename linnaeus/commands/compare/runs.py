"""One run as its folder tells it: configuration, progress, result and how it ended. Imports no torch."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from linnaeus.commands.compare.differences import flattened
from linnaeus.commands.sweep.folder import ASKED, SWEEP
from linnaeus.config.files import Loader
from linnaeus.config.load import PLAN
from linnaeus.files import CHECKPOINTS, LOCK
from linnaeus.launchers.interface import Job, JobKind
from linnaeus.launchers.jobs import going, lost
from linnaeus.launchers.outcome import OUTCOME, Outcome, read_json, read_outcome, read_result

RunStatus = JobKind | Literal["finished", "failed", "interrupted", "pruned", "running?", "not run"]
"""How far a run has come; `running?` is one that another machine has begun, where nothing can be asked."""
CONFIG = "config.yaml"
CLOCK_SLACK_S = 5.0
"""A process is the one that a lock names if it was started at most this much later than the file."""
_PLANNED = {
    "MICRO_BATCH": "batch_size", "ACCUMULATION_STEPS": "accumulation_steps", "WORLD_SIZE": "world_size",
    "EFFECTIVE_BATCH": "effective_batch", "LEARNING_RATE": "learning_rate", "WARMUP_STEPS": "warmup_steps",
    "TOTAL_STEPS": "total_steps",
}  # fmt: skip
"""Entries of the plan in `config.yaml`, and what `result.json` calls them."""


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads what `to_yaml` writes, ten times as fast where PyYAML has its C parser."""


_FastLoader.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers
_FastLoader.yaml_constructors = Loader.yaml_constructors
_ESCAPED = re.compile(r"(\\*)\1\\\$\{")


@dataclass
class RunFolder:
    """What is known of a run.

    Attributes:
        folder: the run's.
        config: its configuration by dotted key; None where that is not known.
        plan: figures of its batch plan, with the names of `result.json`.
        outcome: how it ended; None for a run that is going on, or whose end nobody saw.
        job: who runs it, if a launcher has started it and it goes on.
        pruned: whether a search has ended it before its end.
        state: its status while there is neither a job nor an outcome.
        reason: why it failed, where there is no outcome to say so.
        problem: why the configuration is not known; empty where it is.
    """

    folder: Path
    config: dict[str, Any] | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome | None = None
    job: Job | None = None
    pruned: bool = False
    state: RunStatus = "not run"
    reason: str | None = None
    problem: str = ""


def read_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Read everything but the metrics. A file that is missing or damaged leaves its part unknown."""
    jobs, pruned = going(folders), _pruned(folders)
    return [_read_run(folder, jobs.get(folder), pruned=folder.resolve() in pruned) for folder in folders]


def _pruned(folders: Iterable[Path]) -> set[Path]:
    """The runs that their sweep says a search has ended."""
    sweeps = {folder.resolve().parent for folder in folders}
    return {
        sweep / Path(entry["folder"]).name
        for sweep in sweeps
        for entry in (read_json(sweep / SWEEP) or {}).get("runs", [])
        if isinstance(entry, dict) and entry.get("status") == "pruned" and "folder" in entry
    }


def _read_run(folder: Path, job: Job | None, *, pruned: bool) -> RunFolder:
    run = RunFolder(folder, job=job, pruned=pruned)
    _read_config(run)
    if job is None:
        _find_state(run)
    return run


def _read_config(run: RunFolder) -> None:
    folder = run.folder
    # Before its first step, a run that a sweep has started only has what it was asked for.
    path = next((folder / name for name in (CONFIG, ASKED) if (folder / name).exists()), folder / CONFIG)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_FastLoader)
        if not isinstance(content, dict):
            raise ValueError("it holds no keys")
    except FileNotFoundError:
        run.problem = f"there is no {CONFIG}"
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        run.problem = f"{path.name} cannot be read: {' '.join(str(error).split())}"
    else:
        plan = content.pop(PLAN, None)
        run.config = {key: _unescaped(value) for key, value in flattened(content).items()}
        if isinstance(plan, Mapping):
            run.plan = {name: plan[key] for key, name in _PLANNED.items() if key in plan}


def _find_state(run: RunFolder) -> None:
    """Find out how a run ended, or whether somebody goes on with it by hand."""
    folder = run.folder
    run.outcome = _outcome(folder)
    if run.outcome is not None and run.outcome.finished:
        return
    running = _running(folder)
    if running == "running?" and run.outcome is not None and not _is_newer(folder / LOCK, folder / OUTCOME):
        return  # a process that was killed has left it
    if running is not None:
        run.state, run.outcome = running, None
    elif run.outcome is None:
        if any((folder / CHECKPOINTS).glob("*.pt")):
            run.state = "interrupted"
        elif (folder / CONFIG).exists() or not (folder / ASKED).exists():
            run.state, run.reason = "failed", "ended without a result and without a checkpoint"


def _is_newer(path: Path, other: Path) -> bool:
    """Whether a file was written after another one; False where either is missing."""
    try:
        return path.stat().st_mtime > other.stat().st_mtime
    except OSError:
        return False


def _outcome(folder: Path) -> Outcome | None:
    """How the last process ended. A result counts whatever a sweep has seen before somebody went on."""
    try:
        seen = read_outcome(folder)
    except (KeyError, TypeError):  # of another version, or damaged
        seen = None
    result = read_result(folder)
    if result is None or (seen is not None and seen.finished):
        return seen or lost(folder)
    return Outcome(0, float(result.get("training_s") or 0.0), None, result)


def _running(folder: Path) -> Literal["running", "running?"] | None:
    """`running` where the lock's process lives here, `running?` where it is on another machine, else None.

    The lock itself is not tried: a run that starts at this moment would find it taken.
    """
    lock = folder / LOCK
    try:
        match = re.match(r"process (\d+) on (\S+)", lock.read_text(encoding="utf-8"))
        written = lock.stat().st_mtime
    except (OSError, UnicodeDecodeError):
        return None
    if match is None:
        return None
    if match[2] != socket.gethostname():
        return "running?"
    try:
        process = psutil.Process(int(match[1]))
        is_it = process.create_time() < written + CLOCK_SLACK_S
        return "running" if is_it and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _unescaped(value: Any) -> Any:
    """The text that `to_yaml` has escaped because `${` is an interpolation."""
    return _ESCAPED.sub(r"\1${", value) if isinstance(value, str) else value
