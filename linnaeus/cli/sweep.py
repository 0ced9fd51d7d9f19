"""`linnaeus sweep`: write a sweep's folder, start workers and show the table."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnaeus.cli.parser import CommandParser, Options, choice, option, read_count
from linnaeus.runtime.errors import EXIT_INTERRUPTED, EXIT_SOME_FAILED, ConfigError, LinnaeusError
from linnaeus.runtime.words import counted
from linnaeus.sweep.slurm import check_sbatch, submit, workers_script

if TYPE_CHECKING:
    from rich.console import Console

    from linnaeus.cli.runs import Comparison
    from linnaeus.config.schema import Config
    from linnaeus.sweep.folder import Plan, Sweep
    from linnaeus.sweep.local import Share
    from linnaeus.sweep.search import Study
    from linnaeus.sweep.space import Combination

DESCRIPTION = """\
Trains once for each combination of values and compares the results. Runs train one after another, several at
once on this machine, or as SLURM jobs.

A key with several values is swept, with one run for each combination:
  KEY=a,b,c                    these values
  KEY=range(start,stop[,step]) start, start + step, ... below stop
  KEY=[a,b]  KEY='a,b'         a single value: a list, a text
  KEY=interval(low,high)       with --search optuna: any value between them
This is Hydra's grammar, including choice(), sort(), shuffle() and tag(). Presets work too: model=a,b
"""
DETAILS = """\
A sweep is a folder, <EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>. It holds sweep.json with the list of runs, and
a folder <values> for each run, with its output in logs/output.txt. Linnaeus checks every combination before
the first run starts. Workers train the runs. --jobs N starts N workers on this machine and divides its GPUs
and CPU cores among them. With --launcher slurm the workers are an array of N jobs. linnaeus work FOLDER
starts one more, on any machine that sees the folder. If a worker dies, another one resumes its run.

The same command again skips finished runs, resumes interrupted ones, and tries failed ones once more. In a
search, a failed run counts as a trial and is not repeated. Other values need another EXPERIMENT.NAME. Ctrl-C
ends the workers started here with checkpoints (twice: at once); SLURM jobs keep running. The metrics are in
sweep.csv, figures.json and sweep.png in the sweep's folder.

examples:
  linnaeus sweep --cfg my_exp.yaml DATA.BATCH_SIZE=32,64,128
  linnaeus sweep --cfg my_exp.yaml --jobs 4 'EXPERIMENT.SEED=range(0,8)'
  linnaeus sweep --cfg my_exp.yaml EXPERIMENT.SEED=0,1 --launcher slurm --slurm gpus-per-node=4 time=4:00:00
  linnaeus sweep --cfg my_exp.yaml --search optuna --trials 40 OPTIMIZER.LR='interval(1e-4,1e-1)'
  linnaeus sweep --status runs/my_exp
  linnaeus sweep --cfg my_exp.yaml model=resnet18,vit_tiny 'EXPERIMENT.SEED=range(0,3)'

exit codes: 0 all runs finished or were pruned, 1 some did not, 2 configuration or option, 130 interrupted
"""
JOBS_OF_A_SEARCH = 4
"""Default number of a search's workers on SLURM: the more at once, the less each learns from the others."""
LOOK_S, LOOK_AT_QUEUE_S = 1.0, 10.0
"""Seconds between two polls of local workers, and of SLURM jobs."""
METRIC = re.compile(r"loss|consistent|(top1|top5|macro|map|f1)/.+")
"""Names of validation metrics."""
UNFINISHED = ("running", "interrupted", "not run")
logger = logging.getLogger("linnaeus.sweep")


def _read_metric(text: str) -> str:
    if not METRIC.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a metric; use loss, consistent, top1/LEVEL, top5/LEVEL, macro/LEVEL, map/LEVEL "
            "or f1/LEVEL"
        )
    return text


@dataclass
class SweepOptions(Options):
    """Options of `linnaeus sweep`; None if not given."""

    metric: str | None = option(
        "validation metric to compare; default: top-1 of the finest level, or the loss",
        "NAME",
        _read_metric,
    )
    jobs: int | None = option(
        "number of workers, each with one run at a time; default: 1, with all GPUs; on SLURM one for each "
        "run (4 in a search)",
        "N",
        read_count,
        launches=True,
    )
    search: str | None = choice(
        "choose the values of each run from earlier results, instead of all combinations",
        ["optuna"],
    )
    trials: int | None = option(
        "total number of a search's runs, including repeated points",
        "N",
        read_count,
        needs="--search",
    )
    no_prune: bool = option(
        "do not stop runs of a search that are worse than the median of the others",
        needs="--search",
    )
    status: bool = option("show the progress of the sweep in a folder")


def read(argv: Sequence[str]) -> str | tuple[SweepOptions, Sweep, list[Plan]]:
    """Read the tokens after `sweep` and check the configuration of every combination.

    Returns:
        A text to print, or the arguments of `run`: the sweep and its runs in order (the corners of a search;
        none with `--status`).

    Raises:
        ConfigError: lists all mistakes, or the folder is a run directory. The message of a problem that only
            some combinations have names one of them.
    """
    # Imported here, so that shell completion does not wait for OmegaConf and YAML.
    from linnaeus.config.dump import to_yaml
    from linnaeus.sweep.folder import Sweep
    from linnaeus.sweep.space import read_space

    options, rest, problems = PARSER.words(argv)
    if options.status:
        if len(rest) != 1 or "=" in rest[0]:
            problems.append("--status: needs the folder of one sweep, such as runs/my_exp")
        if problems:
            raise ConfigError(problems)
        return options, Sweep.read(Path(rest[0]).expanduser()), []
    space = read_space(rest, is_search=options.search is not None)
    line, points = space.line, list(space.grid() if options.search is None else space.corners())
    problems += line.problems + space.problems
    if options.search is not None:
        if find_spec("optuna") is None:
            problems.append("--search optuna: needs Optuna: run pip install 'linnaeus[sweep]'")
        if options.trials is None and not any("--trials" in each for each in problems):
            problems.append(
                "--trials: is missing; set the number of runs of the search, such as --trials 40"
            )
    is_here = options.launcher != "slurm" and not line.print_config
    plans = _plans(points, problems, references=is_here)
    if problems:
        raise ConfigError(problems)
    if line.print_config:
        return "---\n".join(f"# {point.title}\n{to_yaml(config)}" for point, config in plans)
    folder = Path(plans[0][1].EXPERIMENT.OUTPUT_DIR)
    entries = plans if options.search is None else plans[:1]
    sweep = Sweep.of(
        folder,
        rest,
        entries,
        metric=options.metric,
        trials=options.trials,
        prune=not options.no_prune,
    )
    if not options.dry_run:
        sweep.check()
    return options, sweep, plans


def _plans(
    combinations: Sequence[Combination], problems: list[str], *, references: bool
) -> list[Plan]:
    """Return the runs of all combinations, and add to `problems`. See `read` for their form."""
    from linnaeus.sweep.folder import plan_run

    plans: list[Plan] = []
    compositions: dict[Any, Any] = {}
    combinations_with: dict[str, list[Combination]] = {}
    for combination in combinations:
        try:
            # All runs share one folder, even if a swept key changes the name of the sweep.
            folder = plans[0][1].EXPERIMENT.OUTPUT_DIR if plans else None
            config = plan_run(combination, folder, references=references, compositions=compositions)
            plans.append((combination, config))
            for problem in _ineffective(combination, config):
                combinations_with.setdefault(problem, []).append(combination)
        except ConfigError as error:
            for problem in error.problems:
                combinations_with.setdefault(problem, []).append(combination)
    for problem, wrong in combinations_with.items():
        is_everywhere = len(wrong) == len(combinations)
        problems.append(problem if is_everywhere else f"{problem} with {wrong[0].title}")
    return plans


def _ineffective(combination: Combination, config: Config) -> list[str]:
    """Name swept batch sizes that AutoBatch would replace."""
    searches = config.DATA.AUTOBATCH
    replaced = {
        "DATA.BATCH_SIZE": ("DATA.AUTOBATCH.ENABLED", searches.ENABLED),
        "DATA.BATCH_SIZE_VAL": ("DATA.AUTOBATCH.ENABLED_VAL", searches.ENABLED_VAL),
    }
    return [
        f"{key}: is swept, but AutoBatch replaces it in every run ({switch} True); add {switch}=False"
        for key, (switch, is_on) in replaced.items()
        if is_on and key in combination.values
    ]


def run(options: SweepOptions, sweep: Sweep, plans: Sequence[Plan]) -> int:
    """Start workers, report their progress, show the table and write the files.

    Returns:
        The exit code: 0 all runs finished or were pruned, 1 some did not, 130 interrupted.

    Raises:
        ConfigError: the folder cannot be written to, or belongs to another sweep; or no run has the metric.
        LostFolderError: the folder was renamed or deleted while its runs trained.
        LinnaeusError: sbatch refused the job.
    """
    from linnaeus.runtime.console import make_console
    from linnaeus.runtime.log import close_logging, set_up_logging
    from linnaeus.runtime.signals import handled

    console, is_on_slurm = make_console(), options.launcher == "slurm"
    if not options.dry_run:  # its output is a script
        set_up_logging(None, rank=0, console=console)
    received: list[int] = []  # signals, recorded and acted on later
    try:
        if options.status:
            table = _comparison(options, sweep, _study(sweep))
            table.show(console)
            _check_metric(table)
            return 0
        shares = [] if is_on_slurm else _shares(options, plans)
        if options.dry_run:
            text = _script(options, sweep) if is_on_slurm else _dry_run(sweep, shares)
            console.print(text, soft_wrap=True, end="")
            return 0
        if is_on_slurm:
            check_sbatch()
        sweep.write()
        sweep.repeat_failed()
        study = _study(sweep)
        with handled((signal.SIGINT, signal.SIGTERM), lambda number, _: received.append(number)):
            if is_on_slurm:
                _watch_jobs(options, sweep, study, received)
            else:
                _watch_workers(options, sweep, study, shares, received)
        sweep.check_is_there()
        table = _comparison(options, sweep, study)
        _report(table, sweep, console)
        if study is not None and (found := study.best()) is not None:
            logger.info("best: %s", found)
    finally:
        close_logging()
    _check_metric(table)
    if received:
        return EXIT_INTERRUPTED
    is_well = {row.state.status for row in table.rows} <= {"finished", "pruned"}
    return 0 if table.rows and is_well else EXIT_SOME_FAILED


# Table and files.


def _study(sweep: Sweep) -> Study | None:
    """Return the study of a search; None for a grid."""
    if sweep.trials is None:
        return None
    from linnaeus.sweep.search import Study

    return Study(sweep)


def _comparison(options: SweepOptions, sweep: Sweep, study: Study | None) -> Comparison:
    """Return the current runs of a sweep side by side."""
    from linnaeus.cli.runs import Comparison, read_run

    rows = [read_run(run.folder, run.values) for run in sweep.known_runs(study)]
    return Comparison(rows, options.metric or sweep.metric)


def _check_metric(table: Comparison) -> None:
    """Raise `ConfigError` if runs have metrics but not the wanted one."""
    if table.metrics and (problem := table.unknown_metric):
        raise ConfigError(f"--metric: {problem}")


def _report(table: Comparison, sweep: Sweep, console: Console) -> None:
    """Show the metrics, and write them to the files."""
    from linnaeus.cli.plots import draw_runs

    table.show(console)
    if not table.rows:
        return
    try:
        for name in ("figures.json", "sweep.csv"):
            table.save(sweep.folder / name)
        draw_runs(table, sweep.folder / "sweep.png")
        logger.info("written: %s, sweep.csv, sweep.png", sweep.folder.resolve() / "figures.json")
    except (OSError, LinnaeusError) as error:  # a full disk
        logger.warning("the metrics cannot be written: %s", error)
    if left := sum(row.state.status in UNFINISHED for row in table.rows):
        logger.info(
            "%s left; run the same command again to resume, or linnaeus work %s to add a worker",
            counted(left, "run"),
            shlex.quote(str(sweep.folder)),
        )


def watch(
    options: SweepOptions,
    sweep: Sweep,
    study: Study | None,
    received: list[int],
    is_alive: Callable[[], bool],
    pause_s: float,
) -> None:
    """Log each run that starts or ends, until all workers are done.

    Also wait for workers started elsewhere while they train. If a validated run lacks the metric of
    `--metric`, end the workers started here as after Ctrl-C.

    Args:
        options: hold `--metric`.
        sweep: the sweep to watch.
        study: the study of a search.
        received: signals so far; the first one ends the wait for workers started elsewhere.
        is_alive: returns whether a worker started here is alive.
        pause_s: seconds between two polls.
    """
    from linnaeus.runtime.run_folder import read_state

    known: dict[Path, str] = {}
    is_metric_known = options.metric is None
    while True:
        is_over = not is_alive()
        for run in sweep.known_runs(study):
            state = read_state(run.folder)
            if known.get(run.folder, "not run") != state.status:
                reason = f": {state.reason}" if state.reason else ""
                logger.info("%s: %s%s", run.title, state.status, reason)
            known[run.folder] = state.status
        if is_over and (received or "running" not in known.values()):
            return
        if not is_metric_known and not received:
            table = _comparison(options, sweep, study)
            is_metric_known = bool(table.metrics)
            if is_metric_known and table.unknown_metric:
                received.append(signal.SIGINT)
        time.sleep(pause_s)


# Workers on this machine.


def _shares(options: SweepOptions, plans: Sequence[Plan]) -> list[Share]:
    """Divide this machine among its workers."""
    from linnaeus.sweep.local import divide, visible_gpus

    num_jobs = options.jobs or 1
    is_cpu = all(config.EXPERIMENT.DEVICE == "cpu" for _, config in plans)
    gpus = [] if is_cpu else visible_gpus()
    if 0 < len(gpus) < num_jobs:
        logger.warning(
            "--jobs: %d runs share the memory of %s; limit AutoBatch in each "
            "(DATA.AUTOBATCH.MEMORY_LIMIT_GB) or start fewer",
            num_jobs,
            counted(len(gpus), "GPU"),
        )
    return divide(num_jobs, gpus, sorted(os.sched_getaffinity(0)) if num_jobs > 1 else [])


def _dry_run(sweep: Sweep, shares: Sequence[Share]) -> str:
    """Return the list of runs and the command of each worker."""
    runs = [run.title for run in sweep.grid()]
    if sweep.trials is not None:
        runs = [f"{sweep.trials} trials with values chosen by Optuna"]
    lines = [f"# {counted(len(shares), 'worker')} for these runs:", *(f"#   {run}" for run in runs)]
    for share in shares:
        env = [f"{name}={value}" for name, value in share.env().items()]
        lines.append(shlex.join([*env, *share.command(sweep.folder)]))
    return "\n".join(lines) + "\n"


def _watch_workers(
    options: SweepOptions,
    sweep: Sweep,
    study: Study | None,
    shares: Sequence[Share],
    received: list[int],
) -> None:
    """Start workers on this machine, watch them and forward signals."""
    from linnaeus.sweep.local import start_workers, worker_log

    workers, passed_on = start_workers(sweep.folder, shares), list[int]()

    def is_alive() -> bool:
        alive = [worker for worker in workers if worker.poll() is None]
        for number in received[len(passed_on) :]:
            passed_on.append(number)
            for worker in alive:
                worker.send_signal(signal.SIGINT)
        return bool(alive)

    watch(options, sweep, study, received, is_alive, LOOK_S)
    for number, worker in enumerate(workers, start=1):
        if worker.returncode not in (0, EXIT_SOME_FAILED, EXIT_INTERRUPTED):
            sweep.check_is_there()
            log = worker_log(sweep.folder, number)
            last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            logger.warning(
                "worker %d ended with code %d: %s (%s)", number, worker.returncode, last, log
            )


# Workers on SLURM.


def _script(options: SweepOptions, sweep: Sweep) -> str:
    """Return the job script of the array of workers."""
    num_runs = len(sweep.runs) if sweep.trials is None else min(JOBS_OF_A_SEARCH, sweep.trials)
    return workers_script(sweep.folder, options.slurm, options.jobs or num_runs)


def _watch_jobs(
    options: SweepOptions, sweep: Sweep, study: Study | None, received: list[int]
) -> None:
    """Submit an array of workers and watch it.

    Raises:
        LinnaeusError: sbatch refused the job.
    """
    from linnaeus.runtime.run_folder import is_queued

    number = submit(sweep.folder / "slurm", _script(options, sweep))
    logger.info(
        "submitted as SLURM job %s; linnaeus sweep --status %s shows its runs, scancel %s ends them",
        number,
        shlex.quote(str(sweep.folder)),
        number,
    )

    def is_alive() -> bool:
        return not received and is_queued(number, now=True)

    watch(options, sweep, study, received, is_alive, LOOK_AT_QUEUE_S)
    if received:
        logger.info(
            "SLURM job %s keeps running; scancel %s ends it with checkpoints", number, number
        )


PARSER = CommandParser(
    "sweep",
    SweepOptions,
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the configuration of each run, and exit",
)
