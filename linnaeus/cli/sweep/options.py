"""The command line of `linnaeus sweep`. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from linnaeus.autobatch.predict.gpus import Gpu
from linnaeus.cli.analyze.options import read_gpus
from linnaeus.cli.parser import CommandParser, check_files, read_choice, read_count, read_plot
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError
from linnaeus.files import CHECKPOINTS, RUN_FILES
from linnaeus.launchers.interface import LaunchOptions

if TYPE_CHECKING:
    from linnaeus.cli.sweep.grid import Combination, Grid
    from linnaeus.cli.sweep.search import SearchPlan
    from linnaeus.cli.sweep.space import Space

WARMUP_FRACTION = 0.25
"""No run is pruned in this fraction of the epochs."""
DESCRIPTION = """\
Trains once for each combination of values and compares the results: one run after another, several at once
on this machine, or as jobs of SLURM.

A key with several values is swept; there is one run for each combination:
  KEY=a,b,c                    these values
  KEY=range(start,stop[,step]) start, start + step, ... below stop
  KEY=[a,b]  KEY='a,b'         one value: a list, a text
  KEY=interval(low,high)       with --search optuna: any value between them
This is Hydra's grammar, with choice(), sort(), shuffle() and tag() too. Lists work for presets: model=a,b
"""
DETAILS = """\
Each run has a process of its own and a folder, <EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>/<values>, with all
its output in logs/output.txt. Every combination is checked before the first run starts. A run that fails does
not stop the others. Called again, a sweep skips the runs that have finished with the same configuration,
resumes those that were interrupted, and repeats those that failed. The figures are in sweep.json and
sweep.csv beside the runs.

With --jobs N, N runs train at once and each has its share of the GPUs and CPU cores; a run with several GPUs
has a process for each. With --launcher slurm the runs are an array of jobs, at most N at once. The runs do
not depend on the sweep: the same command joins running ones, from any shell, and --status only looks. Ctrl-C
ends local runs with a checkpoint (twice: at once), and asks before it cancels jobs.

examples:
  linnaeus sweep --cfg my_exp.yaml DATA.BATCH_SIZE=32,64,128
  linnaeus sweep --cfg my_exp.yaml --jobs 4 'EXPERIMENT.SEED=range(0,8)'
  linnaeus sweep --cfg my_exp.yaml EXPERIMENT.SEED=0,1 --launcher slurm --slurm gpus-per-node=4 time=4:00:00
  linnaeus sweep --cfg my_exp.yaml --search optuna --trials 40 OPTIMIZER.LR='interval(1e-4,1e-1)'
  linnaeus sweep --status runs/my_exp
  linnaeus sweep --cfg my_exp.yaml DATA.BATCH_SIZE=32,128 OPTIMIZER.LR=1e-3,2e-3 --plot sweep.html
  linnaeus sweep --cfg my_exp.yaml model=resnet18,vit_tiny 'EXPERIMENT.SEED=range(0,3)'

exit codes: 0 all runs ended well, 1 some did not, 2 configuration or option, 3 nothing is predicted to fit,
130 interrupted
"""


@dataclass
class Options:
    """What is compared, where the picture goes, and where the runs run.

    Attributes:
        metric: name of a validation metric; None for the one that decides which checkpoint is best.
        plot: picture; None for `sweep.png` beside the runs.
        predict_gpu: the GPUs for which batch sizes are predicted before the first run starts.
        status: only show the status of the runs.
        folder: of the sweep to show, where it is named instead of its command line.
        launch: where the runs run.
        search: name of the method that chooses the runs; None for a grid.
        trials: how many trials a search has.
        no_prune: whether a search lets all runs train to their end.
        plan: what to search, from the options and the keys.
    """

    metric: str | None = None
    plot: Path | None = None
    predict_gpu: list[Gpu] = field(default_factory=list)
    status: bool = False
    folder: Path = Path()
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    search: str | None = None
    trials: int | None = None
    no_prune: bool = False
    plan: SearchPlan | None = None

    def only_for_search(self) -> list[str]:
        """The options given that only a search has."""
        return ["--trials"] * (self.trials is not None) + ["--no-prune"] * self.no_prune


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
        A text to print, or the arguments of the session's `run`: the runs are in their order. There are none
        for `--status FOLDER`.

    Raises:
        ConfigError: lists everything that is wrong, or the folder is that of a run. A problem that only some
            combinations have names one of them.
    """
    # Here and not above: the shell's completion reads the options, and does not wait for OmegaConf and YAML.
    from linnaeus.cli.sweep.grid import read_grid
    from linnaeus.cli.sweep.space import Space, read_space
    from linnaeus.config.load import to_yaml

    options = Options()
    rest, problems = PARSER.words(argv, options)
    if options.status and len(rest) == 1 and "=" not in rest[0] and not rest[0].startswith("-"):
        return _status_of(options, Path(rest[0]), problems), []
    if options.status and not rest and not problems:
        raise ConfigError("--status: give the folder of a sweep, such as runs/my_exp, or its whole command")
    if options.search is None:
        problems += [f"{name}: is for --search optuna" for name in options.only_for_search()]
        grid = read_grid(rest)
        found: Grid | Space = grid
        points = grid.combinations
    else:
        found = space = read_space(rest)
        points = list(space.corners()) if space.axes else []
        if options.trials is None:
            problems.append("--trials: say how many runs the search may have, such as --trials 40")
    if options.status and found.line.stray:
        raise ConfigError("--status: is followed by the folder of a sweep alone, or by keys without a folder")
    problems += found.line.problems + found.problems
    runs = _planned(points, problems)
    if problems:
        raise ConfigError(problems)
    if found.line.print_config:
        return "---\n".join(f"# {run.combination.title}\n{to_yaml(run.config)}" for run in runs)
    if isinstance(found, Space):
        options.plan = _search_plan(options, found, runs[0].config)
    folder = runs[0].folder.parent
    if options.status:  # the runs that a search has chosen are in its folder alone
        return (options, runs) if options.plan is None else (_status_of(options, folder, []), [])
    check_files({"--plot": options.plot})
    _check_folder(folder, is_search=isinstance(found, Space))
    return options, runs


def _check_folder(folder: Path, *, is_search: bool) -> None:
    """Refuse the folder of a run, or of the other kind of sweep.

    Raises:
        ConfigError: it is one.
    """
    from linnaeus.files import STUDY, SWEEP

    if any((folder / name).exists() for name in (*RUN_FILES, CHECKPOINTS)):
        raise ConfigError(
            f"EXPERIMENT.NAME: {folder} is the folder of a run, and a sweep keeps its runs in one of its "
            "own: give the sweep another name"
        )
    has_study = (folder / STUDY).exists()
    if has_study != is_search and (has_study or (folder / SWEEP).exists()):
        raise ConfigError(
            f"EXPERIMENT.NAME: {folder} is the folder of a {'search' if has_study else 'grid'}; give this "
            "sweep another name"
        )


def plan_run(combination: Combination) -> PlannedRun:
    """The run of a combination.

    Raises:
        ConfigError: lists everything that is wrong with its configuration.
    """
    from linnaeus.config.load import load_config

    return PlannedRun(combination, _with_run_folder(load_config(combination.argv).config, combination))


def _planned(combinations: Sequence[Combination], problems: list[str]) -> list[PlannedRun]:
    """The runs of combinations; what is wrong with some only names one of them."""
    runs = []
    combinations_with: dict[str, list[Combination]] = {}
    for combination in combinations:
        try:
            runs.append(plan_run(combination))
        except ConfigError as error:
            for problem in error.problems:
                combinations_with.setdefault(problem, []).append(combination)
    for problem, wrong in combinations_with.items():
        is_everywhere = len(wrong) == len(combinations)
        problems.append(problem if is_everywhere else f"{problem} with {wrong[0].title}")
    return runs


def _search_plan(options: Options, space: Space, config: Config) -> SearchPlan:
    from linnaeus.cli.sweep.search import SearchPlan

    return SearchPlan(
        space=space,
        num_trials=options.trials or 0,
        plan=plan_run,
        seed=config.EXPERIMENT.SEED,
        metric=options.metric,
        prune=not options.no_prune,
        warmup_epochs=max(int(config.TRAIN.EPOCHS * WARMUP_FRACTION), 1),
    )


def _status_of(options: Options, folder: Path, problems: list[str]) -> Options:
    """The options with the folder of `--status FOLDER`.

    Raises:
        ConfigError: there is no sweep in the folder, or another option is wrong.
    """
    from linnaeus.files import SWEEP

    if not folder.exists():
        problems.append(f"--status: there is no folder {folder}")
    elif not (folder / SWEEP).exists():
        problems.append(f"--status: {folder} is not the folder of a sweep: it has no {SWEEP}")
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(options, folder=folder)


def _with_run_folder(config: Config, combination: Combination) -> Config:
    """The configuration with the run's own folder below the sweep's; a run that is there is resumed."""
    sweep = str(Path(config.EXPERIMENT.OUTPUT_DIR) / config.EXPERIMENT.NAME)
    experiment = dataclasses.replace(config.EXPERIMENT, NAME=combination.name, OUTPUT_DIR=sweep)
    train = dataclasses.replace(config.TRAIN, AUTO_RESUME=True)
    return dataclasses.replace(config, EXPERIMENT=experiment, TRAIN=train)


PARSER = CommandParser(
    "sweep",
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the configuration of each run, and exit",
)
PARSER.option(
    "--metric", "NAME", str,
    "validation metric that is compared; default: top-1 of the finest rank, or the loss",
)  # fmt: skip
PARSER.option(
    "--plot", "FILE", read_plot,
    "picture: .png, .svg or .html by its ending; default sweep.png beside the runs",
)  # fmt: skip
PARSER.option(
    "--jobs", "N", read_count, "how many runs go on at once; default: one on this machine, all on SLURM",
    launches=True,
)  # fmt: skip
PARSER.option(
    "--search", "optuna", partial(read_choice, ["optuna"]),
    "choose the values of each run by the results of those before, in place of all combinations",
)  # fmt: skip
PARSER.option("--trials", "N", read_count, "runs of a search in all, repeated points included")
PARSER.switch(
    "--no-prune",
    "let a search's runs train to their end even if they are worse than the median of the others",
)
PARSER.switch("--status", "show how far the runs are; the folder of a sweep may be all that follows")
PARSER.option(
    "--predict-gpu", "NAME,...", read_gpus,
    "show the batch sizes predicted for these GPUs, which need not be here, before a run starts; start none "
    "where nothing is predicted to fit on any of them",
)  # fmt: skip
