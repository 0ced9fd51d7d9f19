"""The scripts, in the shells they are for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from linnaeus.cli.completion import SHELLS
from linnaeus.cli.completion.options import read
from linnaeus.cli.completion.session import place, run, script
from linnaeus.errors import ConfigError
from tests.helpers.forks import ROOT

CTRL_U = "\x15"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the command on its path, and an experiment in the current folder."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR", "BASH_COMPLETION_USER_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "dumb")
    command = tmp_path / "bin" / "linnaeus"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m linnaeus.main "$@"\n')
    command.chmod(0o755)
    (tmp_path / "my_experiment.yaml").touch()
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_goes_to_the_users_folder_once(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    file = place(shell, os.environ)
    assert file.is_relative_to(home)
    assert read(["--install-completion", shell]) == (shell,)
    assert run(shell) == 0
    assert str(file) in capsys.readouterr().out
    assert file.read_text() == script(shell) == read(["--show-completion", shell])
    before = file.stat()
    run(shell)
    assert file.stat() == before
    file.write_text("an older version")
    run(shell)
    assert file.read_text() == script(shell)
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert read(["--show-completion"]) == script(shell)


def test_a_folder_that_cannot_be_written_is_a_mistake(home: Path) -> None:
    (home / ".config").write_text("a file where a folder must be")
    with pytest.raises(ConfigError, match=r"linnaeus\.fish"):
        run("fish")


REPLIES = """
source "$1"
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE}
    COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
    _linnaeus linnaeus "" ""
    echo "${COMPREPLY[*]}"
done
"""


def test_bash_gets_what_replaces_the_word_after_the_equals_sign(home: Path) -> None:
    """The command itself answers, in a process for each line."""
    run("bash")
    expected = {"linnaeus DATA.AUTOBATCH.STRATEGY=b": "binary binsearch", "linnaeus --cfg ": ""}
    done = subprocess.run(
        ["bash", "--norc", "-c", REPLIES, "bash", place("bash", os.environ)],
        input="\n".join(expected) + "\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert dict(zip(expected, done.stdout.split("\n"), strict=False)) == expected
    assert done.stderr == ""


def type_into(argv: list[str], keys: list[tuple[str, str]], cwd: Path) -> None:
    """Type into a shell on a terminal; after each text, read until the terminal shows a pattern."""
    own, theirs = os.openpty()
    # setsid makes the terminal the shell's controlling one, which zsh and fish need.
    shell = subprocess.Popen(["setsid", "--ctty", *argv], stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd)
    os.close(theirs)
    try:
        for text, pattern in keys:
            os.write(own, text.encode())
            shown = ""
            while not re.search(pattern, shown):
                shown += os.read(own, 65536).decode(errors="replace").replace("\a", "")
    finally:
        shell.kill()
        shell.wait()
        os.close(own)


TYPED = [
    ("linnaeus ana\t", "linnaeus analyze "),
    (f"{CTRL_U}linnaeus DATA.AUTOBATCH.STRA\t", "STRATEGY="),
    ("gu\t", "guided "),
    (f"{CTRL_U}linnaeus model=vit_b\t", "vit_base "),
    (f"{CTRL_U}linnaeus --cfg my_ex\t", r"my_experiment\.yaml "),
    (f"{CTRL_U}linnaeus --cfg=my_ex\t", r"my_experiment\.yaml "),
]


@pytest.mark.e2e
@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_in_the_shell(home: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    run(shell)
    file = place(shell, os.environ)
    arguments, load = {
        "bash": (["--norc", "--noprofile", "-i"], f"source {file}"),
        "zsh": (["-f", "-i"], f"fpath=({file.parent} $fpath); autoload -Uz compinit; compinit -u -D"),
        "fish": (["--no-config", "-i"], f"source {file}"),
    }[shell]
    type_into([program, *arguments], [(f"{load}; echo rea''dy\r", "ready"), *TYPED], home)
