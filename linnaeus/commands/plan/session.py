"""One plan, from a configuration to its files."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from linnaeus.autobatch.throughput import TOLERANCE
from linnaeus.batching.sizes import max_samples_per_rank
from linnaeus.commands.plan.measure import Measuring
from linnaeus.commands.plan.options import Options
from linnaeus.commands.plan.output import notes, results_table
from linnaeus.commands.plan.plot import save_plot
from linnaeus.commands.plan.results import Goal, Plan
from linnaeus.commands.session import Setup, run_session
from linnaeus.config.schema import Config
from linnaeus.data.bundle import dataset_length
from linnaeus.training.build import plan_facts


def run(options: Options, config: Config) -> int:
    """Time sizes, write the files and show the table; returns the exit code: 0 done, 130 interrupted.

    Raises:
        AutoBatchError: nothing fits.
        LinnaeusError: something else that the user can mend; the message says how.
    """
    plan = Plan(Goal(0, config.TRAIN.EPOCHS), TOLERANCE)
    return run_session(
        config,
        options,
        plan,
        measure=partial(_measure, options, plan),
        draw=partial(save_plot, plan),
        show=partial(_show, plan),
    )


def _measure(options: Options, plan: Plan, setup: Setup) -> None:
    """Time all sizes, on one model."""
    config = setup.config
    plan.goal = goal = Goal(
        num_samples=options.dataset_length or dataset_length(setup.data.train),
        epochs=config.TRAIN.EPOCHS,
        world_size=options.world_size,
        noise_scale=options.noise_scale,
        time_budget_s=options.time_budget,
    )
    assembly = setup.assemble()
    facts = plan_facts(
        assembly, config.MODEL, config.TRAIN, max_micro_batch_size=config.DATA.AUTOBATCH.MAX_BATCH_SIZE,
        world_size=goal.world_size, num_samples=goal.num_samples,
    )  # fmt: skip
    search = setup.search(assembly, max_samples_per_rank(config.TRAIN, facts))
    setup.note_environment(plan, assembly)
    Measuring(config, facts, plan).run(search, options.sizes, setup.status)


def _show(plan: Plan, console: Console) -> None:
    if plan.rows:
        console.print(results_table(plan))
    for note in notes(plan):
        console.print(note, markup=False, soft_wrap=True)
