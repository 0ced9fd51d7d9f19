"""The largest size that fits, and the speed of a few sizes up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from linnaeus.autobatch.finder import BatchSizeFinder
from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.autobatch.result import AutoBatchResult
from linnaeus.autobatch.search import Candidates
from linnaeus.autobatch.throughput import rungs
from linnaeus.batching.facts import Facts
from linnaeus.batching.plan import plan_batches
from linnaeus.cli.measure import Speeds, find_largest
from linnaeus.cli.plan.results import Plan, Row
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.sizing.sizes import SizeSearch


@dataclass(frozen=True)
class Measuring:
    """Times sizes for a plan.

    Attributes:
        config: of the run that is planned.
        facts: what its batch plan depends on.
        plan: takes the rows as they are measured.
    """

    config: Config
    facts: Facts
    plan: Plan

    def run(self, search: SizeSearch, sizes: Sequence[int] | None, status: RankStatus) -> None:
        """Find the largest size, and time it and others.

        Args:
            search: training step, data and bounds of the run that is planned.
            sizes: those to be timed; None for powers of two and those around the knee.
            status: told what is being tried.

        Raises:
            AutoBatchError: nothing fits.
        """
        config = self.config.DATA.AUTOBATCH
        with search.finder("train", status) as finder:
            largest = find_largest(finder, config.TARGET_MEMORY_FRACTION)
            self.plan.search = largest.as_dict()
            speeds = Speeds()
            if sizes is None:
                timings = speeds.find_knee(finder, largest, config.TIMEOUT_MINUTES).timings
                candidates = list(Candidates(finder.min_size, largest.batch_size, config.MULTIPLE_OF))
                chosen = {largest.batch_size, *rungs(candidates), *(timing.batch_size for timing in timings)}
            else:
                chosen = self._allowed(finder, largest, sizes)
            for size in sorted(chosen, reverse=True):
                self._add(finder, size, speeds)

    def _allowed(self, finder: BatchSizeFinder, largest: AutoBatchResult, sizes: Sequence[int]) -> set[int]:
        """The sizes that can be timed, and the largest; the others are left out, with the reason."""
        for size in sizes:
            if size > largest.batch_size:
                self.plan.left_out[size] = (
                    f"above {largest.batch_size}, the largest that was found to fit "
                    f"(limited by {largest.limited_by})"
                )
            elif size < finder.min_size:
                self.plan.left_out[size] = f"below {finder.min_size}, the smallest that training can take"
        return {largest.batch_size, *(set(sizes) - self.plan.left_out.keys())}

    def _add(self, finder: BatchSizeFinder, size: int, speeds: Speeds) -> None:
        """Add a row for the micro-batch size that training would choose if this is the largest that fits."""
        sizes = self._sizes_of_run(size)
        micro_batch_size = sizes["batch_size"]
        if any(row.batch_size == micro_batch_size for row in self.plan.rows):
            return
        timing = speeds.time(finder, micro_batch_size)
        if timing is None:
            self.plan.left_out[micro_batch_size] = "does not fit any more; something else takes memory now"
            return
        row = Row(self.plan.goal, samples_per_s_each=timing.samples_per_s, **sizes)
        self.plan.rows = sorted([*self.plan.rows, row], key=lambda other: other.batch_size)

    def _sizes_of_run(self, size: int) -> dict[str, Any]:
        """The fields of a row that the batch plan decides."""
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
