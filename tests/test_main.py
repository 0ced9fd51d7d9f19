"""From the words of a command line to an exit code."""

from __future__ import annotations

import re

import pytest

from linnaeus import main
from tests.conftest import Run


@pytest.mark.parametrize("argv", [["--version"], ["plan", "--version"]])
def test_version(run: Run, argv: list[str]) -> None:
    outcome = run(*argv)
    assert (outcome.code, outcome.err) == (0, "")
    assert re.fullmatch(r"linnaeus \d+\.\d+\.\d+\n", outcome.out)


def test_the_help_names_the_version_and_every_command(run: Run) -> None:
    text = run("--help").out
    for name in ("--version", *main.COMMANDS):
        assert f"\n  {name} " in text


@pytest.mark.parametrize("command", [[], ["analyze"], ["plan"], ["sweep"]])
def test_of_several_ranks_the_first_one_speaks(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """The others stay until it has spoken: torchrun ends all ranks with the first one that leaves."""
    waited: list[float] = []
    monkeypatch.setattr(main.time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        outcome = run(*command, "DATA.BATCHSIZE=1,2")
        assert outcome.code == 2
        assert ("did you mean" in outcome.err) == bool(outcome.err) == (rank == "0")
        assert bool(run(*command, "--help").out) == (rank == "0")
    assert waited == [main.LEAVE_AFTER_S]


@pytest.mark.distributed
def test_training_under_torchrun_shows_a_mistake_once(torchrun: Run) -> None:
    outcome = torchrun(2, "DATA.BATCHSIZE=3")
    assert outcome.code != 0
    assert outcome.err.count("did you mean DATA.BATCH_SIZE?") == 1
