"""What a console shows: the progress bar on a terminal, plain lines elsewhere, and the status line."""

import re

import pytest

from linnaeus.cli.tables import table
from linnaeus.runtime.console import ProgressBar, StatusLine
from linnaeus.runtime.log import set_up_logging
from tests.helpers.consoles import plain_console, terminal
from tests.helpers.runs import wait_until


@pytest.mark.parametrize(
    ("is_terminal", "ci"),
    [(True, None), (True, "false"), (True, "True"), (False, None)],
)
def test_a_person_sees_a_bar_and_a_log_plain_lines(tmp_path, monkeypatch, is_terminal, ci):
    """A person watches a terminal outside of CI."""
    console, output = terminal(monkeypatch) if is_terminal else plain_console()
    monkeypatch.setenv("CI", ci or "")
    set_up_logging(tmp_path, rank=0, console=console)
    with ProgressBar(console) as progress:
        progress.start("epoch 1/2", total=5)
        progress.advance(3)
        progress.describe({"loss": 0.123456, "lr": 2e-3})
    shown = output.getvalue()
    plain = "epoch 1/2  step 3/5  loss 0.1235  lr 0.002\n"
    assert (tmp_path / "rank0.log").read_text().count(plain) == 1
    if is_terminal and ci != "True":
        assert "3/5" in shown
        assert "\x1b[" in shown
    else:
        assert shown.endswith(plain)
        assert (shown.count("\n"), "\x1b" in shown) == (1, False)


def test_what_looks_like_markup_is_printed_as_it_is(monkeypatch):
    name = "Aves [/sp] [red]x[/red] :cat:"
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
