"""One analysis, from a configuration to its files. After Ctrl-C the results so far are written."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.cli.analyze.measure import Setup, measure_sizes, sentence
from linnaeus.cli.analyze.options import AnalyzeOptions
from linnaeus.cli.analyze.predict import META, predict_sizes
from linnaeus.cli.analyze.rates import RateTest, measure_rates
from linnaeus.cli.analyze.results import Analysis
from linnaeus.cli.plots import draw_analysis, draw_rates
from linnaeus.config.schema import Config
from linnaeus.data.datasets import build_data
from linnaeus.data.loader import with_num_workers
from linnaeus.models.preprocessing import with_preprocessing
from linnaeus.runtime.console import StatusLine, make_console
from linnaeus.runtime.distributed import World, join
from linnaeus.runtime.errors import AutoBatchError
from linnaeus.runtime.log import close_logging, set_up_logging
from linnaeus.runtime.rng import deterministic, kernels, seed_all
from linnaeus.runtime.signals import StopRequest
from linnaeus.size_search.searches import log_level

logger = logging.getLogger("linnaeus.cli")


def run(options: AnalyzeOptions, config: Config) -> int:
    """Measure or predict, write the files and show the tables.

    Returns:
        The exit code, 0.

    Raises:
        Interrupted: by Ctrl-C or SIGTERM, after the files are written.
        AutoBatchError: nothing fits at any fraction.
        LinnaeusError: another error that the user can fix; the message says how.
    """
    analysis: Any = RateTest() if options.lr else Analysis()
    joining: AbstractContextManager[World]
    find: Any
    if options.predict:
        joining = nullcontext(World(META))
        find = predict_sizes
    else:
        joining = join(config.EXPERIMENT.DEVICE, config.DIST)
        find = measure_rates if options.lr else measure_sizes
    console = make_console()
    set_up_logging(None, rank=0, console=console)
    try:
        with (
            StopRequest().listening(),
            joining as world,
            kernels(config.EXPERIMENT, world.device),
            log_level(config.DATA.AUTOBATCH, "train") as is_shown,
            StatusLine(console if is_shown else None) as line,
            deterministic(config.TRAIN.DETERMINISTIC),
        ):
            line.update("starting")
            seed_all(config.EXPERIMENT.SEED)
            data_node, _ = with_preprocessing(config.DATA, config.MODEL)
            config = replace(config, DATA=data_node)
            data = build_data(config.DATA, seed=config.EXPERIMENT.SEED)
            if not options.predict:
                loading = with_num_workers(config.DATA, data, world)
                config = replace(config, DATA=loading)
            find(Setup(config, data, world, RankStatus(line.update), console), options, analysis)
        analysis.interrupted = False
    finally:
        if analysis.rows:  # otherwise nothing was measured
            name = "learning_rates.json" if options.lr else "batch_sizes.json"
            output = options.output or Path(name)
            analysis.save(output)
            logger.info("results: %s", output.resolve())
            if options.plot is not None:
                draw = draw_rates if options.lr else draw_analysis
                draw(analysis, sentence(analysis.environment), options.plot)
                logger.info("picture: %s", options.plot.resolve())
            analysis.show(console)
        close_logging()
    if options.lr:
        return 0
    if not any(row.batch_size is not None for row in analysis.rows):
        raise AutoBatchError("\n".join(analysis.reasons))
    if options.require and (problems := analysis.too_small(options.require)):
        raise AutoBatchError("\n".join(problems))
    return 0
