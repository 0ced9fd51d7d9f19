"""The batch sizes of a training run: searched for or taken from its checkpoint, then planned and tried."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

from rich.console import Console

from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.batch_plan.effective_batch import max_samples_per_rank
from linnaeus.batch_plan.plan import BatchPlan, plan_batches
from linnaeus.config.schema import Config, DataConfig
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.runtime.distributed import World
from linnaeus.runtime.words import counted
from linnaeus.size_search.report import summary
from linnaeus.size_search.searches import SizeSearch, find_size, find_sizes
from linnaeus.training.build import Assembly, plan_facts
from linnaeus.training.out_of_memory import SizeOrigin
from linnaeus.training.report import report_plan

logger = logging.getLogger("linnaeus.run")


@dataclass(frozen=True)
class PlannedSizes:
    """The batch sizes of a run and the plan that follows from them.

    Attributes:
        found: AutoBatch's result for each mode that it is enabled for.
        micro_batch_limit: most samples of a micro-batch, where an earlier attempt ran out of memory with
            more; else None. The plan observes it.
        sides: AutoBatch's result for each side of DATA.IMG_SIZE_SCHEDULE.
    """

    found: dict[str, AutoBatchResult]
    plan: BatchPlan
    micro_batch_limit: int | None = None
    sides: dict[int, AutoBatchResult] = field(default_factory=dict)

    def origins(self, data: DataConfig) -> dict[str, SizeOrigin]:
        """Where the batch sizes of training and validation come from; `data` holds those in use."""
        return {mode: size_origin(mode, data, self.found.get(mode)) for mode in get_args(Mode)}

    def report(self, config: Config) -> None:
        """Log the sizes found, and the plan."""
        if self.sides:
            sizes = (f"{found.batch_size} at {side}" for side, found in self.sides.items())
            logger.info("AutoBatch train: batch size by side of the images: %s", ", ".join(sizes))
        for found in self.found.values():
            logger.info(summary(found))
        report_plan(self.plan, config.TRAIN, config.OPTIMIZER)

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The sizes found, by mode."""
        return {mode: result.batch_size for mode, result in self.found.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        found = {mode: result.as_dict() for mode, result in self.found.items()}
        return {
            "autobatch": found,
            "sides": {side: result.as_dict() for side, result in self.sides.items()},
            "plan": self.plan.as_dict(),
            "num_samples": self.plan.num_samples,
            "micro_batch_limit": self.micro_batch_limit,
        }


def size_origin(mode: Mode, data: DataConfig, found: AutoBatchResult | None) -> SizeOrigin:
    """Return the origin of a batch size.

    Args:
        mode: of the size.
        data: holds the sizes in use.
        found: AutoBatch's result for the mode; None where it did not search.
    """
    suffix = "_VAL" if mode == "val" else ""
    if found is None:
        step = "training" if mode == "train" else "validation"
        return SizeOrigin(
            getattr(data, f"BATCH_SIZE{suffix}"),
            f"The size is DATA.BATCH_SIZE{suffix}, AutoBatch is off for {step}",
            key=f"DATA.BATCH_SIZE{suffix}",
            alternatives=(f"DATA.AUTOBATCH.ENABLED{suffix} True",),
        )
    fraction_key, fraction = (
        f"DATA.AUTOBATCH.TARGET_MEMORY_FRACTION{suffix}",
        found.target_memory_fraction,
    )
    return SizeOrigin(
        found.batch_size,
        f"AutoBatch found {found.batch_size} within a budget of {found.budget_bytes / GIB:.2f} GiB "
        f"({fraction:g} of {found.total_bytes / GIB:.2f} GiB, minus memory used elsewhere at that time)",
        key=f"DATA.AUTOBATCH.MAX_BATCH_SIZE{suffix}",
        # Where memory was not the limit, a little less of it gives the same size.
        alternatives=(f"{fraction_key} below {fraction:g}",)
        if found.limited_by == "memory"
        else (),
    )


def prepare_search(
    config: Config, data: DataBundle, assembly: Assembly, world: World, console: Console
) -> tuple[SizeSearch, Callable[[int], BatchPlan]]:
    """Return the search of a run, and a function from a largest micro-batch size to the batch plan."""
    train, autobatch, num_samples = config.TRAIN, config.DATA.AUTOBATCH, dataset_length(data.train)
    largest = (
        autobatch.MAX_BATCH_SIZE or num_samples if autobatch.ENABLED else config.DATA.BATCH_SIZE
    )
    sizes = {
        "max_micro_batch_size": largest,
        "world_size": world.world_size,
        "num_samples": num_samples,
        "min_steps_per_epoch": autobatch.MIN_STEPS_PER_EPOCH,
    }
    facts = plan_facts(assembly, config.MODEL, train, **sizes)
    search = SizeSearch(
        config.DATA,
        train,
        data,
        assembly,
        world,
        config.EXPERIMENT.SEED,
        max_samples_per_rank=max_samples_per_rank(train, facts),
        find_unused_parameters=config.DIST.FIND_UNUSED_PARAMETERS,
        console=console if world.is_main else None,
    )

    def plan_for(size: int) -> BatchPlan:
        key, can_grow = "BATCH_SIZE", True
        if autobatch.ENABLED:
            bound = "MIN" if size <= autobatch.MIN_BATCH_SIZE else "MAX"
            key, can_grow = f"AUTOBATCH.{bound}_BATCH_SIZE", size == autobatch.MAX_BATCH_SIZE
        fitting = dataclasses.replace(
            facts, max_micro_batch_size=size, batch_size_key=f"DATA.{key}", can_grow=can_grow
        )
        return plan_batches(train, config.OPTIMIZER, config.SCHEDULE, fitting)

    return search, plan_for


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
    content, batch_size = checkpoint or {}, search.config.BATCH_SIZE
    earlier = {
        mode: AutoBatchResult.from_dict(mode, entry)
        for mode, entry in content.get("autobatch", {}).items()
    }
    sizes = {mode: result.batch_size for mode, result in earlier.items()}
    limit = content.get("micro_batch_limit")
    # Without an earlier size there is nothing to split: the search finds the maximum.
    if limit is None or (search.config.AUTOBATCH.ENABLED and "train" not in earlier):
        found = find_sizes(search, sizes)
        if "train" in found:
            found["train"], plan = _confirmed(search, found["train"], plan_for)
            sides, plan = _with_sides(search, found["train"], plan, content.get("sides", {}))
            return PlannedSizes(found, plan, sides=sides)
        else:
            plan = plan_for(batch_size)
        return PlannedSizes(found, plan)
    logger.info("memory ran out before: micro-batches have at most %s", counted(limit, "sample"))
    config = dataclasses.replace(search.config, BATCH_SIZE=min(batch_size, limit))
    found = find_sizes(dataclasses.replace(search, config=config), {**sizes, "train": limit})
    if "train" in found:  # the size of the checkpoint only gives the effective batch
        limit, batch_size, found["train"] = (
            found["train"].batch_size,
            sizes["train"],
            earlier["train"],
        )
    return PlannedSizes(found, plan_for(batch_size).with_max_micro_batch(limit), limit)


def _with_sides(
    search: SizeSearch, result: AutoBatchResult, plan: BatchPlan, earlier: Mapping[int, Any]
) -> tuple[dict[int, AutoBatchResult], BatchPlan]:
    """Find the micro-batch size of each further side, within the effective batch, for its epochs.

    Args:
        search: of the last side.
        result: of the last side.
        plan: with the micro-batch size of the last side.
        earlier: entry of each side in the checkpoint of the run being resumed.
    """
    sides, epochs = dict[int, AutoBatchResult](), list(plan.epochs)
    most = max(stage.samples_per_rank for stage in plan.stages)
    for resized, following in pairwise(search.data.resized):
        data = dataclasses.replace(search.data, train=resized.dataset)
        at_side = dataclasses.replace(
            search, data=data, max_samples_per_rank=most, wanted=None, _progress={}
        )
        own = slice(resized.start, following.start)

        def plan_for(size: int, own: slice = own) -> BatchPlan:
            stages = ([each.with_micro_batch(size) for each in epoch] for epoch in plan.epochs[own])
            return dataclasses.replace(plan, epochs=tuple(map(tuple, stages)))

        logger.info("AutoBatch train: images of side %d", resized.side)
        found = find_size(at_side, "train", earlier.get(resized.side, {}).get("batch_size"))
        sides[resized.side], part = _confirmed(at_side, found, plan_for)
        epochs[own] = part.epochs
    if sides:
        sides[search.data.resized[-1].side] = result
    return sides, dataclasses.replace(plan, epochs=tuple(epochs))


def _confirmed(
    search: SizeSearch, result: AutoBatchResult, plan_for: Callable[[int], BatchPlan]
) -> tuple[AutoBatchResult, BatchPlan]:
    """Lower a training size until all micro-batch sizes of its plan have run; return both."""
    while True:
        plan = plan_for(result.batch_size)
        untried = {stage.micro_batch_size for stage in plan.stages} - _sizes_run(
            result, search.world
        )
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
