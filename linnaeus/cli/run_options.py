"""The command line of commands that use a trained run: a run, files, options. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from linnaeus.cli.options import CommandParser
from linnaeus.config.keys import suggest
from linnaeus.errors import ConfigError

CHECKPOINT_OPTION = (
    "--checkpoint", "best|last|FILE", str,
    "checkpoint of the run: best (the default), last, or a file; RUN itself where that is a checkpoint",
)  # fmt: skip
"""Arguments of `CommandParser.option`."""


class RunCommandParser(CommandParser):
    """The options of a command that takes no configuration, and its help.

    Args:
        command: the word after `linnaeus`.
        words: names the words beside the options, for the usage.
        description: what the command does.
        details: the end of the help: what else to know, examples, exit codes.
    """

    def __init__(self, command: str, *, words: str, description: str, details: str) -> None:
        super().__init__(
            command, words=f"{words} [options]", description=description, details=details,
            takes_run=True, takes_overrides=False,
        )  # fmt: skip

    def words(self, argv: Sequence[str], options: object) -> tuple[list[str], list[str]] | None:
        """Take the options out of a command line.

        Args:
            argv: the tokens after the command. Those after `--` are words, whatever they begin with.
            options: its attributes are filled.

        Returns:
            The words beside the options, and one sentence for each problem; None where the help is asked for.
        """
        tokens = list(argv)
        cut = tokens.index("--") if "--" in tokens else len(tokens)
        rest, problems = self.take(tokens[:cut], options)
        if {"-h", "--help"}.intersection(rest):
            return None
        words = [token for token in rest if token == "-" or not token.startswith("-")]
        problems += [self._not_taken(token) for token in rest if token not in words]
        return [*words, *tokens[cut + 1 :]], problems

    def _not_taken(self, token: str) -> str:
        if Path(token).exists() or not token.startswith("--"):
            return f"{token}: no such option; give a file of this name as ./{token}"
        return f"{token}: no such option{suggest(token.partition('=')[0], self.names())}"

    def add_run_options(self) -> None:
        """Add the options that say which weights to use, and where."""
        self.option(*CHECKPOINT_OPTION)
        self.option("--device", "DEVICE", str, "auto, cpu, cuda, cuda:1, ...")


def read_choice(choices: Sequence[str], text: str) -> str:
    """One of some words; `ValueError` for another."""
    if text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}{suggest(text, choices)}")
    return text


def check_run(path: str) -> list[str]:
    """Why there is no run or checkpoint of this name, as a list of at most one sentence."""
    run = Path(path).expanduser()
    if run.exists():
        return []
    remedy = suggest_path(run) or "; name the folder of a run, such as runs/birds"
    return [f"RUN: there is no run or checkpoint {path}{remedy}"]


def suggest_path(path: Path) -> str:
    """`; did you mean X?` for what stands beside a missing path and is most like it; empty for nothing."""
    names = [beside.name for beside in path.parent.glob("*")]
    close = get_close_matches(path.name, names, 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def refuse(problems: Sequence[str]) -> None:
    """Raise `ConfigError` where there are problems."""
    if problems:
        raise ConfigError(problems)
