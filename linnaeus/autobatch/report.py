"""Show the results of a search as a table, as one sentence, and as `autobatch.json`."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.files import write_text_atomically
from linnaeus.memory.device import GIB
from linnaeus.tracking import Tracker

logger = logging.getLogger("linnaeus.run")

_LIMITS = {
    "memory": "the memory budget",
    "max_batch_size": "MAX_BATCH_SIZE",
    "dataset": "the samples of one process",
    "effective_batch": "the effective batch asked for",
    "host_memory": "host memory for the loader",
    "max_trials": "MAX_TRIALS",
    "timeout": "TIMEOUT_MINUTES",
    "throughput": "samples per second, which more would not raise by 5 %",
}


def device_environment(device: torch.device) -> dict[str, Any]:
    """Device and versions that the sizes found depend on."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor() or platform.machine()
    return {
        "device": str(device),
        "device_name": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def report_searches(
    results: Mapping[str, AutoBatchResult],
    device: torch.device,
    path: Path,
    console: Console,
    tracker: Tracker,
) -> None:
    """Show the results on the console, send them to the tracker and write `autobatch.json`.

    Args:
        results: by mode; nothing is written where there are none.
        device: the device of the search.
        path: `autobatch.json` in the run's folder.
        console: takes the tables of trials.
        tracker: takes the tables and the sizes.
    """
    for mode, result in results.items():
        console.print(trials_table(result))
        logger.info(summary(result))
        columns = ("batch_size", "status", "peak_bytes", "seconds")
        rows = [[trial[name] for name in columns] for trial in result.as_dict()["trials"]]
        tracker.table(f"autobatch/{mode}_trials", columns, rows)
        tracker.summarise({f"autobatch/{mode}_batch_size": result.batch_size})
    if results:
        content = {mode: results[mode].as_dict() if mode in results else None for mode in get_args(Mode)}
        content["environment"] = device_environment(device)
        write_text_atomically(path, json.dumps(content, indent=2) + "\n")


def trials_table(result: AutoBatchResult) -> Table:
    """The trials of one search as a table in which an arrow marks the size found."""
    table = Table(title=f"AutoBatch trials, {result.mode}", title_justify="left")
    for heading in ("batch size", "status", "peak GiB", "of budget", "seconds"):
        table.add_column(heading, justify="left" if heading == "status" else "right")
    for trial in result.trials:
        peak = "" if trial.peak_bytes is None else f"{trial.peak_bytes / GIB:.3f}"
        of_budget = "" if trial.peak_bytes is None else f"{trial.peak_bytes / result.budget_bytes:.1%}"
        mark = "→ " if trial.size == result.batch_size else ""
        table.add_row(f"{mark}{trial.size}", trial.status, peak, of_budget, f"{trial.seconds:.2f}")
    return table


def summary(result: AutoBatchResult) -> str:
    """One sentence with the size found, its limit, and what is proven about the largest size."""
    proof = "certified"
    if not result.certified:
        proof = f"not certified (the largest is at most {result.within:.1%} larger)"
    limit = _LIMITS[result.limited_by]
    return (
        f"AutoBatch {result.mode}: batch size {result.batch_size}, limited by {limit}, {proof}; "
        f"{len(result.trials)} trials in {result.seconds:.1f} s, budget {result.budget_bytes / GIB:.2f} GiB "
        f"of {result.total_bytes / GIB:.2f} GiB"
    )
