"""The command line of completion. Imports neither torch nor Hydra."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from linnaeus.cli.completion import SHELLS
from linnaeus.cli.completion.session import script
from linnaeus.errors import ConfigError


def read(argv: Sequence[str]) -> str | tuple[str]:
    """Read a command line: a text to print, or the argument of the session's `run`.

    * `--install-completion [SHELL]` is for the session. The shell is that of the environment by default.
    * `--show-completion [SHELL]` prints the shell's script.
    * `--complete SHELL ...` prints the candidates; the scripts call it. bash gives the line up to the cursor
      and the characters at which it begins a new word, other shells the words after `linnaeus`.

    Raises:
        ConfigError: another shell, or a word too many.
    """
    name, has_value, value = argv[0].partition("=")
    words = [value, *argv[1:]] if has_value else list(argv[1:])
    if name == "--complete":
        if not words or (words[0] == "bash" and len(words) != 3):
            raise ConfigError(f"{name}: is for the shell's script: linnaeus --install-completion SHELL")
        return _candidates(*words)
    if len(words) > 1:
        raise ConfigError(f"{name}: takes one shell and nothing else, not {shlex.join(words)}")
    shell = words[0] if words else Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        found = f"{shell!r} is not one of them" if shell else "$SHELL does not name one"
        raise ConfigError(f"{name}: needs one of {', '.join(SHELLS)}; {found}")
    return script(shell) if name == "--show-completion" else (shell,)


def _candidates(shell: str, *words: str) -> str:
    from linnaeus.cli.completion.candidates import complete

    if shell == "bash":
        line, breaks = words
        words = tuple(split(line))
        # bash replaces what follows the last of these characters alone.
        begin = max((words[-1].rfind(character) for character in breaks), default=-1) + 1
        lines = [name if name[0] == ":" else name[begin:] for name in complete(words)]
    else:
        lines = [f"{name}\t{' '.join(text.split())}" for name, text in complete(words or [""]).items()]
        lines = [line.rstrip("\t") for line in lines]
    return "".join(f"{line}\n" for line in lines)


def split(line: str) -> list[str]:
    """The words after the command's name, as the shell splits them; the last one may be unfinished.

    >>> split("A=1 linnaeus train 'MODEL.NAME=re"), split("linnaeus ")
    (['train', 'MODEL.NAME=re'], [''])
    """
    for closing in ("", "'", '"'):
        try:
            words = shlex.split(line + closing)
            break
        except ValueError:  # an open quote
            continue
    else:
        words = line.split()
    while words and "=" in words[0]:  # variables set before the command
        del words[0]
    is_finished = not closing and line[-1:].isspace()
    return [*words[1:], ""] if is_finished or len(words) < 2 else words[1:]
