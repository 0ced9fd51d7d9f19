"""The batch sizes of a training run: searched for or taken from its checkpoint, then planned and tried."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from rich.console import Console

from linnaeus.autobatch.errors import AutoBatchError, TooSmallError
from linnaeus.autobatch.memory.device import GIB
from linnaeus.autobatch.result import AutoBatchResult, Mode
from linnaeus.batch_plan.effective_batch import max_samples_per_rank
from linnaeus.batch_plan.plan import BatchPlan, plan_batches
from linnaeus.config.schema import Config, DataConfig
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.models.build import set_gradient_checkpointing
from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.words import counted
from linnaeus.size_search.searches import SizeSearch, find_sizes
from linnaeus.training.build import Assembly, plan_facts
from linnaeus.training.out_of_memory import SizeOrigin
from linnaeus.training.sharding import check_sharding

_REMEDIES: dict[str, tuple[str, str, Any]] = {
    "checkpointing": ("TRAIN", "GRADIENT_CHECKPOINTING", True),
    "shard": ("DIST", "SHARDING", "full"),
}

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
            "autobatch": found,
            "plan": self.plan.as_dict(),
            "micro_batch_limit": self.micro_batch_limit,
        }


def size_origin(mode: Mode, data: DataConfig, found: AutoBatchResult | None) -> SizeOrigin:
    """Where a batch size comes from.

    Args:
        mode: of the size.
        data: holds the sizes in use.
        found: what AutoBatch found for the mode; None where it did not search.
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
        f"({fraction:g} of {found.total_bytes / GIB:.2f} GiB, less what was in use elsewhere then)",
        key=f"DATA.AUTOBATCH.MAX_BATCH_SIZE{suffix}",
        # Where memory was not the limit, a little less of it gives the same size.
        alternatives=(f"{fraction_key} below {fraction:g}",)
        if found.limited_by == "memory"
        else (),
    )


def size_search(
    config: Config, data: DataBundle, assembly: Assembly, world: World, console: Console
) -> tuple[SizeSearch, Callable[[int], BatchPlan]]:
    """The search for batch sizes, and what makes the batch plan for a largest micro-batch size."""
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
    # Without an earlier size there is nothing to split: the search finds what fits.
    if limit is None or (search.config.AUTOBATCH.ENABLED and "train" not in earlier):
        found = find_sizes(search, sizes)
        if "train" in found:
            found["train"], plan = _planned(search, found["train"], plan_for)
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
    return PlannedSizes(found, plan_for(batch_size).limited(limit), limit)


def _planned(
    search: SizeSearch, result: AutoBatchResult, plan_for: Callable[[int], BatchPlan]
) -> tuple[AutoBatchResult, BatchPlan]:
    """A training size, lowered until all micro-batch sizes of its plan have run; and that plan."""
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


class Ladder:
    """Switches on one remedy of `DATA.AUTOBATCH.FIT` more in `config` while the wanted size does not fit.

    A resumed run has those of its checkpoint and no others.
    """

    def __init__(self, config: Config, world: World, checkpoint: Mapping[str, Any] | None) -> None:
        names = config.DATA.AUTOBATCH.FIT if config.DATA.AUTOBATCH.ENABLED else ["none"]
        names = names if checkpoint is None else names[:1]
        if "shard" in names and not world.is_distributed:
            raise ConfigError(
                "DATA.AUTOBATCH.FIT: shard needs several processes, as torchrun starts them"
            )
        check_sharding(_with_remedies(config, names).DIST, config.TRAIN, world)
        self._tried = [*(checkpoint or {}).get("autobatch", {}).get("train", {}).get("fit", ())]
        self._is_listed, self.is_done = checkpoint is None and names != ["none"], False
        self._rival: tuple[float, str, Config] | None = (
            None  # samples per second, without checkpointing
        )
        self._name, *self._left = names
        earlier = [entry["remedy"] for entry in self._tried]  # the last one was in use
        self.config = _with_remedies(
            config, earlier[: earlier.index(earlier[-1]) + 1] if earlier else names[:1]
        )

    @contextmanager
    def attempt(self, search: SizeSearch) -> Iterator[SizeSearch]:
        """The search of `config`; a `TooSmallError` switches on the next remedy instead of ending the run."""
        if "checkpointing" in self._left:
            set_gradient_checkpointing(
                search.assembly.model
            )  # a model without it raises before the search
            set_gradient_checkpointing(search.assembly.model, enable=False)
        smallest = search.config.AUTOBATCH.MIN_BATCH_SIZE
        wanted = smallest if smallest > 1 else search.max_samples_per_rank or 1
        if self._is_listed:
            self._tried.append({"remedy": self._name, "batch_size": None, "wanted": wanted})
        try:
            yield dataclasses.replace(search, wanted=wanted if self._left else None)
        except TooSmallError as error:
            self._tried[-1]["batch_size"] = error.largest
            self._go_on(f"{wanted} samples do not fit ({str(error).partition('. ')[0]})")
        except AutoBatchError as error:
            tried = ", ".join(entry["remedy"] for entry in self._tried)
            error.args = (
                f"{error} DATA.AUTOBATCH.FIT has tried {tried}." if tried else str(error),
            )
            raise

    def noted(self, sized: PlannedSizes) -> PlannedSizes:
        """The sizes, with what was tried. They end the attempts, unless checkpointing may be faster."""
        self.is_done = True
        if self._tried and (result := sized.found.get("train")) is not None:
            speeds = {timing.batch_size: timing.samples_per_s for timing in result.timings}
            speed = speeds.get(result.batch_size, 0.0)
            self._tried[-1] |= {
                "batch_size": result.batch_size,
                **({"samples_per_s": speed} if speed else {}),
            }
            if self._rival is not None and self._rival[0] >= speed:
                (before, self._name, self.config), self._rival, self._left = self._rival, None, []
                self.is_done = False
                logger.info(
                    "AutoBatch: %.4g samples per second, %.4g without checkpointing", speed, before
                )
            elif speed and self._left[:1] == ["checkpointing"]:
                self._rival, self.is_done = (speed, self._name, self.config), False
                self._go_on(f"to compare with {speed:.4g} samples per second")
            sized.found["train"] = dataclasses.replace(result, fit=tuple(self._tried))
        return sized

    def _go_on(self, why: str) -> None:
        self._name, *self._left = self._left
        self.config = _with_remedies(self.config, [self._name])
        setting = "{}.{} {}".format(*_REMEDIES[self._name])
        logger.info("AutoBatch: %s: %s (DATA.AUTOBATCH.FIT)", why, setting)


def _with_remedies(config: Config, remedies: Iterable[str]) -> Config:
    for node, key, value in (_REMEDIES[name] for name in remedies if name != "none"):
        changed: dict[str, Any] = {node: dataclasses.replace(getattr(config, node), **{key: value})}
        config = dataclasses.replace(config, **changed)
    return config
