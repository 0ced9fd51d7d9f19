"""Batch sizes of a sweep for GPUs that need not be here, predicted before anything is started."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from linnaeus.autobatch.predict.gpus import Gpu
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.cli.analyze.measure import Setup
from linnaeus.cli.analyze.options import Options
from linnaeus.cli.analyze.predict import META, predict_sizes
from linnaeus.cli.analyze.results import Analysis, Row
from linnaeus.cli.analyze.show import sizes_table
from linnaeus.config.schema import Config, DataConfig
from linnaeus.data.datasets import build_data
from linnaeus.runtime.console import StatusLine
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import AutoBatchError, LinnaeusError
from linnaeus.runtime.words import counted
from linnaeus.sweep.folder import Plan
from linnaeus.sweep.grid import title_of

_WITHOUT_MEMORY = ("EXPERIMENT.", "SCHEDULE.", "OPTIMIZER.LR", "OPTIMIZER.lr")
"""How the keys begin that no step's memory depends on, and that are swept most."""
logger = logging.getLogger("linnaeus.sweep")


def check_predictions(
    plans: Sequence[Plan], gpus: Sequence[Gpu], console: Console, *, world_size: int = 1
) -> None:
    """Show the batch sizes that are predicted for each group of runs whose sizes cannot differ.

    Raises:
        AutoBatchError: for some runs nothing is predicted to fit on any of the GPUs.
    """
    nowhere = []
    for name, group in groups_of(plans).items():
        title, analysis = f"{name} ({counted(len(group), 'run')})", Analysis()
        config = replace(group[0], DATA=_up_to_configured(group[0].DATA))
        autobatch = config.DATA.AUTOBATCH
        fraction = autobatch.TARGET_MEMORY_FRACTION if autobatch.ENABLED else 1.0
        options = Options(fractions=[fraction], world_size=[world_size])
        try:
            with StatusLine(console) as line:
                data = build_data(config.DATA, seed=config.EXPERIMENT.SEED)
                setup = Setup(config, data, World(META), RankStatus(line.update), console)
                predict_sizes(gpus, setup, options, analysis)
        except LinnaeusError as error:  # the run itself says it better, if it is a mistake
            logger.warning(
                "%s: batch sizes are not predicted: %s", title, " ".join(str(error).split())
            )
            continue
        finally:
            gc.collect()
        table = sizes_table(analysis)
        table.title = title
        console.print(table)
        reasons: dict[str, str] = {}
        for row in analysis.rows:
            if (reason := _why_not(row, config.DATA)) is not None:
                reasons.setdefault(row.device, reason)
        if len(reasons) == len(gpus):
            nowhere.append(f"  - {title}: {reasons[gpus[0].name]}")
        elif reasons:
            logger.warning("%s: nothing is predicted to fit on %s", title, ", ".join(reasons))
    if nowhere:
        raise AutoBatchError(
            "no run was started: nothing is predicted to fit for\n"
            + "\n".join(nowhere)
            + "\nLeave these "
            "values out of the sweep, name a larger GPU, or leave --predict-gpu out to try them all the same."
        )


def groups_of(plans: Sequence[Plan]) -> dict[str, list[Config]]:
    """The configurations, in their order, by the swept values that their sizes may depend on."""
    groups: dict[str, list[Config]] = {}
    for point, config in plans:
        kept = {
            key: text for key, text in point.values.items() if not key.startswith(_WITHOUT_MEMORY)
        }
        groups.setdefault(title_of(kept) or "all", []).append(config)
    return groups


def _up_to_configured(data: DataConfig) -> DataConfig:
    """The node, with each size that is not searched as the bound of the sizes that are predicted."""
    autobatch = data.AUTOBATCH
    if not autobatch.ENABLED:
        autobatch = replace(
            autobatch, MIN_BATCH_SIZE=1, MAX_BATCH_SIZE=data.BATCH_SIZE, MULTIPLE_OF=1
        )
    if not autobatch.ENABLED_VAL:
        autobatch = replace(autobatch, MIN_BATCH_SIZE_VAL=1, MAX_BATCH_SIZE_VAL=data.BATCH_SIZE_VAL)
    return replace(data, AUTOBATCH=autobatch)


def _why_not(row: Row, data: DataConfig) -> str | None:
    """Why a run does not fit on the row's GPU; None where it does."""
    suffix = "" if row.mode == "train" else "_VAL"
    if (
        row.batch_size is None
        or getattr(data.AUTOBATCH, f"ENABLED{suffix}")
        or row.limited_by != "memory"
    ):
        return row.reason
    size = getattr(data, f"BATCH_SIZE{suffix}")
    return f"DATA.BATCH_SIZE{suffix} is {size}; at most {row.batch_size} is predicted to fit on {row.device}"
