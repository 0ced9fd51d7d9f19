"""Batch sizes of a sweep for GPUs that need not be here, predicted before anything is started."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from linnaeus.cli.compare.runs import short_names
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


@dataclass
class Group:
    """Runs whose batch sizes cannot differ.

    Attributes:
        runs: at least one.
        rows: the predictions, one for each GPU and mode.
        problem: why there are none; empty where there are.
    """

    runs: list[PlannedRun]
    rows: list[Row] = field(default_factory=list)
    problem: str = ""

    def values(self, key: str) -> set[str]:
        """The values of a swept key."""
        return {run.combination.values[key] for run in self.runs}

    def sizes(self, gpu: Gpu) -> dict[Mode, Row]:
        """The predictions for one GPU."""
        return {row.mode: row for row in self.rows if row.device == gpu.name}

    def fits(self, gpu: Gpu) -> bool:
        """Whether a size is predicted to fit in each mode."""
        return all(row.batch_size is not None for row in self.sizes(gpu).values())


def check_predictions(
    runs: Sequence[PlannedRun], gpus: Sequence[Gpu], console: Console, *, world_size: int = 1
) -> None:
    """Show the batch sizes that are predicted for each group of runs.

    Args:
        runs: of the sweep.
        gpus: that the runs may be given.
        console: shows the table.
        world_size: processes of each run.

    Raises:
        AutoBatchError: for some runs nothing is predicted to fit on any of the GPUs.
    """
    groups = groups_of(runs)
    world = World(META, world_size=world_size, local_world_size=world_size)
    with StatusLine(console) as line:
        for number, group in enumerate(groups, start=1):
            title = f"predicting batch sizes, group {number} of {len(groups)}"
            logger.info("%s (%s)", title, counted(len(group.runs), "run"))
            _predict(group, gpus, world, line, title, console)
            gc.collect()
    names = _names(groups)
    console.print(_table(groups, names, gpus))
    _judge(groups, names, gpus)


def groups_of(runs: Sequence[PlannedRun]) -> list[Group]:
    """The runs, grouped by the swept values that their sizes may depend on, in their order."""
    groups: dict[tuple[str, ...], Group] = {}
    for run in runs:
        values = run.combination.values.items()
        key = tuple(value for name, value in values if not name.startswith(_WITHOUT_MEMORY))
        groups.setdefault(key, Group([])).runs.append(run)
    return list(groups.values())


def _predict(
    group: Group, gpus: Sequence[Gpu], world: World, line: StatusLine, title: str, console: Console
) -> None:
    config = group.runs[0].config
    status = RankStatus(lambda text: line.update(f"{title}: {text}"))
    try:
        status.update("building")
        data = build_data(config.DATA, seed=config.EXPERIMENT.SEED)
        search = build_on_meta(Setup(config, data, world, status, console))
        for mode in MODES:
            status.update(f"tracing {mode}")
            step = predicted_step(search, mode, ASSUMED_BASE_BYTES)
            group.rows += [_row(group.runs[0], step, gpu) for gpu in gpus]
    except LinnaeusError as error:  # the run itself says it better, if it is a mistake
        group.problem = " ".join(str(error).split())


def _row(run: PlannedRun, step: PredictedStep, gpu: Gpu) -> Row:
    """The size that a search would find, or what is known of the one that is configured."""
    data, is_train = run.config.DATA, step.mode == "train"
    autobatch = data.AUTOBATCH
    is_searched, fraction, size = (
        (autobatch.ENABLED, autobatch.TARGET_MEMORY_FRACTION, data.BATCH_SIZE)
        if is_train
        else (autobatch.ENABLED_VAL, autobatch.TARGET_MEMORY_FRACTION_VAL, data.BATCH_SIZE_VAL)
    )
    fraction = fraction if is_searched else 1.0
    row = Row(step.mode, fraction, device=gpu.name, device_bytes=gpu.total_bytes)
    if is_searched:
        fill(row, step, autobatch.MEMORY_LIMIT_GB)
        return row
    need, safe = step.prediction.peak_bytes(size), step.prediction.safe_bytes(size)
    if need <= gpu.total_bytes:
        row.batch_size, row.peak_bytes = size, need
        row.safe_batch_size = size if safe <= gpu.total_bytes else None
    else:
        key = f"DATA.BATCH_SIZE{'' if is_train else '_VAL'}"
        row.reason = (
            f"{key} is {size}, which is predicted to take {need / GIB:.2f} GiB; {gpu.name} has "
            f"{gpu.total_bytes / GIB:.2f} GiB"
        )
    return row


def _names(groups: Sequence[Group]) -> list[str]:
    """What tells the groups apart: the swept keys that have one value in each."""
    keys = [
        key
        for key in groups[0].runs[0].combination.values
        if all(len(group.values(key)) == 1 for group in groups)
        and len({value for group in groups for value in group.values(key)}) > 1
    ]
    short = short_names(keys)
    return [", ".join(f"{short[key]}={min(group.values(key))}" for key in keys) or "all" for group in groups]


def _table(groups: Sequence[Group], names: Sequence[str], gpus: Sequence[Gpu]) -> Table:
    table = Table(title="Predicted batch sizes", title_justify="left")
    for heading in ("runs", "number", "GPU", "training", "validation"):
        table.add_column(heading, overflow="fold")
    for group, name in zip(groups, names, strict=True):
        for gpu in gpus:
            sizes = group.sizes(gpu)
            cells = [_cell(sizes.get(mode)) for mode in MODES]
            table.add_row(name, str(len(group.runs)), gpu.name, *cells)
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return "not predicted"
    if row.batch_size is None:
        return "none fits"
    safe = row.safe_batch_size
    return str(safe) if safe is not None else f"{row.batch_size} (without margin)"


def _judge(groups: Sequence[Group], names: Sequence[str], gpus: Sequence[Gpu]) -> None:
    """Warn of what may not fit, and refuse what fits nowhere."""
    nowhere = []
    for group, name in zip(groups, names, strict=True):
        if group.problem:
            logger.warning("%s: batch sizes are not predicted: %s", name, group.problem)
            continue
        failing = [gpu for gpu in gpus if not group.fits(gpu)]
        if len(failing) == len(gpus):
            reason = next(row.reason for row in group.rows if row.batch_size is None) or "no batch size fits"
            nowhere.append(f"  - {name} ({counted(len(group.runs), 'run')}): {reason}")
        elif failing:
            logger.warning(
                "%s: nothing is predicted to fit on %s", name, ", ".join(gpu.name for gpu in failing)
            )
    if nowhere:
        raise AutoBatchError(
            "no run was started: nothing is predicted to fit for\n"
            + "\n".join(nowhere)
            + "\nLeave these values "
            "out of the sweep, name a larger GPU, or leave --predict-gpu out to try them all the same."
        )
