"""The command line of `linnaeus plan`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from linnaeus.cli.duration import read_duration
from linnaeus.cli.parser import (
    AUTOBATCH,
    CommandParser,
    MeasuringOptions,
    add_measuring_options,
    read_count,
    read_fraction,
    read_positive,
    read_request,
)
from linnaeus.config.schema import Config

DESCRIPTION = """\
Times a few of the batch sizes that fit, and predicts what a run takes with each: per epoch, in all, and, with
a noise scale, to the same loss. Marks the largest that fits, the fastest and the recommended size.
"""
DETAILS = """\
Without a noise scale the recommended size is the smallest within 5 % of the best samples per second; with
one, the size with the least predicted time to the same loss. Learning rate and warnings are those of the
batch plan that training would make. Only the training step is timed: loading, validation and the exchange
between processes come on top.

examples:
  linnaeus plan --cfg my_exp.yaml --epochs 90 --time-budget 12h
  linnaeus plan --cfg my_exp.yaml --noise-scale 2000 --world-size 8 --plot plan.html
  linnaeus plan --cfg my_exp.yaml --sizes 64,128,256 --output plan.csv OPTIMIZER.LR_SCALING=linear

exit codes: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted (what was measured is written),
1 anything else
"""


@dataclass
class Options(MeasuringOptions):
    """What to time, and what to predict from it.

    Attributes:
        sizes: timed beside the largest size that fits; None for the powers of two below it and sizes
            near the smallest fast one.
        dataset_length: number of training samples; None for the configured dataset's.
        noise_scale: gradient noise scale, in samples; None where it is not known.
        world_size: processes of the planned run.
        time_budget: seconds that the run may take; None for no limit.
    """

    output: Path = Path("batch_plan.json")
    sizes: list[int] | None = None
    dataset_length: int | None = None
    noise_scale: float | None = None
    world_size: int = 1
    time_budget: float | None = None


def read(argv: Sequence[str]) -> str | tuple[Options, Config]:
    """Read the tokens after `plan`: a text to print, or the arguments of the session's `run`.

    >>> options, config = read(["--sizes=8,4", "--time-budget", "2h", "--epochs", "3"])
    >>> options.sizes, options.time_budget, config.TRAIN.EPOCHS
    ([4, 8], 7200.0, 3)

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    return read_request(PARSER, argv, Options())


def _sizes(text: str) -> list[int]:
    return sorted({read_count(part) for part in text.split(",")})


PARSER = CommandParser(
    "plan", description=DESCRIPTION, details=DETAILS,
    print_config="print the configuration that would be timed, and exit",
)  # fmt: skip
PARSER.option(
    "--fraction", "F", read_fraction, "fraction of the device's memory, in (0, 1]",
    [f"{AUTOBATCH}.TARGET_MEMORY_FRACTION"],
)  # fmt: skip
PARSER.option(
    "--sizes", "N,N,...", _sizes,
    "time these sizes, and the largest that fits; default: powers of two below it, and up to three sizes "
    "near the smallest fast one",
)  # fmt: skip
PARSER.option(
    "--dataset-length", "N", read_count, "training samples; default: those of the configured dataset"
)
PARSER.option("--epochs", "N", read_count, "passes over them", ["TRAIN.EPOCHS"])
PARSER.option(
    "--noise-scale", "X", partial(read_positive, "number of samples"),
    "gradient noise scale, in samples; gives the time to the same loss",
)  # fmt: skip
PARSER.option("--world-size", "N", read_count, "processes that the run will have; default 1")
PARSER.option(
    "--time-budget", "T", read_duration,
    "mark the sizes with which the run ends in time: 90s, 30m, 2h, 1d",
)  # fmt: skip
add_measuring_options(PARSER, output=Options.output, suffixes=[""])
