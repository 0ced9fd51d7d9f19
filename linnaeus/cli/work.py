"""`linnaeus work`: takes runs of a sweep until none is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.cli.parser import CommandParser, Options, option, read_count
from linnaeus.runtime.errors import ConfigError

DESCRIPTION = """\
Takes runs of a sweep that nobody has, one after another, until none is left.
"""
DETAILS = """\
The folder is made by linnaeus sweep; any machine that sees it may work. A run whose worker has died is
taken over and resumes from its checkpoint. Failed runs are left; linnaeus sweep, called as before, lets
workers take them again. Ctrl-C saves a checkpoint and gives the run back; a second one ends it at once.

examples:
  linnaeus work runs/my_exp
  linnaeus work runs/my_exp --launcher slurm --slurm gpus-per-node=4 time=4:00:00
  CUDA_VISIBLE_DEVICES=2,3 linnaeus work runs/my_exp --nproc 2

exit codes: 0 its runs ended well, 1 some did not, 2 the folder or an option, 130 interrupted
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
        ConfigError: lists everything that is wrong.
    """
    from linnaeus.sweep.folder import Sweep

    options, words, problems = PARSER.words(argv)
    if len(words) != 1:
        problems.append(f"'{' '.join(words)}': name the folder of one sweep, such as runs/my_exp")
    if options.launcher == "slurm" and options.nproc is not None:
        problems.append("--nproc: on SLURM a run has a rank for each GPU; give gpus-per-node=N")
    if options.launcher == "local" and options.jobs is not None:
        problems.append(
            "--jobs: is for --launcher slurm; here, start linnaeus work once for each worker"
        )
    if problems:
        raise ConfigError(problems)
    options.folder = Path(words[0]).expanduser()
    Sweep.read(options.folder)
    return (options,)


def run(options: WorkOptions) -> int:
    """Take runs, or submit jobs that do; returns the exit code.

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
