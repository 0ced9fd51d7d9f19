"""Every error that Linnaeus raises on purpose.

    LinnaeusError             exit code 1
    ├── ConfigError           exit code 2   a key, a value or a command line that cannot be used
    │   └── TrustError        exit code 2   code that a file names, and that may not run
    ├── DataError             exit code 1   a file, a folder or a label that cannot be used
    ├── AutoBatchError        exit code 3   no batch size could be found, or a rank took too long
    ├── OutOfMemoryError      exit code 3   training ran out of memory: the batch size in use does not fit
    └── CheckpointError       exit code 1   a checkpoint that cannot be read or does not match

The message is written for the person at the terminal: it names the key or file, the value and the remedy.
The command line prints it without a traceback. Exit code 0 means done, 130 (`EXIT_INTERRUPTED`) Ctrl-C,
128 and the number of any other signal that has stopped a run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from linnaeus.autobatch.errors import AutoBatchError as AutoBatchError
from linnaeus.autobatch.errors import LinnaeusError as LinnaeusError
from linnaeus.runtime.words import counted

EXIT_SOME_FAILED = 1
EXIT_INTERRUPTED = 130
"""The shell's own code for a program that Ctrl-C ended."""


class ConfigError(LinnaeusError):
    """One or several problems in the configuration or on the command line.

    Attributes:
        problems: one sentence for each problem, in the order in which they were found. The heading depends on
            how they begin: with an option, a quoted word, `RUN:`, `IMAGES:` or `torchrun:`, with an argument
            of a function (`format=onnx`), or else with a key or a file of the configuration.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        listed = "\n".join(f"  - {problem}" for problem in self.problems)
        starts = ("-", "'", "RUN:", "IMAGES:", "torchrun:")
        of_options = {problem.startswith(starts) for problem in self.problems}
        places = {True: " on the command line", False: " in the configuration"}
        is_of_arguments = all(re.match("[a-z_]+=", problem) for problem in self.problems)
        place = places[of_options.pop()] if len(of_options) == 1 and not is_of_arguments else ""
        super().__init__(f"{counted(len(self.problems), 'problem')}{place}:\n{listed}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        """Errors of loader processes arrive as pickles, which would repeat the heading."""
        return type(self), (self.problems,)


class TrustError(ConfigError):
    """A file names code that the user has not consented to run, or that no file may run."""


class DataError(LinnaeusError):
    """A file, a folder or a label that training cannot use."""


class OutOfMemoryError(LinnaeusError):
    """Training ran out of memory with a batch size that was expected to fit."""

    exit_code = 3


class CheckpointError(LinnaeusError):
    """A checkpoint that cannot be read, or that belongs to another model."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none.

    >>> first_line(ValueError("no such thing.\\nlong explanation")), first_line(KeyboardInterrupt())
    ('no such thing', 'KeyboardInterrupt')
    """
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def first_detail(error: BaseException) -> str:
    """The first line below the heading of an exception's message, as torch writes it; else the only line.

    >>> first_detail(RuntimeError("Error(s) in loading state_dict for Net:\\n\\tMissing key: a.\\n\\tMissing key: b."))
    'Missing key: a'
    """  # noqa: E501
    _, _, details = str(error).strip().partition("\n")
    return details.strip().partition("\n")[0].rstrip(".") or first_line(error)
