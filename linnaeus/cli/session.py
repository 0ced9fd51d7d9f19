"""What `analyze` and `plan` do alike: set up, measure, and write what there is, also after Ctrl-C."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from linnaeus.autobatch.ranks.protocol import RankStatus
from linnaeus.cli.environment import describe, device_sentence
from linnaeus.cli.parser import Options
from linnaeus.cli.tables import Measurement
from linnaeus.config.schema import Config
from linnaeus.console import StatusLine, make_console
from linnaeus.data.bundle import DataBundle
from linnaeus.data.datasets import build_data
from linnaeus.dist import World, join
from linnaeus.errors import EXIT_INTERRUPTED
from linnaeus.log import close_logging, set_up_logging
from linnaeus.models.normalisation import with_normalisation
from linnaeus.rng import seed_all, set_deterministic
from linnaeus.sizing.sizes import SizeSearch, log_level
from linnaeus.training.build import assemble

logger = logging.getLogger("linnaeus.cli")
M = TypeVar("M", bound=Measurement)


@dataclass(frozen=True)
class Setup:
    """What there is to measure with.

    Attributes:
        config: the run's configuration.
        data: training and validation data.
        world: this process and its device.
        status: told what is being tried.
        console: shows the trials.
        write: writes the files and shows the figures as they are now, before something that takes long.
    """

    config: Config
    data: DataBundle
    world: World
    status: RankStatus
    console: Console
    write: Callable[[], None] = lambda: None

    def search(self) -> SizeSearch:
        """Build the model and its steps, and the searches of a run with them.

        Raises:
            ConfigError: a node that cannot be built.
        """
        config, data, world = self.config, self.data, self.world
        assembly = assemble(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, data, world)
        return SizeSearch(
            config.DATA, config.TRAIN, data, assembly, world, config.EXPERIMENT.SEED, console=self.console
        )

    def note_environment(self, measurement: Measurement, search: SizeSearch) -> None:
        """Note where the figures hold, and show it. From now on the measurement is worth writing."""
        measurement.environment = describe(self.config.MODEL, search)
        logger.info("%s", device_sentence(measurement.environment))


def run_session(
    config: Config,
    options: Options,
    measurement: M,
    *,
    measure: Callable[[Setup, Options, M], None],
    draw: Callable[[M, Path], None],
    show: Callable[[M, Console], None],
    world: World | None = None,
) -> int:
    """Measure, write the files and show the figures; on Ctrl-C or an error, those measured so far.

    Args:
        config: the run's configuration.
        options: say what to measure and where the files go.
        measurement: filled by `measure`.
        measure: does the measuring.
        draw: writes the picture.
        show: prints the figures for people.
        world: where the device of the configuration is not used; None takes that device.

    Returns:
        The exit code: 0 done, 130 interrupted.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    console = make_console()
    measurement.interrupted = True

    def write() -> None:
        measurement.save(options.output)
        logger.info("figures: %s", options.output.resolve())
        if options.plot is not None:
            draw(measurement, options.plot)
            logger.info("picture: %s", options.plot.resolve())
        show(measurement, console)

    set_up_logging(None, rank=0, console=console)
    try:
        with (
            join(config.EXPERIMENT.DEVICE, config.DIST) if world is None else nullcontext(world) as joined,
            log_level(config.DATA.AUTOBATCH, "train") as is_shown,
            StatusLine(console if is_shown else None) as line,
        ):
            line.update("starting")
            set_deterministic(config.TRAIN.DETERMINISTIC)
            seed_all(config.EXPERIMENT.SEED)
            data_node, _ = with_normalisation(config.DATA, config.MODEL)
            config = replace(config, DATA=data_node)
            data = build_data(config.DATA, seed=config.EXPERIMENT.SEED)
            setup = Setup(config, data, joined, RankStatus(line.update), console, write)
            measure(setup, options, measurement)
        measurement.interrupted = False
    except KeyboardInterrupt:
        logger.info("interrupted; what has been measured so far is written")
        return EXIT_INTERRUPTED
    finally:
        if measurement.environment:  # otherwise nothing has been measured
            write()
        close_logging()
    return 0
