"""Batch sizes of a sweep for GPUs that need not be here, predicted before anything is started."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import get_args

from rich.console import Console
from rich.table import Table

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.predict.gpus import ASSUMED_BASE_BYTES, Gpu
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.result import Mode
from linnaeus.cli.analyze.measure import Setup
from linnaeus.cli.analyze.predict import META, PredictedStep, build_on_meta, fill, predicted_step
from linnaeus.cli.analyze.results import Row
from linnaeus.config.schema import DataConfig
from linnaeus.console import StatusLine
from linnaeus.data.datasets import build_data
from linnaeus.dist import World
from linnaeus.errors import AutoBatchError, LinnaeusError
from linnaeus.sweep.folder import PlannedRun
from linnaeus.words import counted

MODES: tuple[Mode, ...] = get_args(Mode)
_WITHOUT_MEMORY = ("EXPERIMENT.", "SCHEDULE.", "OPTIMIZER.LR", "OPTIMIZER.lr")
"""How the keys begin that no step's memory depends on, and that are swept most."""
logger = logging.getLogger("linnaeus.sweep")


def check_predictions(
    runs: Sequence[PlannedRun], gpus: Sequence[Gpu], console: Console, *, world_size: int = 1
) -> None:
    """Show the batch sizes that are predicted for each group of runs whose sizes cannot differ.

    Args:
        runs: of the sweep.
        gpus: that the runs may be given.
        console: shows the table.
        world_size: processes of each run.

    Raises:
        AutoBatchError: for some runs nothing is predicted to fit on any of the GPUs.
    """
    groups = groups_of(runs)
    table = Table(title="Predicted batch sizes", title_justify="left")
    for heading in ("runs", "number", "GPU", "training", "validation"):
        table.add_column(heading, overflow="fold")
    nowhere = []
    with StatusLine(console) as line:
        for number, (name, group) in enumerate(groups.items(), start=1):
            logger.info(
                "predicting batch sizes, group %d of %d (%s)", number, len(groups), counted(len(group), "run")
            )
            try:
                rows = _predicted(group[0], gpus, world_size, line, console)
            except LinnaeusError as error:  # the run itself says it better, if it is a mistake
                logger.warning("%s: batch sizes are not predicted: %s", name, " ".join(str(error).split()))
                rows = []
            for gpu in gpus:
                cells = [_cell(row) for row in rows if row.device == gpu.name]
                table.add_row(name, str(len(group)), gpu.name, *(cells or ["not predicted"] * len(MODES)))
            missing: dict[str, str | None] = {}
            for row in rows:
                if row.batch_size is None:
                    missing.setdefault(row.device, row.reason)
            if len(missing) == len(gpus):
                nowhere.append(f"  - {name} ({counted(len(group), 'run')}): {missing[gpus[0].name]}")
            elif missing:
                logger.warning("%s: nothing is predicted to fit on %s", name, ", ".join(missing))
            gc.collect()
    console.print(table)
    if nowhere:
        raise AutoBatchError(
            "no run was started: nothing is predicted to fit for\n" + "\n".join(nowhere) + "\nLeave these "
            "values out of the sweep, name a larger GPU, or leave --predict-gpu out to try them all the same."
        )


def groups_of(runs: Sequence[PlannedRun]) -> dict[str, list[PlannedRun]]:
    """The runs, in their order, by the swept values that their sizes may depend on."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        values = run.combination.values.items()
        name = ", ".join(f"{key}={text}" for key, text in values if not key.startswith(_WITHOUT_MEMORY))
        groups.setdefault(name or "all", []).append(run)
    return groups


def _predicted(
    run: PlannedRun, gpus: Sequence[Gpu], world_size: int, line: StatusLine, console: Console
) -> list[Row]:
    """A row for each mode and GPU."""
    config = run.config
    status = RankStatus(line.update)
    status.update("building")
    data = build_data(config.DATA, seed=config.EXPERIMENT.SEED)
    world = World(META, world_size=world_size, local_world_size=world_size)
    search = build_on_meta(Setup(config, data, world, status, console))
    rows = []
    for mode in MODES:
        status.update(f"tracing {mode}")
        step = predicted_step(search, mode, ASSUMED_BASE_BYTES)
        rows += [_row(config.DATA, step, gpu) for gpu in gpus]
    return rows


def _row(data: DataConfig, step: PredictedStep, gpu: Gpu) -> Row:
    """The size that a search would find, or the one that is configured, where it fits."""
    suffix = "" if step.mode == "train" else "_VAL"
    autobatch, size = data.AUTOBATCH, getattr(data, f"BATCH_SIZE{suffix}")
    row = Row(step.mode, 1.0, device=gpu.name, device_bytes=gpu.total_bytes)
    if getattr(autobatch, f"ENABLED{suffix}"):
        row.memory_fraction = getattr(autobatch, f"TARGET_MEMORY_FRACTION{suffix}")
        fill(row, step, autobatch.MEMORY_LIMIT_GB)
    elif (need := step.prediction.peak_bytes(size)) <= gpu.total_bytes:
        row.batch_size = size
        row.safe_batch_size = size if step.prediction.safe_bytes(size) <= gpu.total_bytes else None
    else:
        row.reason = (
            f"DATA.BATCH_SIZE{suffix} is {size}, which is predicted to take {need / GIB:.2f} GiB; {gpu.name} "
            f"has {gpu.total_bytes / GIB:.2f} GiB"
        )
    return row


def _cell(row: Row) -> str:
    if row.batch_size is None:
        return "none fits"
    safe = row.safe_batch_size
    return str(safe) if safe is not None else f"{row.batch_size} (without margin)"
