"""The command line of `linnaeus analyze`. Pure: no torch, and no file is read but the `--cfg` file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from linnaeus.commands.options import (
    PLOT_ENDINGS,
    TABLE_ENDINGS,
    Grammar,
    read_command_line,
    read_count,
    read_path,
    read_positive,
    read_share,
)
from linnaeus.config.keys import suggest
from linnaeus.config.load import LoadedConfig
from linnaeus.config.schema import STRATEGIES

Mode = Literal["train", "val"]
MODES: tuple[Mode, ...] = get_args(Mode)

HELP = """\
Measures which batch size fits in which share of the device's memory, how fast it is and what limits it.
Every size is really run, with the training and validation steps of the configuration.

usage: linnaeus analyze [--cfg FILE] [options] [group=preset ...] [KEY VALUE | KEY=VALUE ...]
       python -m linnaeus.main analyze ...
       python tools/analyze_batch_sizes.py ...

options:
  --cfg FILE            read a YAML file, as for training
  --fractions F,F,...   shares of the device's memory, each in (0, 1]; default 0.6,0.7,0.8,0.9
  --modes M,M           train, val or both; default train,val
  --output FILE         .json, .jsonl or .csv by its ending; default batch_sizes.json
  --plot FILE           also draw a picture: .png, .svg or .html by its ending
  --throughput          time further sizes, and find the smallest within 5 % of the best samples per second
  --remedies            measure what bf16, gradient checkpointing and accumulation would save
  --steps N             steps that one trial runs (DATA.AUTOBATCH.STEPS_PER_TRIAL, and _VAL)
  --min-bs N            smallest size tried (DATA.AUTOBATCH.MIN_BATCH_SIZE, and _VAL)
  --max-bs N            largest size tried (DATA.AUTOBATCH.MAX_BATCH_SIZE, and _VAL)
  --strategy NAME       guided, binary, power or binsearch (DATA.AUTOBATCH.STRATEGY)
  --memory-limit-gb X   treat the device as if it had no more GiB (DATA.AUTOBATCH.MEMORY_LIMIT_GB)
  --print-config        print the configuration that would be measured, and exit
  -h, --help            print this text and exit

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
class Options:
    """What to measure, and where it goes.

    Attributes:
        fractions: shares of the device's memory, in (0, 1], ascending.
        modes: which steps are measured.
        output: a file for programs.
        plot: a picture; None draws none.
        throughput: time further sizes and find the knee.
        remedies: try what would save memory.
    """

    fractions: list[float] = field(default_factory=lambda: [0.6, 0.7, 0.8, 0.9])
    modes: list[Mode] = field(default_factory=lambda: list(MODES))
    output: Path = Path("batch_sizes.json")
    plot: Path | None = None
    throughput: bool = False
    remedies: bool = False


def read_options(argv: Sequence[str]) -> tuple[Options, LoadedConfig]:
    """Read the tokens after `analyze`.

    >>> options, loaded = read_options(["--fractions", "0.8,0.5", "--steps=3", "TRAIN.AMP", "bf16"])
    >>> options.fractions, loaded.config.DATA.AUTOBATCH.STEPS_PER_TRIAL_VAL, loaded.config.TRAIN.AMP
    ([0.5, 0.8], 3, 'bf16')

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    options = Options()
    return options, read_command_line(argv, options, GRAMMAR)


def _fractions(text: str) -> list[float]:
    return sorted({read_share(part) for part in text.split(",")})


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


_AUTOBATCH = "DATA.AUTOBATCH"
GRAMMAR = Grammar(
    readers={
        "--fractions": _fractions,
        "--modes": _modes,
        "--output": read_path(TABLE_ENDINGS),
        "--plot": read_path(PLOT_ENDINGS),
        "--steps": read_count,
        "--min-bs": read_count,
        "--max-bs": read_count,
        "--strategy": _strategy,
        "--memory-limit-gb": read_positive("number of GiB"),
    },
    switches=("--throughput", "--remedies"),
    keys={
        "--steps": (f"{_AUTOBATCH}.STEPS_PER_TRIAL", f"{_AUTOBATCH}.STEPS_PER_TRIAL_VAL"),
        "--min-bs": (f"{_AUTOBATCH}.MIN_BATCH_SIZE", f"{_AUTOBATCH}.MIN_BATCH_SIZE_VAL"),
        "--max-bs": (f"{_AUTOBATCH}.MAX_BATCH_SIZE", f"{_AUTOBATCH}.MAX_BATCH_SIZE_VAL"),
        "--strategy": (f"{_AUTOBATCH}.STRATEGY",),
        "--memory-limit-gb": (f"{_AUTOBATCH}.MEMORY_LIMIT_GB",),
    },
)
