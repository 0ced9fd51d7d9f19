"""Words of the sentences that users read."""

from __future__ import annotations

import doctest

from linnaeus import words


def test_the_examples_in_the_docstring() -> None:
    found = doctest.testmod(words)
    assert (found.failed, found.attempted > 0) == (0, True)
