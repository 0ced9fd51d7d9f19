"""`linnaeus work`: takes runs of a sweep until none is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.cli.parser import CommandParser, read_count
from linnaeus.errors import ConfigError

DESCRIPTION = """\
Takes runs of a sweep that nobody has, one after another, until none is left.
"""
DETAILS = """\
The folder is made by linnaeus sweep; any machine that sees it may work. A run whose worker has died is
taken over and goes on from its checkpoint. Failed runs are left; linnaeus sweep, called as before, lets
workers take them again. Ctrl-C saves a checkpoint and gives the run back; a second one ends it at once.

examples:
  linnaeus work runs/my_exp
  linnaeus work runs/my_exp --launcher slurm --slurm gpus-per-node=4 time=4:00:00
  CUDA_VISIBLE_DEVICES=2,3 linnaeus work runs/my_exp --nproc 2

exit codes: 0 its runs ended well, 1 some did not, 2 the folder or an option, 130 interrupted
"""


@dataclass
class Options:
    """The sweep and the processes of a run.

    Attributes:
        folder: of the sweep.
        nproc: ranks of each run.
    """

    folder: Path = Path()
    nproc: int = 1


def read(argv: Sequence[str]) -> tuple[Options]:
    """Read the tokens after `work`.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    from linnaeus.sweep.folder import Sweep

    options = Options()
    words, problems = PARSER.words(argv, options)
    if len(words) != 1:
        problems.append(f"'{' '.join(words)}': name the folder of one sweep, such as runs/my_exp")
    if problems:
        raise ConfigError(problems)
    options.folder = Path(words[0]).expanduser()
    Sweep.read(options.folder)
    return (options,)


def run(options: Options) -> int:
    """Take runs; returns the exit code.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    from linnaeus.sweep.worker import work_here

    return work_here(options.folder, options.nproc)


PARSER = CommandParser(
    "work", words="FOLDER [options]", description=DESCRIPTION, details=DETAILS, takes_overrides=False
)
PARSER.option("--nproc", "N", read_count, "processes of each run, with torchrun; default: 1")
