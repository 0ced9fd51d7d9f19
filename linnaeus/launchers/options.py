"""The options that say where runs run: `--launcher`, `--jobs`, `--slurm`, `--dry-run`. Imports no torch."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, cast

from linnaeus.config.keys import suggest
from linnaeus.config.presets import available, expanded

LauncherName = Literal["local", "slurm"]
LAUNCHERS = ("local", "slurm")
HELP = {
    "--launcher": ("NAME", "where to run: local, this machine (default), or slurm"),
    "--slurm": ("KEY=VALUE ...", "options of sbatch, such as partition=gpu time=4:00:00 exclusive"),
    "--dry-run": (None, "print the job script, and submit nothing"),
}
"""These options for the help: what stands for their value, None without one, and what they do."""
FLAGS = (
    "contiguous", "exclusive", "get-user-env", "help", "hold", "ignore-pbs", "nice", "no-bell", "no-kill",
    "no-requeue", "overcommit", "oversubscribe", "parsable", "propagate", "quiet", "reboot", "requeue",
    "spread-job", "stepmgr", "test-only", "usage", "use-min-nodes", "verbose",
    "version", "wait",
)  # fmt: skip
"""Options of sbatch that may have no value; `linnaeus.launchers.slurm` refuses some of them."""
_SBATCH = re.compile(rf"([a-z][a-z0-9_-]*)=(.*)|({'|'.join(FLAGS)})", re.DOTALL)


@dataclass
class LaunchOptions:
    """Where runs run.

    Attributes:
        launcher: the name of the launcher.
        jobs: how many runs may go on at once; None for one on this machine, and for all on SLURM.
        slurm: options of sbatch by their long names; None for those without a value.
        dry_run: only say what would be started.
    """

    launcher: LauncherName = "local"
    jobs: int | None = None
    slurm: dict[str, str | None] = field(default_factory=dict)
    dry_run: bool = False


def split_launch_options(argv: Sequence[str]) -> tuple[LaunchOptions, list[str], list[str]]:
    """Take these options out of a command line.

    The options of sbatch end at the first word that cannot be one: a key, which is upper case, another
    option, a group of presets, such as `model=resnet50`, or a word without `=` that is none of `FLAGS`. What
    follows `--` is left as it is.

    >>> argv = ["--launcher", "slurm", "--slurm", "nodes=2", "exclusive", "TRAIN.EPOCHS=2"]
    >>> options, rest, _ = split_launch_options(argv)
    >>> options.slurm, rest
    ({'nodes': '2', 'exclusive': None}, ['TRAIN.EPOCHS=2'])

    Returns:
        The options, the other words, and one sentence for each problem.
    """
    options, rest, problems = LaunchOptions(), list[str](), list[str]()
    groups = _groups(argv)
    tokens = deque(argv)
    while tokens and tokens[0] != "--":
        name, has_value, value = tokens.popleft().partition("=")
        if name == "--slurm":
            if has_value:
                tokens.appendleft(value)
            problems += _take_sbatch(tokens, options.slurm, groups)
        elif name == "--dry-run":
            options.dry_run = True
            problems += ["--dry-run: takes no value"] if has_value else []
        elif name in _READERS:
            if not has_value:
                value = tokens.popleft() if tokens and not tokens[0].startswith("--") else ""
            try:
                setattr(options, name.removeprefix("--"), _READERS[name](value))
            except ValueError as error:
                problems.append(f"{name}: {error}")
                if name == "--launcher":  # it may have been meant: the other options are not wrong as well
                    options.launcher = "slurm"
        else:
            rest.append(f"{name}{has_value}{value}")
    rest += tokens
    if options.slurm and options.launcher != "slurm":
        problems.append("--slurm: is for --launcher slurm, which is not given")
    if options.launcher == "slurm":
        from linnaeus.launchers.sbatch import problems_with

        problems += problems_with(options.slurm)
    return options, rest, problems


def read_launcher(text: str) -> LauncherName:
    """The name of a launcher; `ValueError` for another word."""
    if text not in LAUNCHERS:
        raise ValueError(f"{text!r} is none; there are {' and '.join(LAUNCHERS)}{suggest(text, LAUNCHERS)}")
    return cast(LauncherName, text)


def read_jobs(text: str) -> int:
    """How many runs go on at once; `ValueError` for anything but a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1: how many runs go on at once")
    return int(text)


_READERS: dict[str, Callable[[str], object]] = {"--launcher": read_launcher, "--jobs": read_jobs}


def _take_sbatch(tokens: deque[str], found: dict[str, str | None], groups: set[str]) -> list[str]:
    """Move options of sbatch from the words to `found`; returns the problem if there is none."""
    number = len(found)
    while tokens and (match := _SBATCH.fullmatch(tokens[0])) and match[1] not in groups:
        found[match[1] or match[3]] = match[2]
        tokens.popleft()
    if len(found) > number:
        return []
    return ["--slurm: needs options of sbatch without their dashes, such as partition=gpu time=4:00:00"]


def _groups(argv: Sequence[str]) -> set[str]:
    """The groups of presets, those of the user's folders included."""
    names = set(available())
    for token, following in pairwise([*argv, ""]):
        name, has_value, value = token.partition("=")
        if name in ("--config-dir", "-cd"):
            names |= set(available(expanded(value if has_value else following)))
    return names
