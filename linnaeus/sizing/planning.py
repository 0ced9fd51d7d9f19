"""The batch sizes of a training run: searched for or taken from its checkpoint, then planned and tried."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.batching.plan import BatchPlan
from linnaeus.config.schema import DataConfig
from linnaeus.dist import World
from linnaeus.sizing.sizes import SizeSearch, find_sizes
from linnaeus.training.out_of_memory import SizeOrigin
from linnaeus.words import counted

logger = logging.getLogger("linnaeus.run")


@dataclass(frozen=True)
class PlannedSizes:
    """The batch sizes of a run and the plan that follows from them.

    Attributes:
        found: what AutoBatch found, for each mode that it is enabled for.
        micro_batch_limit: most samples of a micro-batch, where an earlier attempt ran out of memory with
            more; else None. The plan observes it.
    """

    found: dict[str, AutoBatchResult]
    plan: BatchPlan
    micro_batch_limit: int | None = None

    def origins(self, data: DataConfig) -> dict[str, SizeOrigin]:
        """Where the batch sizes of training and validation come from; `data` holds those in use."""
        return {mode: size_origin(mode, data, self.found.get(mode)) for mode in get_args(Mode)}

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The sizes found, by mode."""
        return {mode: result.batch_size for mode, result in self.found.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        found = {mode: result.as_dict() for mode, result in self.found.items()}
        return {
            "autobatch": found, "plan": self.plan.as_dict(), "micro_batch_limit": self.micro_batch_limit
        }  # fmt: skip


_SUFFIXES: dict[Mode, str] = {"train": "", "val": "_VAL"}
_NAMES: dict[Mode, str] = {"train": "training", "val": "validation"}


def size_origin(mode: Mode, data: DataConfig, found: AutoBatchResult | None) -> SizeOrigin:
    """Where a batch size comes from.

    Args:
        mode: of the size.
        data: holds the sizes in use.
        found: what AutoBatch found for the mode; None where it did not search.
    """
    return _configured_origin(mode, data) if found is None else _found_origin(found)


def _found_origin(result: AutoBatchResult) -> SizeOrigin:
    fraction_key = f"DATA.AUTOBATCH.TARGET_MEMORY_FRACTION{_SUFFIXES[result.mode]}"
    fraction, total_gib = result.target_memory_fraction, result.total_bytes / GIB
    return SizeOrigin(
        result.batch_size,
        f"AutoBatch found {result.batch_size} within a budget of {result.budget_bytes / GIB:.2f} GiB "
        f"({fraction:g} of {total_gib:.2f} GiB, less what was in use elsewhere then)",
        key=f"DATA.AUTOBATCH.MAX_BATCH_SIZE{_SUFFIXES[result.mode]}",
        # Where memory was not the limit, a little less of it gives the same size.
        alternatives=(f"{fraction_key} below {fraction:g}",) if result.limited_by == "memory" else (),
    )


def _configured_origin(mode: Mode, data: DataConfig) -> SizeOrigin:
    suffix = _SUFFIXES[mode]
    return SizeOrigin(
        getattr(data, f"BATCH_SIZE{suffix}"),
        f"The size is DATA.BATCH_SIZE{suffix}, AutoBatch is off for {_NAMES[mode]}",
        key=f"DATA.BATCH_SIZE{suffix}",
        alternatives=(f"DATA.AUTOBATCH.ENABLED{suffix} True",),
    )


def find_planned_sizes(
    search: SizeSearch,
    plan_for: Callable[[int], BatchPlan],
    checkpoint: Mapping[str, Any] | None = None,
) -> PlannedSizes:
    """Find the batch sizes, make the plan, and run the planned micro-batch sizes that have not run yet.

    With several ranks, a size has run when every rank has run it: rank 0's search is not enough. If a planned
    size does not fit, the size found is lowered and the plan made again. Every rank must call this.

    Args:
        search: the search of this run.
        plan_for: makes the plan for a largest micro-batch size.
        checkpoint: checkpoint of the run being resumed. Its sizes are tried first, and no larger one is.

    Raises:
        LinnaeusError: the same on every rank.
    """
    autobatch, content = search.config.AUTOBATCH, checkpoint or {}
    earlier = {
        mode: AutoBatchResult.from_dict(mode, entry) for mode, entry in content.get("autobatch", {}).items()
    }
    sizes = {mode: result.batch_size for mode, result in earlier.items()}
    limit = content.get("micro_batch_limit")
    if limit is not None and autobatch.ENABLED:
        # Without an earlier size there is nothing to split: the search finds what fits.
        limit = min(limit, autobatch.MAX_BATCH_SIZE or limit) if "train" in earlier else None
    if limit is not None:
        logger.info("memory ran out before: micro-batches have at most %s", counted(limit, "sample"))
        # Training's size only gives the effective batch: its micro-batches are smaller.
        kept = {"train": earlier["train"]} if autobatch.ENABLED else {}
        plan = plan_for(kept["train"].batch_size if kept else search.config.BATCH_SIZE).limited(limit)
        largest = max(stage.micro_batch_size for stage in plan.stages)
        without_train = dataclasses.replace(autobatch, ENABLED=False)
        config = dataclasses.replace(search.config, AUTOBATCH=without_train, BATCH_SIZE=largest)
        found = kept | find_sizes(dataclasses.replace(search, config=config), sizes)
    else:
        found = find_sizes(search, sizes)
        if "train" in found:
            found["train"], plan = _planned(search, found["train"], plan_for)
        else:
            plan = plan_for(search.config.BATCH_SIZE)
    return PlannedSizes(found, plan, limit)


def _planned(
    search: SizeSearch, result: AutoBatchResult, plan_for: Callable[[int], BatchPlan]
) -> tuple[AutoBatchResult, BatchPlan]:
    """A training size, lowered until all micro-batch sizes of its plan have run; and that plan."""
    while True:
        plan = plan_for(result.batch_size)
        untried = {stage.micro_batch_size for stage in plan.stages} - _sizes_run(result, search.world)
        if not untried:
            return result, plan
        with search.on_ranks("train") as search_all:
            result = search_all(found=result, size=max(untried))


def _sizes_run(result: AutoBatchResult, world: World) -> set[int]:
    """The sizes that have run, and fit, on every rank."""
    if world.is_distributed:
        return set(result.ran_on_every_rank)
    # The newest trial of a size decides: one that fitted first may have failed to confirm.
    fits = {trial.size: trial.status == "fits" for trial in result.trials}
    return {size for size, fitted in fits.items() if fitted}
