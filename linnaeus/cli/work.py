"""`linnaeus work`: train runs of a sweep until none is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.cli.parser import CommandParser, Options, option, read_count
from linnaeus.runtime.errors import ConfigError

DESCRIPTION = """\
Trains runs of a sweep that no other worker has, one after another, until none is left.
"""
DETAILS = """\
linnaeus sweep creates the folder. Any machine that sees it may work. If a worker dies, another one resumes
its run. A worker skips failed runs; repeat the linnaeus sweep command to try them again. Ctrl-C saves a
checkpoint and returns the run; a second one ends it at once.

examples:
  linnaeus work runs/my_exp
  linnaeus work runs/my_exp --launcher slurm --slurm gpus-per-node=4 time=4:00:00
  CUDA_VISIBLE_DEVICES=2,3 linnaeus work runs/my_exp --nproc 2

exit codes: 0 its runs finished or were pruned, 1 some did not, 2 the folder or an option, 130 interrupted
"""


@dataclass
class WorkOptions(Options):
    """The sweep, and the ranks of each run."""

    folder: Path = Path()
    jobs: int | None = option(
        "workers, with --launcher slurm; default: 1", "N", read_count, launches=True
    )
    nproc: int | None = option("ranks of each run, with torchrun; default: 1", "N", read_count)


def read(argv: Sequence[str]) -> tuple[WorkOptions]:
    """Read the tokens after `work`.

    Raises:
        ConfigError: lists all mistakes.
    """
    from linnaeus.sweep.folder import Sweep

    options, words, problems = PARSER.words(argv)
    if len(words) != 1:
        problems.append(f"'{' '.join(words)}': name the folder of one sweep, such as runs/my_exp")
    if options.launcher == "slurm" and options.nproc is not None:
        problems.append("--nproc: on SLURM a run has a rank for each GPU; set gpus-per-node=N")
    if options.launcher == "local" and options.jobs is not None:
        problems.append(
            "--jobs: needs --launcher slurm; on this machine, start linnaeus work once for each worker"
        )
    if problems:
        raise ConfigError(problems)
    options.folder = Path(words[0]).expanduser()
    Sweep.read(options.folder)
    return (options,)


def run(options: WorkOptions) -> int:
    """Train runs, or submit jobs that do. Return the exit code.

    Raises:
        LinnaeusError: an error that the user can fix; the message says how.
    """
    if options.launcher == "slurm":
        from linnaeus.sweep.slurm import submit, workers_script

        text = workers_script(options.folder, options.slurm, options.jobs or 1)
        if options.dry_run:
            print(text, end="")
        else:
            number = submit(options.folder / "slurm", text)
            print(f"submitted as SLURM job {number}; scancel {number} ends it, with checkpoints")
        return 0
    from linnaeus.sweep.worker import work_here

    return work_here(options.folder, options.nproc or 1)


PARSER = CommandParser(
    "work", WorkOptions, words="FOLDER [options]", description=DESCRIPTION, details=DETAILS
)
