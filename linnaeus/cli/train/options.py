"""The command line of training. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from linnaeus.config.help import help_text
from linnaeus.config.load import load_config
from linnaeus.config.overrides import parse_command_line
from linnaeus.config.schema import Config


def read(argv: Sequence[str]) -> str | tuple[Config]:
    """Read a command line: a text to print, or the argument of the session's `run`.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    loaded = load_config(argv)
    if loaded.show_help:
        return help_text(parse_command_line(argv).named("--config-dir"))
    return loaded.text() if loaded.print_config else (loaded.config,)
