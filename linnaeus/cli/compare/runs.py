"""Runs as their folders tell them: configuration, progress, result and how they ended. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml

from linnaeus.cli.compare.differences import flattened
from linnaeus.cli.compare.history import numbers_in
from linnaeus.cli.compare.results import PLANNED, Row
from linnaeus.config.load import FastLoader, unescape
from linnaeus.config.tree import PLAN
from linnaeus.files import ASKED, CHECKPOINTS, CONFIG, LOCK, OUTCOME, SWEEP, read_holder
from linnaeus.launchers.interface import Job
from linnaeus.launchers.jobs import active_jobs, lost_outcome
from linnaeus.launchers.outcome import is_newer, read_json, read_outcome


def read_runs(folders: Sequence[Path]) -> list[Row]:
    """Read everything but the metrics. A file that is missing or damaged leaves its part unknown."""
    jobs, pruned = active_jobs(folders), _pruned(folders)
    return [_read_run(folder, jobs.get(folder), pruned=folder.resolve() in pruned) for folder in folders]


def _pruned(folders: Iterable[Path]) -> set[Path]:
    """The runs that their sweep says a search has ended."""
    found = set()
    for sweep in {folder.resolve().parent for folder in folders}:
        entries = (read_json(sweep / SWEEP) or {}).get("runs")
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and entry.get("status") == "pruned":
                found.add(sweep / Path(str(entry.get("folder"))).name)
    return found


def _read_run(folder: Path, job: Job | None, *, pruned: bool) -> Row:
    run = Row({}, folder, job=job, pruned=pruned)
    _read_config(run)
    if job is None:
        _find_end(run)
    return run


def _read_config(run: Row) -> None:
    folder = run.folder
    # Before its first step, a run that a sweep has started only has what it was asked for.
    path = next((folder / name for name in (CONFIG, ASKED) if (folder / name).exists()), folder / CONFIG)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=FastLoader)
        if not isinstance(content, dict):
            raise ValueError("it holds no keys")
    except FileNotFoundError:
        run.problem = f"there is no {CONFIG}"
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        run.problem = f"{path.name} cannot be read: {' '.join(str(error).split())}"
    else:
        plan = content.pop(PLAN, None)
        run.config = {key: unescape(value) for key, value in flattened(content).items()}
        if isinstance(plan, Mapping):
            run.plan = numbers_in({name: plan[key] for key, name in PLANNED.items() if key in plan})


def _find_end(run: Row) -> None:
    """Find out how a run ended, or whether somebody goes on with it by hand.

    The first that is so decides:

    | the outcome says that it ended well | `finished` |
    | the process of the lock lives here | `running` |
    | the lock is of another machine, and newer than the outcome, if any | `running?` |
    | there is an outcome | as that says |
    | there is a checkpoint | `interrupted` |
    | there is nothing but what a sweep asks for | `not run` |
    | else | `failed` |
    """
    folder = run.folder
    run.outcome = read_outcome(folder) or lost_outcome(folder)
    if run.outcome is not None and run.outcome.finished:
        return
    running = _running(folder)
    if running == "running?" and run.outcome is not None and not is_newer(folder / LOCK, folder / OUTCOME):
        running = None  # a process that was killed has left the lock
    if running is not None:
        run.file_status, run.outcome = running, None
    elif run.outcome is not None:
        return
    elif any((folder / CHECKPOINTS).glob("*.pt")):
        run.file_status = "interrupted"
    elif (folder / CONFIG).exists() or not (folder / ASKED).exists():
        run.file_status = "failed"
        run.failure = "ended without a result and without a checkpoint"


def _running(folder: Path) -> Literal["running", "running?"] | None:
    """`running` where the lock's process lives here, `running?` where it is on another machine, else None.

    The lock itself is not tried: a run that starts at this moment would find it taken.
    """
    holder = read_holder(folder)
    if holder is None:
        return None
    if not holder.is_here:
        return "running?"
    return "running" if holder.lives() else None
