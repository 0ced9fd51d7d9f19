"""A learning rate for the configured run, by a range test: `--lr`.

It rises exponentially while the model trains on the run's own batches (Smith 2017, Cyclical Learning
Rates for Training Neural Networks, section 3.3). The loss is smoothed by a running mean without bias.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from linnaeus.autobatch.memory.oom import is_out_of_memory
from linnaeus.cli.analyze.measure import Setup, environment_of, sentence
from linnaeus.cli.analyze.options import AnalyzeOptions
from linnaeus.cli.tables import save_figures, table
from linnaeus.config.schema import ScheduleConfig
from linnaeus.data.loader import build_loaders
from linnaeus.runtime.errors import LinnaeusError, OutOfMemoryError
from linnaeus.runtime.rng import seed_all
from linnaeus.size_search.planned_sizes import prepare_search
from linnaeus.training.optim import scale_values
from linnaeus.training.schedule import Schedule

logger = logging.getLogger("linnaeus.analysis")
KEY = "OPTIMIZER.LR"
FIRST, LAST, NUM_STEPS = 1e-6, 10.0, 100
"""The learning rates at the peak, and the steps from one to the other."""
LOG_EVERY = 10
"""Steps from one log line to the next."""
SMOOTHING, DIVERGED = 0.9, 4
"""Decay of the running mean; ratio of the smoothed loss to its lowest value that ends the test."""


@dataclass
class RateTest:
    """The steps, each with the value of `OPTIMIZER.LR`, the loss and the smoothed loss.

    `ended_by` is the reason why the test ended early; empty if it did not.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    interrupted: bool = True
    ended_by: str = ""

    @property
    def suggestion(self) -> float | None:
        """A tenth of the learning rate with the lowest smoothed loss, if the loss fell and rose again."""
        row = min(self.rows, key=lambda row: row["smoothed"])
        return None if row in (self.rows[0], self.rows[-1]) else row[KEY] / 10

    def save(self, path: Path) -> None:
        """Write the results; the ending is the format."""
        content = {
            "environment": self.environment,
            "results": self.rows,
            "suggestion": self.suggestion,
            "interrupted": self.interrupted,
        }
        save_figures(path, content, self.rows)

    def show(self, console: Console) -> None:
        """Print every fifth step, and the suggestion."""
        lines = [[f"{value:.3g}" for value in row.values()] for row in self.rows[::5]]
        console.print(table("Loss while the learning rate rises", [*self.rows[0]], lines))
        text = "no suggestion: the loss did not fall and rise again"
        if (value := self.suggestion) is not None:
            text = (
                f"{KEY}={value:.2g}, a tenth of that with the lowest smoothed loss, is a suggestion"
            )
        reason = f"; ended early: {self.ended_by}" if self.ended_by else ""
        console.print(f"{len(self.rows)} of {NUM_STEPS} steps{reason}; {text}", soft_wrap=True)


def measure_rates(setup: Setup, options: AnalyzeOptions, test: RateTest) -> None:
    """Train with a rising learning rate, in batches of DATA.BATCH_SIZE. The weights end with the process.

    Raises:
        LinnaeusError: a step runs out of memory, or the first loss is not finite.
    """
    config, data, world, seed = setup.config, setup.data, setup.world, setup.config.EXPERIMENT.SEED
    search, plan_for = prepare_search(config, data, setup.search().assembly, world, setup.console)
    plan, step = plan_for(config.DATA.BATCH_SIZE), search.assembly.train_step
    stage, optimizer = plan.stages[0], step.optimizer
    test.environment = environment_of(setup, search)
    logger.info("measured: %s", sentence(test.environment))
    scale_values(optimizer, lr_scale=plan.lr_scale, weight_decay_scale=plan.weight_decay_scale)
    first, growth = FIRST / optimizer.param_groups[0]["lr"], LAST / FIRST
    schedule = Schedule(
        ScheduleConfig(NAME="constant"),
        optimizer,
        steps_per_epoch=[NUM_STEPS],
        warmup_steps=0,
        batch_size_lr_factor=lambda number: first * growth ** (number / (NUM_STEPS - 1)),
    )
    sizes = stage.micro_batches * stage.num_steps
    seed_all(seed)
    step.model.train()
    mean = 0.0
    with build_loaders(
        data, config.DATA, world, sizes=lambda *_: iter(sizes), batch_size_val=1, seed=seed
    ) as loaders:
        for number in range(NUM_STEPS):
            setup.status.update(f"learning rates: step {number + 1} of {NUM_STEPS}")
            if number % stage.num_steps == 0:
                loaders.train.set_epoch(number // stage.num_steps)
                batches = iter(loaders.train)
            schedule.apply(number)
            try:
                loss = step(batches, stage.accumulation_steps, stage.samples_per_rank).item()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemoryError(
                    f"DATA.BATCH_SIZE: {stage.micro_batch_size} samples at a time run out of memory; "
                    "linnaeus analyze finds the maximum batch size"
                ) from error
            if not math.isfinite(loss):
                if step.scaler.is_enabled():  # it has skipped the step
                    continue
                test.ended_by = f"the loss of step {number + 1} is {loss}"
                break
            mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
            smoothed, rate = mean / (1 - SMOOTHING ** (len(test.rows) + 1)), schedule.lr
            test.rows.append({KEY: rate / plan.lr_scale, "loss": loss, "smoothed": smoothed})
            if number % LOG_EVERY == 0:
                logger.info(
                    "step %d of %d: learning rate %.3g, loss %.4g",
                    number + 1,
                    NUM_STEPS,
                    rate,
                    loss,
                )
            lowest = min(row["smoothed"] for row in test.rows)
            if smoothed > DIVERGED * lowest and number + 1 < NUM_STEPS:
                test.ended_by = f"the smoothed loss rose above {DIVERGED} times its lowest value"
                break
    if not test.rows:
        raise LinnaeusError(f"--lr: the loss of the first step is {loss}")
