"""The largest size that fits, and the speed of a few sizes up to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from linnaeus.autobatch.find import BatchSizeFinder
from linnaeus.autobatch.protocol import Status
from linnaeus.autobatch.result import AutoBatchResult, Timing
from linnaeus.autobatch.search import Candidates
from linnaeus.autobatch.sizes import SizeSearch
from linnaeus.autobatch.throughput import rungs
from linnaeus.batching.facts import Facts
from linnaeus.batching.plan import plan_batches
from linnaeus.commands.plan.results import Plan, Row
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError


@dataclass(frozen=True)
class Measuring:
    """What is timed, and where the figures go.

    Attributes:
        config: configuration of the run.
        facts: what its batch plan depends on.
        plan: takes the rows as they are measured.
        on_row: called with each row.
    """

    config: Config
    facts: Facts
    plan: Plan
    on_row: Callable[[Row], None]

    def run(self, search: SizeSearch, sizes: Sequence[int] | None, status: Status) -> None:
        """Find the largest size, and time it and others.

        Args:
            search: the run's own training step, data and bounds.
            sizes: those to be timed; None chooses.
            status: told what is being tried.

        Raises:
            AutoBatchError: nothing fits.
        """
        config = self.config.DATA.AUTOBATCH
        with search.finder("train", status) as finder:
            largest = finder.find(
                config.TARGET_MEMORY_FRACTION, strategy=config.STRATEGY, max_trials=config.MAX_TRIALS,
                timeout_minutes=config.TIMEOUT_MINUTES,
            )  # fmt: skip
            self.plan.search = largest.as_dict()
            if sizes is None:
                timings = finder.prefer_throughput(largest, timeout_minutes=config.TIMEOUT_MINUTES).timings
                known = {timing.batch_size: timing for timing in timings}
                chosen = self._ladder(finder, largest) | known.keys()
            else:
                known, chosen = {}, self._allowed(finder, largest, sizes)
            for size in sorted(chosen, reverse=True):
                self._add(finder, size, known)

    def _ladder(self, finder: BatchSizeFinder, largest: AutoBatchResult) -> set[int]:
        """The largest size and the powers of two below it."""
        multiple_of = self.config.DATA.AUTOBATCH.MULTIPLE_OF
        candidates = list(Candidates(finder.min_size, largest.batch_size, multiple_of))
        return {largest.batch_size, *rungs(candidates)}

    def _allowed(self, finder: BatchSizeFinder, largest: AutoBatchResult, sizes: Sequence[int]) -> set[int]:
        """Those of the sizes that can be timed, and the largest; the others are left out with the reason."""
        for size in sizes:
            if size > largest.batch_size:
                self.plan.left_out[size] = (
                    f"above {largest.batch_size}, the largest that was found to fit "
                    f"(limited by {largest.limited_by})"
                )
            elif size < finder.min_size:
                self.plan.left_out[size] = f"below {finder.min_size}, the smallest that training can take"
        return {largest.batch_size, *(set(sizes) - self.plan.left_out.keys())}

    def _add(self, finder: BatchSizeFinder, size: int, known: dict[int, Timing]) -> None:
        """Time what training would make of a size, unless that has been done."""
        sizes = self._sizes_of_run(size)
        micro_batch_size = sizes["batch_size"]
        if any(row.batch_size == micro_batch_size for row in self.plan.rows):
            return
        timing = known.get(micro_batch_size) or finder.time(micro_batch_size)
        if not math.isfinite(timing.seconds_per_step):
            self.plan.left_out[micro_batch_size] = "does not fit any more; something else takes memory now"
            return
        row = Row(self.plan.goal, samples_per_s_each=timing.samples_per_s, **sizes)
        self.plan.rows = sorted([*self.plan.rows, row], key=lambda other: other.batch_size)
        self.on_row(row)

    def _sizes_of_run(self, size: int) -> dict[str, Any]:
        """The fields of a row that the batch plan gives."""
        config, facts = self.config, replace(self.facts, max_micro_batch_size=size)
        try:
            found = plan_batches(config.TRAIN, config.OPTIMIZER, config.SCHEDULE, facts)
        except ConfigError as error:
            steps = config.TRAIN.ACCUMULATION_STEPS
            return {"batch_size": size, "accumulation_steps": steps, "warnings": tuple(error.problems)}
        return {
            "batch_size": found.micro_batch_size,
            "accumulation_steps": found.accumulation_steps,
            "learning_rate": found.learning_rate,
            "warmup_steps": found.warmup_steps,
            "total_steps": found.total_steps,
            "warnings": found.warnings,
        }
