"""One plan, from a configuration to its files. Building order is reading order."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
from rich.console import Console

from linnaeus.autobatch.protocol import Status
from linnaeus.autobatch.sizes import SizeSearch
from linnaeus.autobatch.throughput import TOLERANCE
from linnaeus.batching.sizes import max_samples_per_rank, micro_batches_held
from linnaeus.commands.entry import EXIT_INTERRUPTED
from linnaeus.commands.environment import describe, device_sentence
from linnaeus.commands.plan.measure import Measuring
from linnaeus.commands.plan.options import Options
from linnaeus.commands.plan.output import notes, results_table, save
from linnaeus.commands.plan.results import Goal, Plan, Row
from linnaeus.commands.status import status_line
from linnaeus.config.schema import Config
from linnaeus.data.bundle import DataBundle, dataset_length
from linnaeus.data.datasets import build_data
from linnaeus.dist import World, join
from linnaeus.log import close_logging, make_console, set_up_logging
from linnaeus.rng import seed_all
from linnaeus.training.build import assemble, plan_facts

logger = logging.getLogger("linnaeus.plan")


def run_plan(options: Options, config: Config) -> int:
    """Time, write the files and show the table; what was timed before Ctrl-C or an error counts too.

    Returns:
        The exit code.

    Raises:
        AutoBatchError: nothing fits.
        LinnaeusError: something else that the user can mend; the message says how.
    """
    console = make_console()
    plan = Plan(Goal(0, config.TRAIN.EPOCHS), TOLERANCE, interrupted=True)
    set_up_logging(None, rank=0, console=console)
    try:
        _measure(options, config, plan, console)
        plan.interrupted = False
    except KeyboardInterrupt:
        logger.info("interrupted; what has been measured so far is written")
        return EXIT_INTERRUPTED
    finally:
        if plan.environment:  # otherwise nothing has been measured
            _report(plan, options, console)
        close_logging()
    return 0


def _measure(options: Options, config: Config, plan: Plan, console: Console) -> None:
    timeout = timedelta(minutes=config.DIST.TIMEOUT_MINUTES)
    with (
        join(config.EXPERIMENT.DEVICE, config.DIST.BACKEND, timeout) as world,
        status_line(console) as status,
    ):
        torch.use_deterministic_algorithms(config.TRAIN.DETERMINISTIC)
        seed_all(config.EXPERIMENT.SEED)
        data = build_data(config.DATA, seed=config.EXPERIMENT.SEED)
        plan.goal = Goal(
            num_samples=options.dataset_length or dataset_length(data.train),
            epochs=config.TRAIN.EPOCHS,
            world_size=options.world_size,
            noise_scale=options.noise_scale,
            time_budget_s=options.time_budget,
        )
        _time(options, config, data, world, plan, status)


def _time(
    options: Options, config: Config, data: DataBundle, world: World, plan: Plan, status: Status
) -> None:
    """All sizes, on one model."""
    goal = plan.goal
    assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
    facts = plan_facts(
        assembly, config.MODEL, config.TRAIN, max_micro_batch_size=config.DATA.AUTOBATCH.MAX_BATCH_SIZE,
        world_size=goal.world_size, num_samples=goal.num_samples,
    )  # fmt: skip
    largest = max_samples_per_rank(config.TRAIN, facts)
    plan.environment = describe(config, data, assembly, world.device)
    logger.info("%s", device_sentence(plan.environment))
    search = SizeSearch(
        config=config.DATA,
        bundle=data,
        assembly=assembly,
        world=world,
        accumulation_steps=micro_batches_held(config.TRAIN),
        seed=config.EXPERIMENT.SEED,
        max_samples_per_rank=largest,
    )
    Measuring(config, facts, plan, on_row=_log_row).run(search, options.sizes, status)


def _log_row(row: Row) -> None:
    logger.info("batch size %d: %.4g samples/s", row.batch_size, row.samples_per_s)


def _report(plan: Plan, options: Options, console: Console) -> None:
    """Write the files, then show the same figures."""
    save(plan, options.output)
    logger.info("figures: %s", options.output.resolve())
    if options.plot is not None:
        # Here and not above: matplotlib takes a second to import.
        from linnaeus.commands.plan.plot import save_plot

        save_plot(plan, options.plot)
        logger.info("picture: %s", options.plot.resolve())
    if plan.rows:
        console.print(results_table(plan))
    for note in notes(plan):
        console.print(note, markup=False, soft_wrap=True)
