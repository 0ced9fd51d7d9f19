"""What a console shows: the progress bar on a terminal, plain lines elsewhere, and the status line."""

import io
import re

import pytest
from rich.console import Console

from linnaeus.cli.tables import table
from linnaeus.runtime.console import ProgressBar, StatusLine, is_interactive, make_console
from linnaeus.runtime.log import close_logging, set_up_logging
from tests.helpers.consoles import plain_console, terminal
from tests.helpers.runs import wait_until


def show_an_epoch(console):
    with ProgressBar(console) as progress:
        progress.start("epoch 1/2", total=5)
        progress.advance(3)
        progress.describe({"loss": 0.123456, "lr": 2e-3})


@pytest.mark.parametrize(
    ("is_terminal", "ci", "expected"),
    [(True, None, True), (True, "false", True), (True, "True", False), (False, None, False)],
)
def test_a_person_watches_a_terminal_outside_ci(monkeypatch, is_terminal, ci, expected):
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    assert is_interactive(Console(file=io.StringIO(), force_terminal=is_terminal)) is expected


def test_a_terminal_shows_a_bar_and_no_lines(tmp_path, monkeypatch):
    console, output = terminal(monkeypatch)
    set_up_logging(tmp_path, rank=0, console=console)
    show_an_epoch(console)
    assert "3/5" in output.getvalue()
    assert "\x1b[" in output.getvalue()
    assert (tmp_path / "rank0.log").read_text().count(
        "epoch 1/2  step 3/5  loss 0.1235  lr 0.002"
    ) == 1
    close_logging()
    before = output.getvalue()
    show_an_epoch(None)  # on other ranks
    assert output.getvalue() == before


@pytest.mark.parametrize("where", ["no terminal", "CI"])
def test_elsewhere_there_is_a_plain_line_and_no_bar(monkeypatch, where):
    console, output = terminal(monkeypatch) if where == "CI" else plain_console()
    monkeypatch.setenv("CI", "true" if where == "CI" else "")
    set_up_logging(None, rank=0, console=console)
    show_an_epoch(console)
    [line] = output.getvalue().splitlines()
    assert line.endswith(" epoch 1/2  step 3/5  loss 0.1235  lr 0.002")
    assert "\x1b" not in line


def test_long_lines_are_not_broken_where_no_terminal_is(capsys):
    make_console().print("x" * 110)
    assert capsys.readouterr().out == "x" * 110 + "\n"


@pytest.mark.parametrize("name", ["[unidentified]", "Aves [/sp]", "[red]x[/red] :cat:"])
def test_what_looks_like_markup_is_printed_as_it_is(monkeypatch, name):
    console, output = terminal(monkeypatch)
    console.print(table(f"1 {name}", [f"2 {name}"], [[f"3 {name}"]]))
    console.print(f"4 {name}")
    with ProgressBar(console) as progress:
        progress.start(f"5 {name}", total=5)
        progress.describe({f"6 {name}": 0.5})
    assert all(f"{number} {name}" in output.getvalue() for number in range(1, 7))


def test_a_status_line_says_what_is_done_and_for_how_long(monkeypatch):
    monkeypatch.setattr("linnaeus.runtime.console.REFRESHES_PER_S", 100.0)
    console, output = terminal(monkeypatch)
    texts = iter(["first", *["second"] * 10**6])
    with StatusLine(console) as line:
        line.update(lambda: next(texts))
        wait_until(lambda: re.search(r" 0:\d\d second", output.getvalue()) is not None)
        line.update("third")
        console.print("above")
    assert re.search(r" 0:\d\d first", output.getvalue())
    assert re.search(r" 0:\d\d third", output.getvalue())
    assert output.getvalue().endswith("\x1b[2K"), "nothing of it remains"


@pytest.mark.parametrize("has_console", [False, True])
def test_where_no_terminal_is_there_is_no_status_line(has_console):
    console, output = plain_console()
    with StatusLine(console if has_console else None) as line:
        line.update("trying")
    assert output.getvalue() == ""
