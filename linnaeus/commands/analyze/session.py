"""One analysis, from a configuration to its files. Building order is reading order."""

from __future__ import annotations

import gc
import logging
from datetime import timedelta

import torch
from rich.console import Console

from linnaeus.autobatch.protocol import Status
from linnaeus.autobatch.sizes import SizeSearch
from linnaeus.batching.sizes import micro_batches_held
from linnaeus.commands.analyze.measure import measure_mode
from linnaeus.commands.analyze.options import Options
from linnaeus.commands.analyze.output import save, tables, yaml_lines
from linnaeus.commands.analyze.remedies import measure_remedies
from linnaeus.commands.analyze.results import Analysis, Row
from linnaeus.commands.entry import EXIT_INTERRUPTED
from linnaeus.commands.environment import describe, device_sentence
from linnaeus.commands.status import status_line
from linnaeus.config.schema import Config
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data
from linnaeus.dist import World, join
from linnaeus.errors import AutoBatchError
from linnaeus.log import close_logging, make_console, set_up_logging
from linnaeus.rng import seed_all
from linnaeus.training.build import assemble

logger = logging.getLogger("linnaeus.analysis")


def run_analysis(options: Options, config: Config) -> int:
    """Measure, write the files and show the tables; what was measured before Ctrl-C or an error counts too.

    Returns:
        The exit code.

    Raises:
        AutoBatchError: nothing fits at any fraction.
        LinnaeusError: something else that the user can mend; the message says how.
    """
    console = make_console()
    analysis = Analysis(interrupted=True)
    set_up_logging(None, rank=0, console=console)
    try:
        _measure(options, config, analysis, console)
        analysis.interrupted = False
    except KeyboardInterrupt:
        logger.info("interrupted; what has been measured so far is written")
        return EXIT_INTERRUPTED
    finally:
        if analysis.environment:  # otherwise nothing has been measured
            _report(analysis, options, console)
        close_logging()
    if not has_sizes(analysis):
        raise AutoBatchError("\n".join(reasons(analysis)))
    return 0


def has_sizes(analysis: Analysis) -> bool:
    """Whether any size was found."""
    return any(row.batch_size is not None for row in analysis.rows)


def reasons(analysis: Analysis) -> list[str]:
    """Why there is no size: for each mode at the largest fraction where there is none."""
    found = {row.mode: row.reason for row in reversed(analysis.rows) if row.reason is not None}
    return list(found.values())


def _measure(options: Options, config: Config, analysis: Analysis, console: Console) -> None:
    timeout = timedelta(minutes=config.DIST.TIMEOUT_MINUTES)
    with (
        join(config.EXPERIMENT.DEVICE, config.DIST.BACKEND, timeout) as world,
        status_line(console) as status,
    ):
        torch.use_deterministic_algorithms(config.TRAIN.DETERMINISTIC)
        seed_all(config.EXPERIMENT.SEED)
        data = build_data(config.DATA, seed=config.EXPERIMENT.SEED)
        _search_all(options, config, data, world, analysis, status)
        gc.collect()  # the model goes before the remedies build their own
        if options.remedies:
            measure_remedies(config, data, world, analysis, status, timed=options.throughput)


def _search_all(
    options: Options, config: Config, data: DataBundle, world: World, analysis: Analysis, status: Status
) -> None:
    """All modes and fractions, on one model."""
    assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
    analysis.environment = describe(config, data, assembly, world.device)
    logger.info("%s", device_sentence(analysis.environment))
    search = SizeSearch(
        config.DATA, data, assembly, world, micro_batches_held(config.TRAIN), config.EXPERIMENT.SEED
    )
    for mode in options.modes:
        measure_mode(search, mode, options, analysis, status, on_row=_log_row)


def _report(analysis: Analysis, options: Options, console: Console) -> None:
    """Write the files, then show the same figures."""
    save(analysis, options.output)
    logger.info("figures: %s", options.output.resolve())
    if options.plot is not None:
        # Here and not above: matplotlib takes a second to import.
        from linnaeus.commands.analyze.plot import save_plot

        save_plot(analysis, options.plot)
        logger.info("picture: %s", options.plot.resolve())
    if analysis.rows:
        for table in tables(analysis):
            console.print(table)
    if has_sizes(analysis):
        for reason in reasons(analysis):
            logger.info(reason)
    if lines := yaml_lines(analysis):
        console.print(f"To paste into a configuration:\n\n{lines}", markup=False, soft_wrap=True)


def _log_row(row: Row) -> None:
    size = "nothing fits" if row.batch_size is None else f"batch size {row.batch_size}"
    logger.info(
        "%s, %s of the memory: %s, %d trials", row.mode, f"{row.memory_fraction:.0%}", size, len(row.trials)
    )
