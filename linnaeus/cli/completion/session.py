"""The scripts for the shells, and where each shell looks for a user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from linnaeus.errors import ConfigError
from linnaeus.files import write_text_atomically

_HOW_TO_LOAD = {
    "bash": "New shells load it where the package bash-completion is installed; else add to ~/.bashrc:\n"
    "  source {file}",
    "zsh": "New shells load it when ~/.zshrc has these lines, before any other compinit:\n"
    "  fpath=({folder} $fpath)\n"
    "  autoload -Uz compinit && compinit",
    "fish": "New shells load it by themselves.",
}


def script(shell: str) -> str:
    """The script that makes a shell complete `linnaeus`."""
    return Path(__file__).with_name(f"linnaeus.{shell}").read_text(encoding="utf-8")


def place(shell: str, environment: Mapping[str, str]) -> Path:
    """The file in the user's folder for completion."""
    home = Path(environment.get("HOME") or Path.home())
    if shell == "bash":
        data = Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share")
        folder = Path(environment.get("BASH_COMPLETION_USER_DIR") or data / "bash-completion")
        return folder / "completions" / "linnaeus"
    if shell == "zsh":
        return Path(environment.get("ZDOTDIR") or home) / ".zfunc" / "_linnaeus"
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "fish/completions/linnaeus.fish"


def run(shell: str) -> int:
    """Write the script into the user's folder and say how it is loaded; returns the exit code.

    Raises:
        ConfigError: the file cannot be written.
    """
    file, text = place(shell, os.environ), script(shell)
    try:
        is_there = file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text
        if not is_there:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, text)
    except OSError as error:
        raise ConfigError(f"--install-completion: {file} cannot be written: {error.strerror}") from error
    print(f"completion of linnaeus in {shell}: {file} {'is up to date' if is_there else 'has been written'}")
    print(_HOW_TO_LOAD[shell].format(file=file, folder=file.parent))
    return 0
