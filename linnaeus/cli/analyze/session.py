"""One analysis, from a configuration to its files."""

from __future__ import annotations

import gc
from functools import partial

from linnaeus.cli.analyze.measure import measure_mode
from linnaeus.cli.analyze.options import Options
from linnaeus.cli.analyze.output import show
from linnaeus.cli.analyze.plot import save_plot
from linnaeus.cli.analyze.predict import Target, predict_sizes, target_of, world_of
from linnaeus.cli.analyze.remedies import measure_remedies, show_so_far
from linnaeus.cli.analyze.results import Analysis
from linnaeus.cli.session import Setup, run_session
from linnaeus.config.schema import Config
from linnaeus.errors import AutoBatchError


def run(options: Options, config: Config) -> int:
    """Measure, write the files and show the tables; returns the exit code: 0 done, 130 interrupted.

    Raises:
        AutoBatchError: nothing fits at any fraction.
        LinnaeusError: something else that the user can mend; the message says how.
    """
    analysis = Analysis()
    measure, world = _measure, None
    if options.predict:
        target = target_of(options, config)
        measure, world = partial(_predict, target), world_of(options)
    exit_code = run_session(
        config, options, analysis, measure=measure, draw=save_plot, show=show, world=world
    )
    if not analysis.interrupted and not analysis.has_sizes:
        raise AutoBatchError("\n".join(analysis.reasons))
    return exit_code


def _predict(target: Target, setup: Setup, options: Options, analysis: Analysis) -> None:
    predict_sizes(setup, options, target, analysis)


def _measure(setup: Setup, options: Options, analysis: Analysis) -> None:
    search = setup.search()
    setup.note_environment(analysis, search)
    for mode in options.modes:
        measure_mode(search, mode, options, analysis, setup.status)
    if options.remedies:
        show_so_far(setup, analysis)
        del search  # the remedies build models of their own
        gc.collect()
        measure_remedies(setup, analysis, timed=options.throughput)
