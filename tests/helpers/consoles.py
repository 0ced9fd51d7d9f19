"""Consoles whose output a test can read."""

import io

from linnaeus.runtime.console import make_console


def plain_console():
    output = io.StringIO()
    return make_console(output, width=200), output


def terminal(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    output = io.StringIO()
    return make_console(output, force_terminal=True, width=120), output
