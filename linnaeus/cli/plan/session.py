"""One plan, from a configuration to its files."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from linnaeus.batching.sizes import max_samples_per_rank
from linnaeus.cli.plan.measure import Measuring
from linnaeus.cli.plan.options import Options
from linnaeus.cli.plan.output import notes, results_table
from linnaeus.cli.plan.plot import save_plot
from linnaeus.cli.plan.results import Goal, Plan
from linnaeus.cli.session import Setup, run_session
from linnaeus.config.schema import Config
from linnaeus.data.bundle import dataset_length
from linnaeus.training.build import plan_facts


def run(options: Options, config: Config) -> int:
    """Time sizes, write the files and show the table; returns the exit code: 0 done, 130 interrupted.

    Raises:
        AutoBatchError: nothing fits.
        LinnaeusError: something else that the user can mend; the message says how.
    """
    plan = Plan(Goal(0, config.TRAIN.EPOCHS))
    return run_session(config, options, plan, measure=_measure, draw=save_plot, show=_show)


def _measure(setup: Setup, options: Options, plan: Plan) -> None:
    """Time all sizes, on one model."""
    config = setup.config
    plan.goal = goal = Goal(
        num_samples=options.dataset_length or dataset_length(setup.data.train),
        epochs=config.TRAIN.EPOCHS,
        world_size=options.world_size,
        noise_scale=options.noise_scale,
        time_budget_s=options.time_budget,
    )
    search = setup.search()
    facts = plan_facts(
        search.assembly, config.MODEL, config.TRAIN,
        max_micro_batch_size=config.DATA.AUTOBATCH.MAX_BATCH_SIZE or goal.num_samples,
        world_size=goal.world_size, num_samples=goal.num_samples,
    )  # fmt: skip
    search = replace(search, max_samples_per_rank=max_samples_per_rank(config.TRAIN, facts))
    setup.note_environment(plan, search)
    Measuring(config, facts, plan).run(search, options.sizes, setup.status)


def _show(plan: Plan, console: Console) -> None:
    if plan.rows:
        console.print(results_table(plan))
    for note in notes(plan):
        console.print(note, markup=False, soft_wrap=True)
