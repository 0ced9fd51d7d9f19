"""The command line of `linnaeus sweep`. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.commands.analyze.options import read_gpus
from linnaeus.commands.options import CommandParser, check_files, read_plot
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.files import CHECKPOINTS, RUN_FILES
from linnaeus.memory.gpus import Gpu

if TYPE_CHECKING:
    from linnaeus.commands.sweep.grid import Combination

SHARED = "autobatch"
"""The folder in a sweep's folder in which its runs leave the batch sizes found for each other."""
DESCRIPTION = """\
Trains once for each combination of values, one run after another, and compares their results.

A key with several values is swept; there is one run for each combination:
  KEY=a,b,c                    these values
  KEY=range(start,stop[,step]) start, start + step, ... below stop
  KEY=[a,b]  KEY='a,b'         one value: a list, a text
This is Hydra's grammar, with choice(), sort(), shuffle() and tag() too. Lists work for presets: model=a,b
"""
DETAILS = """\
Each run has a process of its own and a folder, <EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>/<values>, with all
its output in logs/output.txt. Every combination is checked before the first run starts. A run that fails does
not stop the others. Called again, a sweep skips the runs that have finished with the same configuration,
resumes those that were interrupted, and repeats those that failed. The figures are in sweep.json and
sweep.csv beside the runs.

examples:
  linnaeus sweep --cfg my_exp.yaml DATA.BATCH_SIZE=32,64,128
  linnaeus sweep --cfg my_exp.yaml DATA.BATCH_SIZE=32,128 OPTIMIZER.LR=1e-3,2e-3 --plot sweep.html
  linnaeus sweep --cfg my_exp.yaml model=resnet18,vit_tiny 'EXPERIMENT.SEED=range(0,3)'

exit codes: 0 all runs ended well, 1 some failed, 2 configuration or option, 3 nothing is predicted to fit,
130 interrupted
"""


@dataclass
class Options:
    """What is compared, and where the picture goes.

    Attributes:
        metric: name of a validation metric; None for the one that decides which checkpoint is best.
        plot: picture; None for `sweep.png` beside the runs.
        predict_gpu: the GPUs for which batch sizes are predicted before the first run starts.
    """

    metric: str | None = None
    plot: Path | None = None
    predict_gpu: list[Gpu] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedRun:
    """One run before it has begun.

    Attributes:
        combination: its point of the grid.
        config: its configuration, with a name and a folder of its own.
    """

    combination: Combination
    config: Config

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return Path(self.config.EXPERIMENT.OUTPUT_DIR) / self.config.EXPERIMENT.NAME


def read(argv: Sequence[str]) -> str | tuple[Options, list[PlannedRun]]:
    """Read the tokens after `sweep`, and check every combination as a configuration.

    Returns:
        A text to print, or the arguments of the session's `run`: the runs are in their order.

    Raises:
        ConfigError: lists everything that is wrong, or the folder is that of a run. A problem that only some
            combinations have names one of them.
    """
    # Here and not above: the shell's completion reads the options, and does not wait for OmegaConf and YAML.
    from linnaeus.commands.sweep.grid import read_grid
    from linnaeus.config.load import load_config, to_yaml

    options = Options()
    rest, problems = PARSER.take(argv, options)
    grid = read_grid(rest)
    if grid.line.show_help:
        return PARSER.format_help()
    problems += grid.line.problems + grid.problems
    runs = []
    combinations_with: dict[str, list[Combination]] = {}
    for combination in grid.combinations:
        try:
            runs.append(PlannedRun(combination, _placed(load_config(combination.argv).config, combination)))
        except ConfigError as error:
            for problem in error.problems:
                combinations_with.setdefault(problem, []).append(combination)
    for problem, combinations in combinations_with.items():
        is_everywhere = len(combinations) == len(grid.combinations)
        problems.append(problem if is_everywhere else f"{problem} with {combinations[0].title}")
    if problems:
        raise ConfigError(problems)
    if grid.line.print_config:
        return "---\n".join(f"# {run.combination.title}\n{to_yaml(run.config)}" for run in runs)
    check_files({"--plot": options.plot})
    folder = runs[0].folder.parent
    if any((folder / name).exists() for name in (*RUN_FILES, CHECKPOINTS)):
        raise ConfigError(
            f"EXPERIMENT.NAME: {folder} is the folder of a run, and a sweep keeps its runs in one of its "
            "own: give the sweep another name"
        )
    return options, runs


def _placed(config: Config, combination: Combination) -> Config:
    """The configuration with the run's own folder below the sweep's; a run that is there is resumed."""
    experiment = dataclasses.replace(
        config.EXPERIMENT,
        NAME=combination.name,
        OUTPUT_DIR=str(Path(config.EXPERIMENT.OUTPUT_DIR) / config.EXPERIMENT.NAME),
    )
    train, data, autobatch = config.TRAIN, config.DATA, config.DATA.AUTOBATCH
    shared = autobatch.SHARED_FOLDER
    if shared is None:
        shared = str(Path(experiment.OUTPUT_DIR) / SHARED)
    return dataclasses.replace(
        config,
        EXPERIMENT=experiment,
        TRAIN=dataclasses.replace(train, AUTO_RESUME=True),
        DATA=dataclasses.replace(data, AUTOBATCH=dataclasses.replace(autobatch, SHARED_FOLDER=shared)),
    )


PARSER = CommandParser(
    "sweep",
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the configuration of each run, and exit",
)
PARSER.option(
    "--metric", "NAME", str,
    "validation metric that is compared; default: top-1 of the finest level, or the loss",
)  # fmt: skip
PARSER.option(
    "--plot", "FILE", read_plot,
    "picture: .png, .svg or .html by its ending; default sweep.png beside the runs",
)  # fmt: skip
PARSER.option(
    "--predict-gpu", "NAME,...", read_gpus,
    "show the batch sizes predicted for these GPUs, which need not be here, before a run starts; start none "
    "where nothing is predicted to fit on any of them",
)  # fmt: skip
