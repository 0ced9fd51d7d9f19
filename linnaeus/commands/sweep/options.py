"""The command line of `linnaeus sweep`. Pure: no torch, and no file is read but the `--cfg` file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from linnaeus.commands.options import PLOT_ENDINGS, Grammar, read_path, take_options
from linnaeus.commands.sweep.grid import Combination, read_grid
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError

HELP = """\
Trains once for each combination of values, one run after another, and compares what the runs come to.

usage: linnaeus sweep [--cfg FILE] [options] [group=preset ...] [KEY VALUE | KEY=VALUE ...]
       python -m linnaeus.main sweep ...

A key with several values is swept; there is one run for each combination:
  KEY=a,b,c                    these values
  KEY=range(start,stop[,step]) start, start + step, ... below stop
  KEY=[a,b]  KEY='a,b'         one value: a list, a text
This is Hydra's grammar, with choice(), sort(), shuffle() and tag() too. Lists work for presets: model=a,b

options:
  --cfg FILE       read a YAML file, as for training
  --metric NAME    validation metric that is compared; default: top-1 of the finest rank, or the loss
  --plot FILE      the picture: .png, .svg or .html by its ending; default sweep.png beside the runs
  --print-config   print the configuration of each run, and exit
  -h, --help       print this text and exit

Each run has a process of its own and a folder, <EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>/<values>, with all
that it says in logs/output.txt. Every combination is checked before the first run starts. A run that fails
does not stop the others. Called again, a sweep leaves out what has ended well with the same configuration,
goes on with what was interrupted, and repeats what failed. The figures are in sweep.json and sweep.csv beside
the runs.

examples:
  linnaeus sweep --cfg my_exp.yaml DATA.BATCH_SIZE=32,64,128
  linnaeus sweep --cfg my_exp.yaml DATA.BATCH_SIZE=32,128 OPTIMIZER.LR=1e-3,2e-3 --plot sweep.html
  linnaeus sweep --cfg my_exp.yaml model=resnet18,vit_tiny 'EXPERIMENT.SEED=range(0,3)'

exit codes: 0 all runs ended well, 1 some failed, 2 configuration or option, 130 interrupted
"""


@dataclass
class Options:
    """What is compared, and where the picture goes.

    Attributes:
        metric: name of a validation metric; None is the one that decides which checkpoint is best.
        plot: a picture; None is `sweep.png` beside the runs.
    """

    metric: str | None = None
    plot: Path | None = None


GRAMMAR = Grammar(readers={"--metric": str, "--plot": read_path(PLOT_ENDINGS)})


@dataclass(frozen=True)
class Planned:
    """One run before it has begun.

    Attributes:
        combination: what it is in the grid.
        config: what it is asked for, with its own name and place.
    """

    combination: Combination
    config: Config

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return Path(self.config.EXPERIMENT.OUTPUT_DIR) / self.config.EXPERIMENT.NAME


@dataclass
class CommandLine:
    """What the tokens after `sweep` ask for.

    Attributes:
        options: of the sweep itself.
        runs: in the order in which they are run; none when help is asked for.
        print_config: print the configurations and exit.
        show_help: print the help and exit.
    """

    options: Options
    runs: list[Planned] = field(default_factory=list)
    print_config: bool = False
    show_help: bool = False


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read the tokens after `sweep`, and check every combination as a configuration.

    Raises:
        ConfigError: lists everything that is wrong; what is wrong with some combinations only names one.
    """
    options = Options()
    rest, problems = take_options(argv, options, GRAMMAR)
    grid = read_grid(rest)
    if grid.line.show_help:
        return CommandLine(options, show_help=True)
    problems += grid.line.problems + grid.problems
    runs = []
    found: dict[str, list[Combination]] = {}
    for combination in grid.combinations:
        try:
            runs.append(Planned(combination, _placed(load_config(combination.argv).config, combination)))
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(combination)
    for problem, combinations in found.items():
        is_everywhere = len(combinations) == len(grid.combinations)
        problems.append(problem if is_everywhere else f"{problem} with {combinations[0].title}")
    if problems:
        raise ConfigError(problems)
    return CommandLine(options, runs, print_config=grid.line.print_config)


def _placed(config: Config, combination: Combination) -> Config:
    """The configuration with the run's own place in the sweep's folder, where it goes on if it was there."""
    experiment = dataclasses.replace(
        config.EXPERIMENT,
        NAME=combination.name,
        OUTPUT_DIR=str(Path(config.EXPERIMENT.OUTPUT_DIR) / config.EXPERIMENT.NAME),
    )
    train = dataclasses.replace(config.TRAIN, AUTO_RESUME=True)
    return dataclasses.replace(config, EXPERIMENT=experiment, TRAIN=train)
