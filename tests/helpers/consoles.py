"""Consoles whose output a test can read."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from linnaeus.runtime.console import make_console


def plain_console() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return make_console(output, width=200), output


def terminal(monkeypatch: pytest.MonkeyPatch) -> tuple[Console, io.StringIO]:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    output = io.StringIO()
    return make_console(output, force_terminal=True, width=120), output
