"""`linnaeus sweep`: write the folder of a sweep, start workers and show the table."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from linnaeus.cli.parser import (
    CommandParser,
    Options,
    choice,
    option,
    read_count,
)
from linnaeus.runtime.errors import EXIT_INTERRUPTED, EXIT_SOME_FAILED, ConfigError, LinnaeusError
from linnaeus.runtime.words import counted
from linnaeus.sweep.slurm import LaunchOptions, check_sbatch

if TYPE_CHECKING:
    from rich.console import Console

    from linnaeus.cli.runs import Comparison
    from linnaeus.config.schema import Config
    from linnaeus.sweep.folder import Plan, Sweep, SweepRun
    from linnaeus.sweep.search import Study
    from linnaeus.sweep.space import Combination

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
The sweep is a folder, <EXPERIMENT.OUTPUT_DIR>/<EXPERIMENT.NAME>: sweep.json has its runs, and each run has
a folder <values> below it, with its output in logs/output.txt. Every combination is checked before the first
run starts. Workers take the runs: --jobs N starts N on this machine, each with its share of the GPUs and CPU
cores; with --launcher slurm they are an array of N jobs. linnaeus work FOLDER starts one more, on any machine
that sees the folder. A run whose worker has died is taken over and resumes from its checkpoint.

Called again, the command skips what has finished, resumes what was interrupted, and tries what failed
once more; in a search, a failed run is one of the --trials and is not repeated. Other values need another
EXPERIMENT.NAME. Ctrl-C ends the workers started here, with checkpoints (twice: at once), and leaves jobs of
SLURM. The metrics are in sweep.csv, figures.json and sweep.png beside the runs.

examples:
  linnaeus sweep --cfg my_exp.yaml DATA.BATCH_SIZE=32,64,128
  linnaeus sweep --cfg my_exp.yaml --jobs 4 'EXPERIMENT.SEED=range(0,8)'
  linnaeus sweep --cfg my_exp.yaml EXPERIMENT.SEED=0,1 --launcher slurm --slurm gpus-per-node=4 time=4:00:00
  linnaeus sweep --cfg my_exp.yaml --search optuna --trials 40 OPTIMIZER.LR='interval(1e-4,1e-1)'
  linnaeus sweep --status runs/my_exp
  linnaeus sweep --cfg my_exp.yaml model=resnet18,vit_tiny 'EXPERIMENT.SEED=range(0,3)'

exit codes: 0 all runs ended well, 1 some did not, 2 configuration or option, 130 interrupted
"""
JOBS_OF_A_SEARCH = 4
"""Workers of a search on SLURM by default: the more at once, the less each can learn from the others."""
LOOK_S, LOOK_AT_QUEUE_S = 1.0, 10.0
"""Seconds between two polls of the runs: of local workers, and of SLURM jobs."""
METRIC = re.compile(r"loss|consistent|(top1|top5|macro|map|f1)/.+")
"""Names of validation metrics."""
UNFINISHED = ("running", "interrupted", "not run")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
Thing = TypeVar("Thing")
Watch = Callable[[Callable[[], bool], list[int], float], None]
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
    """Options of `linnaeus sweep`; None where not given."""

    metric: str | None = option(
        "validation metric that is compared; default: top-1 of the finest level, or the loss",
        "NAME",
        _read_metric,
    )
    jobs: None = option(
        "workers, and so runs at once; default: 1 (it uses all GPUs); on SLURM one for each run (4 in a "
        "search)",
        "N",
        read_count,
        launches=True,
    )
    search: str | None = choice(
        "choose the values of each run by the results of those before, in place of all combinations",
        ["optuna"],
    )
    trials: int | None = option(
        "runs of a search in all, repeated points included", "N", read_count, needs="--search"
    )
    no_prune: bool = option(
        "let a search's runs train to their end even if they are worse than the median of the others",
        needs="--search",
    )
    status: bool = option("show how far the runs of the sweep in a folder are")


def read(argv: Sequence[str]) -> str | tuple[SweepOptions, Sweep, list[Plan]]:
    """Read the tokens after `sweep`, and check every combination as a configuration.

    Returns:
        A text to print, or the arguments of `run`: the sweep, and its runs in their order (a search's
        corners; none with `--status`).

    Raises:
        ConfigError: lists everything that is wrong, or the folder is that of a run. A problem that only some
            combinations have names one of them.
    """
    # Here and not above: the shell's completion reads the options, and does not wait for OmegaConf and YAML.
    from linnaeus.config.dump import to_yaml
    from linnaeus.sweep.folder import Sweep
    from linnaeus.sweep.space import read_space

    options, rest, problems = PARSER.words(argv)
    if options.status:
        if len(rest) != 1 or "=" in rest[0]:
            problems.append("--status: give the folder of a sweep, such as runs/my_exp")
        if problems:
            raise ConfigError(problems)
        return options, Sweep.read(Path(rest[0]).expanduser()), []
    space = read_space(rest, is_search=options.search is not None)
    line, points = space.line, list(space.grid() if options.search is None else space.corners())
    problems += line.problems + space.problems
    if options.search is not None:
        if find_spec("optuna") is None:
            problems.append("--search optuna: needs Optuna: pip install 'linnaeus[sweep]'")
        if options.trials is None and not any("--trials" in each for each in problems):
            problems.append("--trials: say how many runs the search may have, such as --trials 40")
    is_here = options.launch.launcher != "slurm" and not line.print_config
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
    if not options.launch.dry_run:
        sweep.check()
    return options, sweep, plans


def _plans(
    combinations: Sequence[Combination], problems: list[str], *, references: bool
) -> list[Plan]:
    """Return the runs of combinations. A problem of only some combinations names one of them."""
    from linnaeus.sweep.folder import plan_run

    plans: list[Plan] = []
    compositions: dict[Any, Any] = {}
    combinations_with: dict[str, list[Combination]] = {}
    for combination in combinations:
        try:
            # One folder for all, also where the name of the sweep follows what is swept.
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
        f"{key}: is swept, but {switch} True replaces it in every run; add {switch}=False"
        for key, (switch, is_on) in replaced.items()
        if is_on and key in combination.values
    ]


def run(options: SweepOptions, sweep: Sweep, plans: Sequence[Plan]) -> int:
    """Start workers, show the table while they work and at the end, and write the files.

    Returns:
        The exit code: 0 all ended well, 1 some did not, 130 interrupted.

    Raises:
        ConfigError: the folder cannot be written to, or is that of another sweep; no run whose status is
            asked for has the metric.
        LostFolderError: the folder was renamed or deleted while its runs trained.
        LinnaeusError: sbatch has refused the job.
    """
    from linnaeus.runtime.console import make_console
    from linnaeus.runtime.log import close_logging, set_up_logging
    from linnaeus.runtime.signals import handled

    console = make_console()
    if not options.launch.dry_run:  # which prints what a shell or sbatch reads
        set_up_logging(None, rank=0, console=console)
    try:
        if options.status:
            table = _comparison(options, sweep, _study(sweep))
            _show(table, console)
            if problem := _missing_metric(table):
                raise ConfigError(problem)
            return 0
        shares = _shares(options.launch, plans)
        if options.launch.dry_run:
            console.print(_dry_run(options, sweep, shares), soft_wrap=True, end="")
            return 0
        is_on_slurm = options.launch.launcher == "slurm"
        if is_on_slurm:
            check_sbatch()
        sweep.write()
        sweep.repeat_failed()
        study = _study(sweep)
        is_known = options.metric is None

        def lacks_metric() -> bool:
            nonlocal is_known
            if is_known:
                return False
            table = _comparison(options, sweep, study)
            is_known = bool(table.metrics)
            return _missing_metric(table) is not None

        watch = partial(_watch, sweep, study, lacks_metric)
        received: list[int] = []  # signals, of which this process only takes note
        with handled((signal.SIGINT, signal.SIGTERM), lambda number, _: received.append(number)):
            if is_on_slurm:
                _watch_jobs(watch, options, sweep, received)
            else:
                _watch_workers(watch, sweep, shares, received)
        sweep.check_is_there()
        table = _comparison(options, sweep, study)
        _report(table, sweep, console)
        if study is not None and (found := study.best()) is not None:
            logger.info("best: %s", found)
    finally:
        close_logging()
    if problem := _missing_metric(table):
        raise ConfigError(problem)
    if received:
        return EXIT_INTERRUPTED
    is_well = {row.state.status for row in table.rows} <= {"finished", "pruned"}
    return 0 if table.rows and is_well else EXIT_SOME_FAILED


# Table and files.


def _study(sweep: Sweep) -> Study | None:
    """The study of a search; None for a grid."""
    if sweep.trials is None:
        return None
    from linnaeus.sweep.search import Study

    return Study(sweep)


def _runs(sweep: Sweep, study: Study | None) -> list[SweepRun]:
    """Return the runs of a sweep: all of a grid, or the trials so far of a search."""
    found = sweep.grid() if study is None else [run for _, run in study.runs()]
    return [*{run.folder: run for run in found}.values()]


def _comparison(options: SweepOptions, sweep: Sweep, study: Study | None) -> Comparison:
    """The runs of a sweep side by side, as they are now."""
    from linnaeus.cli.runs import Comparison, read_run

    rows = []
    for entry in _runs(sweep, study):
        rows.append(row := read_run(entry.folder))
        row.values = entry.values
        row.problems = [each for each in row.problems if "what differs" not in each]  # it is known
    return Comparison(rows, options.metric or sweep.metric)


def _show(table: Comparison, console: Console) -> None:
    console.print(table.table() if table.rows else "no run has begun")
    for sentence in table.sentences():
        console.print(sentence, soft_wrap=True)


def _missing_metric(table: Comparison) -> str | None:
    """Return a sentence if runs have metrics, but none has the wanted one."""
    problem = table.unknown_metric if table.metrics else None
    return problem and f"--metric: {problem}"


def _report(table: Comparison, sweep: Sweep, console: Console) -> None:
    """Show the metrics, and write them to the files."""
    from linnaeus.cli.plots import draw_runs

    _show(table, console)
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
            "%s left; the same command resumes, and linnaeus work %s is one more worker",
            counted(left, "run"),
            shlex.quote(str(sweep.folder)),
        )


def _watch(
    sweep: Sweep,
    study: Study | None,
    lacks_metric: Callable[[], bool],
    goes_on: Callable[[], bool],
    received: list[int],
    pause_s: float,
) -> None:
    """Print a line for each run that begins or ends, until all workers are done.

    Args:
        lacks_metric: returns whether a run was validated without the metric that is compared. The workers
            started here then end as after Ctrl-C.
        goes_on: returns whether a worker started here is alive. Workers started elsewhere are waited for
            while they train.
        received: signals so far; the first one ends the wait for workers started elsewhere.
        pause_s: seconds between two polls.
    """
    from linnaeus.runtime.run_folder import read_state

    known: dict[Path, str] = {}
    while True:
        is_over = not goes_on()
        for run in _runs(sweep, study):
            state = read_state(run.folder)
            if known.get(run.folder, "not run") != state.status:
                reason = f": {state.reason}" if state.reason else ""
                logger.info("%s: %s%s", run.title, state.status, reason)
            known[run.folder] = state.status
        if is_over and (received or "running" not in known.values()):
            return
        if not received and lacks_metric():
            received.append(signal.SIGINT)
        time.sleep(pause_s)


# Workers on this machine.


@dataclass(frozen=True)
class Share:
    """What one worker may use of this machine.

    Attributes:
        gpus: as in CUDA_VISIBLE_DEVICES; None leaves that as it is.
        cores: numbers of CPU cores; empty for all that this process may use.
    """

    gpus: tuple[str, ...] | None = None
    cores: tuple[int, ...] = ()

    @property
    def num_processes(self) -> int:
        """Ranks of a run: one for each GPU."""
        return max(len(self.gpus or ()), 1)

    def env(self) -> dict[str, str]:
        """Changes to the environment."""
        changes = {} if self.gpus is None else {VISIBLE_GPUS: ",".join(self.gpus)}
        if self.cores and "OMP_NUM_THREADS" not in os.environ:
            changes["OMP_NUM_THREADS"] = str(max(len(self.cores) // self.num_processes, 1))
        return changes

    def command(self, folder: Path) -> list[str]:
        """The command line of a worker."""
        ranks = ["--nproc", str(self.num_processes)] if self.num_processes > 1 else []
        return [sys.executable, "-m", "linnaeus.main", "work", str(folder), *ranks]


def divide(num_jobs: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Share]:
    """Divide a machine into equal shares. A remainder stays unused, and no share is empty.

    With fewer GPUs or cores than jobs, several jobs have the same one.

    >>> [share.gpus for share in divide(2, ["0", "1", "2", "3"], [])]
    [('0', '1'), ('2', '3')]
    >>> [share.cores for share in divide(3, [], [0, 1])]
    [(0,), (1,), (0,)]
    """
    return [
        Share(_part(gpus, number, num_jobs) or None, _part(cores, number, num_jobs))
        for number in range(num_jobs)
    ]


def _part(things: Sequence[Thing], number: int, num_jobs: int) -> tuple[Thing, ...]:
    each = max(len(things) // num_jobs, 1)
    begin = number * each % max(len(things), 1)
    return tuple(things[begin : begin + each])


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get(VISIBLE_GPUS)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    import torch  # late: a command line with a mistake does not wait for it

    return [str(number) for number in range(torch.cuda.device_count())]


def _shares(launch: LaunchOptions, plans: Sequence[Plan]) -> list[Share]:
    """One for each worker on this machine."""
    if launch.launcher == "slurm":
        return [Share()]
    num_jobs = launch.jobs or 1
    is_cpu = all(config.EXPERIMENT.DEVICE == "cpu" for _, config in plans)
    gpus = [] if is_cpu else visible_gpus()
    shares = divide(num_jobs, gpus, sorted(os.sched_getaffinity(0)) if num_jobs > 1 else [])
    if 0 < len(gpus) < num_jobs:
        logger.warning(
            "--jobs: %d runs share %s; what one takes is not free for the others, so give AutoBatch a limit "
            "(DATA.AUTOBATCH.MEMORY_LIMIT_GB) or start fewer",
            num_jobs,
            counted(len(gpus), "GPU"),
        )
    return shares


def _start_workers(sweep: Sweep, shares: Sequence[Share]) -> list[subprocess.Popen[bytes]]:
    """Start a worker for each share; they outlive this process if it is killed."""
    cores, workers = os.sched_getaffinity(0), []
    (sweep.folder / "logs").mkdir(exist_ok=True)
    for number, share in enumerate(shares, start=1):
        with (sweep.folder / f"logs/worker{number}.txt").open("ab") as output:
            try:
                os.sched_setaffinity(0, share.cores or cores)  # which the worker inherits
                workers.append(
                    subprocess.Popen(
                        share.command(sweep.folder),
                        env={**os.environ, **share.env()},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # Ctrl-C is for this process alone
                    )
                )
            finally:
                os.sched_setaffinity(0, cores)
    return workers


def _watch_workers(
    watch: Watch, sweep: Sweep, shares: Sequence[Share], received: list[int]
) -> None:
    """Start workers here, watch them, and pass signals on to them."""
    workers, num_passed_on = _start_workers(sweep, shares), 0

    def goes_on() -> bool:
        nonlocal num_passed_on
        alive = [worker for worker in workers if worker.poll() is None]
        while num_passed_on < len(received):
            num_passed_on += 1
            for worker in alive:
                worker.send_signal(signal.SIGINT)
        return bool(alive)

    watch(goes_on, received, LOOK_S)
    for number, worker in enumerate(workers, start=1):
        if worker.returncode not in (0, EXIT_SOME_FAILED, EXIT_INTERRUPTED):
            sweep.check_is_there()
            log = sweep.folder / f"logs/worker{number}.txt"
            last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            logger.warning(
                "worker %d has ended with %d: %s (%s)", number, worker.returncode, last, log
            )


# Workers on SLURM.


def _script(options: SweepOptions, sweep: Sweep) -> str:
    """The script of the array of workers."""
    from linnaeus.sweep.slurm import workers_script

    num_runs = len(sweep.runs) if sweep.trials is None else min(JOBS_OF_A_SEARCH, sweep.trials)
    return workers_script(sweep.folder, options.launch, num_runs)


def _watch_jobs(watch: Watch, options: SweepOptions, sweep: Sweep, received: list[int]) -> None:
    """Submit an array of workers and watch it.

    Raises:
        LinnaeusError: sbatch has refused the job.
    """
    from linnaeus.runtime.run_folder import is_queued
    from linnaeus.sweep.slurm import submit

    number = submit(sweep.folder / "slurm", _script(options, sweep))
    logger.info(
        "submitted as SLURM job %s; linnaeus sweep --status %s shows the runs, and scancel %s ends them",
        number,
        shlex.quote(str(sweep.folder)),
        number,
    )
    watch(lambda: not received and is_queued(number, now=True), received, LOOK_AT_QUEUE_S)
    if received:
        logger.info("SLURM job %s runs on; scancel %s ends it, with checkpoints", number, number)


def _dry_run(options: SweepOptions, sweep: Sweep, shares: Sequence[Share]) -> str:
    """What would be started."""
    if options.launch.launcher == "slurm":
        return _script(options, sweep)
    runs = [run.title for run in sweep.grid()]
    if sweep.trials is not None:
        runs = [f"{sweep.trials} trials, whose values Optuna chooses"]
    lines = [f"# {counted(len(shares), 'worker')} for these runs:", *(f"#   {run}" for run in runs)]
    for share in shares:
        env = [f"{name}={value}" for name, value in share.env().items()]
        lines.append(shlex.join([*env, *share.command(sweep.folder)]))
    return "\n".join(lines) + "\n"


PARSER = CommandParser(
    "sweep",
    SweepOptions,
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the configuration of each run, and exit",
    gone={
        "--plot": "is gone; the picture is sweep.png beside the runs",
        "--predict-gpu": "is gone; predict one run with linnaeus analyze --predict --gpu NAME",
    },
)
