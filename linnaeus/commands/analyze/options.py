"""The command line of `linnaeus analyze`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from linnaeus.autobatch.result import Mode
from linnaeus.commands.options import (
    AUTOBATCH,
    CommandParser,
    MeasuringOptions,
    add_measuring_options,
    read_count,
    read_fraction,
    read_request,
)
from linnaeus.config.keys import suggest
from linnaeus.config.schema import STRATEGIES, Config

MODES: tuple[Mode, ...] = get_args(Mode)

DESCRIPTION = """\
Measures which batch size fits in which fraction of the device's memory, how fast it is and what limits it.
Every size is really run, with the training and validation steps of the configuration.
"""
DETAILS = """\
Overrides are those of training (`python -m linnaeus.train --help`). Of an option and an override that set the
same key, the one further right wins.

examples:
  linnaeus analyze --cfg my_exp.yaml --fractions 0.6,0.8 --modes train,val
  linnaeus analyze --cfg my_exp.yaml --throughput --plot sizes.html
  linnaeus analyze --cfg my_exp.yaml --modes train --remedies --output sizes.csv TRAIN.AMP bf16
  linnaeus analyze model=vit_small --memory-limit-gb 16 DATA.IMG_SIZE=384 DATA.DATASET.NAME=synthetic

exit codes: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted (what was measured is written),
1 anything else
"""


@dataclass
class Options(MeasuringOptions):
    """What to measure, and where the figures go.

    Attributes:
        fractions: of the device's memory, in (0, 1], ascending.
        modes: which steps are measured.
        throughput: whether further sizes are timed to find the knee.
        remedies: whether changes that may save memory are tried.
    """

    output: Path = Path("batch_sizes.json")
    fractions: list[float] = field(default_factory=lambda: [0.6, 0.7, 0.8, 0.9])
    modes: list[Mode] = field(default_factory=lambda: list(MODES))
    throughput: bool = False
    remedies: bool = False


def read(argv: Sequence[str]) -> str | tuple[Options, Config]:
    """Read the tokens after `analyze`: a text to print, or the arguments of the session's `run`.

    >>> options, config = read(["--fractions", "0.8,0.5", "--steps=3", "TRAIN.AMP", "bf16"])
    >>> options.fractions, config.DATA.AUTOBATCH.STEPS_PER_TRIAL_VAL, config.TRAIN.AMP
    ([0.5, 0.8], 3, 'bf16')

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    return read_request(PARSER, argv, Options())


def _fractions(text: str) -> list[float]:
    return sorted({read_fraction(part) for part in text.split(",")})


def _modes(text: str) -> list[Mode]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MODES:
            hint = suggest(name, MODES)
            raise ValueError(f"{name!r} is not a mode{hint}; give train, val or train,val")
    return [mode for mode in MODES if mode in names]


def _strategy(text: str) -> str:
    if text not in STRATEGIES:
        raise ValueError(f"{text!r} is not one of {', '.join(STRATEGIES)}{suggest(text, STRATEGIES)}")
    return text


PARSER = CommandParser(
    "analyze", description=DESCRIPTION, details=DETAILS, tool="tools/analyze_batch_sizes.py",
    print_config="print the configuration that would be measured, and exit",
)  # fmt: skip
PARSER.option(
    "--fractions", "F,F,...", _fractions,
    "fractions of the device's memory, each in (0, 1]; default 0.6,0.7,0.8,0.9",
)  # fmt: skip
PARSER.option("--modes", "M,M", _modes, "train, val or both; default train,val")
PARSER.switch(
    "--throughput", "time further sizes, and find the smallest within 5 % of the best samples per second"
)
PARSER.switch("--remedies", "measure what bf16, gradient checkpointing and accumulation would save")
_SUFFIXES = ("", "_VAL")
PARSER.option(
    "--steps", "N", read_count, "steps that one trial runs",
    [f"{AUTOBATCH}.STEPS_PER_TRIAL{suffix}" for suffix in _SUFFIXES],
)  # fmt: skip
PARSER.option("--strategy", "NAME", _strategy, f"one of {', '.join(STRATEGIES)}", [f"{AUTOBATCH}.STRATEGY"])
add_measuring_options(PARSER, output=Options.output, suffixes=_SUFFIXES)
