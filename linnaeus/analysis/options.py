"""The command line of `linnaeus analyze`. Pure: no torch, and no file is read but the `--cfg` file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from linnaeus.config.keys import suggest
from linnaeus.config.load import LoadedConfig, load_config
from linnaeus.config.overrides import FLAGS
from linnaeus.errors import ConfigError

Mode = Literal["train", "val"]
MODES: tuple[Mode, ...] = get_args(Mode)
TABLE_ENDINGS = (".json", ".jsonl", ".csv")
PLOT_ENDINGS = (".png", ".svg", ".html")
STRATEGIES = ("guided", "binary", "power", "binsearch")

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


def read_command_line(argv: Sequence[str]) -> tuple[Options, LoadedConfig]:
    """Read the tokens after `analyze`.

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    options, rest, problems = parse_options(argv)
    try:
        loaded = load_config(rest)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems and not loaded.show_help:
        raise ConfigError(problems)
    return options, loaded


def parse_options(argv: Sequence[str]) -> tuple[Options, list[str], list[str]]:
    """Take the options out of a command line; those that set a key become overrides in their place.

    >>> options, rest, problems = parse_options(["--fractions", "0.8,0.5", "--steps=3", "TRAIN.AMP", "bf16"])
    >>> options.fractions, problems
    ([0.5, 0.8], [])
    >>> rest
    ['DATA.AUTOBATCH.STEPS_PER_TRIAL=3', 'DATA.AUTOBATCH.STEPS_PER_TRIAL_VAL=3', 'TRAIN.AMP', 'bf16']

    Returns:
        The options, the tokens for `load_config`, and one sentence for each problem.
    """
    options, rest, problems = Options(), list[str](), list[str]()
    tokens = list(argv)
    while tokens:
        name, has_value, value = tokens[0].partition("=")
        if name in _SWITCHES and has_value:
            problems.append(f"{name}: takes no value")
        elif name in _SWITCHES:
            setattr(options, _SWITCHES[name], True)
        elif name in _READERS:
            if not has_value and len(tokens) > 1 and not tokens[1].startswith("--"):
                value = tokens.pop(1)
            try:
                rest += _take(options, name, value)
            except ValueError as error:
                problems.append(f"{name}: {error}")
        elif name.startswith("--") and name not in FLAGS and "." not in name:
            problems.append(f"{name}: no such option{suggest(name, [*_READERS, *_SWITCHES, *FLAGS])}")
        else:
            rest.append(tokens[0])
        tokens.pop(0)
    return options, rest, problems


def _take(options: Options, name: str, text: str) -> list[str]:
    """Read an option's value into the options, or into overrides of the keys that it stands for."""
    if not text:
        raise ValueError("needs a value; --help shows examples")
    value = _READERS[name](text)
    if name not in _KEYS:
        setattr(options, name[2:], value)
    return [f"DATA.AUTOBATCH.{key}={value}" for key in _KEYS.get(name, ())]


def _fractions(text: str) -> list[float]:
    found: set[float] = set()
    for part in text.split(","):
        try:
            fraction = float(part)
        except ValueError:
            raise ValueError(f"{part!r} is not a number; give shares of the memory such as 0.6,0.8") from None
        if not 0 < fraction <= 1:
            raise ValueError(f"{part} is outside (0, 1]; give shares of the device's memory such as 0.6,0.8")
        found.add(fraction)
    return sorted(found)


def _modes(text: str) -> list[Mode]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MODES:
            hint = suggest(name, MODES)
            raise ValueError(f"{name!r} is not a mode{hint}; give train, val or train,val")
    return [mode for mode in MODES if mode in names]


def _path(endings: tuple[str, ...]) -> Callable[[str], Path]:
    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in endings:
            ending = f"the ending {path.suffix}" if path.suffix else "no ending"
            raise ValueError(f"{text!r} has {ending}; the ending says the format: {', '.join(endings)}")
        return path

    return read


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a positive number of GiB")
    return value


def _strategy(text: str) -> str:
    if text not in STRATEGIES:
        raise ValueError(f"{text!r} is not one of {', '.join(STRATEGIES)}{suggest(text, STRATEGIES)}")
    return text


_SWITCHES = {"--throughput": "throughput", "--remedies": "remedies"}
_READERS: dict[str, Callable[[str], Any]] = {
    "--fractions": _fractions,
    "--modes": _modes,
    "--output": _path(TABLE_ENDINGS),
    "--plot": _path(PLOT_ENDINGS),
    "--steps": _count,
    "--min-bs": _count,
    "--max-bs": _count,
    "--strategy": _strategy,
    "--memory-limit-gb": _gib,
}
_KEYS = {
    "--steps": ("STEPS_PER_TRIAL", "STEPS_PER_TRIAL_VAL"),
    "--min-bs": ("MIN_BATCH_SIZE", "MIN_BATCH_SIZE_VAL"),
    "--max-bs": ("MAX_BATCH_SIZE", "MAX_BATCH_SIZE_VAL"),
    "--strategy": ("STRATEGY",),
    "--memory-limit-gb": ("MEMORY_LIMIT_GB",),
}
