"""The command line of `linnaeus analyze`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from linnaeus.autobatch.predict.gpus import GIB, GPUS, Gpu, find_gpu
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import STRATEGIES
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
from linnaeus.config.keys import suggest
from linnaeus.config.schema import Config

MODES: tuple[Mode, ...] = get_args(Mode)
MOST_GIB = 1e6

DESCRIPTION = """\
Measures which batch size fits in which fraction of the device's memory, how fast it is and what limits it.
Every size is really run, with the training and validation steps of the configuration. With --predict nothing
is run: the memory of GPUs that need not be there is predicted from these steps.
"""
DETAILS = """\
Overrides are those of training (`linnaeus train --help`). Of an option and an override that set the
same key, the one further right wins.

examples:
  linnaeus analyze --cfg my_exp.yaml --fractions 0.6,0.8 --modes train,val
  linnaeus analyze --cfg my_exp.yaml --throughput --plot sizes.html
  linnaeus analyze --cfg my_exp.yaml --modes train --remedies --output sizes.csv TRAIN.AMP bf16
  linnaeus analyze --cfg my_exp.yaml --predict --gpu a100-40gb,rtx-4090,h100-80gb
  linnaeus analyze --cfg my_exp.yaml --predict --device-memory-gb 24 --remedies
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
        predict: whether memory is predicted without running the steps.
        gpu: the GPUs to predict for, by name.
        device_memory_gb: those to predict for, by memory.
        world_size: processes of the run that is predicted.
    """

    output: Path = Path("batch_sizes.json")
    fractions: list[float] = field(default_factory=lambda: [0.6, 0.7, 0.8, 0.9])
    modes: list[Mode] = field(default_factory=lambda: list(MODES))
    throughput: bool = False
    remedies: bool = False
    predict: bool = False
    gpu: list[Gpu] = field(default_factory=list)
    device_memory_gb: list[Gpu] = field(default_factory=list)
    world_size: int | None = None


WITH_PREDICT = ("--gpu", "--device-memory-gb", "--world-size")
"""Options that need `--predict`."""
WITHOUT_PREDICT = {
    "--throughput": "speed is not predicted",
    "--steps": "there are no trials",
    "--strategy": "there is no search",
}
"""Options that make no sense with `--predict`, and why."""


def read(argv: Sequence[str]) -> str | tuple[Options, Config]:
    """Read the tokens after `analyze`: a text to print, or the arguments of the session's `run`.

    >>> options, config = read(["--fractions", "0.8,0.5", "--steps=3", "TRAIN.AMP", "bf16"])
    >>> options.fractions, config.DATA.AUTOBATCH.STEPS_PER_TRIAL_VAL, config.TRAIN.AMP
    ([0.5, 0.8], 3, 'bf16')

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    return read_request(PARSER, argv, Options(), check=lambda options: _contradictions(options, argv))


def _contradictions(options: Options, argv: Sequence[str]) -> list[str]:
    """One sentence for each option that does not go with `--predict`, or not without it."""
    given = {token.partition("=")[0] for token in argv}
    if not options.predict:
        return [f"{name}: needs --predict" for name in WITH_PREDICT if name in given]
    return [
        f"{name}: not with --predict, because {reason}; leave it out"
        for name, reason in WITHOUT_PREDICT.items()
        if name in given
    ]


def _fractions(text: str) -> list[float]:
    return sorted({read_fraction(part) for part in text.split(",")})


def read_gpus(text: str) -> list[Gpu]:
    """GPUs by their names, with commas between them; `ValueError` for names that are not known."""
    gpus, unknown, problems = list[Gpu](), list[str](), list[str]()
    for name in map(str.strip, text.split(",")):
        try:
            gpus.append(find_gpu(name))
        except KeyError:
            hint = suggest(name.lower(), GPUS).removeprefix("; ")
            unknown.append(f"{name!r} ({hint})" if hint else repr(name))
        except ValueError as error:
            problems.append(str(error))
    if unknown:
        names = " and ".join([", ".join(unknown[:-1]), unknown[-1]] if unknown[1:] else unknown)
        verb = "is not a GPU" if len(unknown) == 1 else "are no GPUs"
        problems.append(
            f"{names} {verb} of the list; known are {', '.join(GPUS)}; for others give --device-memory-gb"
        )
    if problems:
        raise ValueError("; ".join(problems))
    return gpus


def _memories(text: str) -> list[Gpu]:
    sizes, problems = list[float](), list[str]()
    for part in text.split(","):
        try:
            sizes.append(read_positive("number of GiB", part))
        except ValueError as error:
            problems.append(str(error))
    problems += [f"{size:g} GiB is more than any device has" for size in sizes if size > MOST_GIB]
    if problems:
        raise ValueError("; ".join(problems))
    return [Gpu(f"{size:g} GiB", int(size * GIB)) for size in sizes]


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
    "analyze", description=DESCRIPTION, details=DETAILS,
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
PARSER.switch(
    "--remedies",
    "measure what bf16, gradient checkpointing and accumulation would save; with --predict: predict it, and "
    "what SGD and smaller images would save",
)
PARSER.switch(
    "--predict",
    "predict the memory of the GPUs named by --gpu or --device-memory-gb, else of this machine's; nothing "
    "is run",
)
PARSER.option("--gpu", "NAME,...", read_gpus, f"GPUs that need not be here: {', '.join(GPUS)}")
PARSER.option("--device-memory-gb", "X,...", _memories, "GPUs by the GiB that torch sees of their memory")
PARSER.option("--world-size", "N", read_count, "processes of the run that is predicted; default 1")
_SUFFIXES = ("", "_VAL")
PARSER.option(
    "--steps", "N", read_count, "steps that one trial runs",
    [f"{AUTOBATCH}.STEPS_PER_TRIAL{suffix}" for suffix in _SUFFIXES],
)  # fmt: skip
PARSER.option("--strategy", "NAME", _strategy, f"one of {', '.join(STRATEGIES)}", [f"{AUTOBATCH}.STRATEGY"])
add_measuring_options(PARSER, output=Options.output, suffixes=_SUFFIXES)
