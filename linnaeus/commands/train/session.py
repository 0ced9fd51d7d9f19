"""Training, with an exit code."""

from __future__ import annotations

from linnaeus.config.schema import Config
from linnaeus.errors import EXIT_INTERRUPTED
from linnaeus.run import run as train


def run(config: Config) -> int:
    """Train; returns the exit code: 0 done, 130 interrupted.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    return EXIT_INTERRUPTED if train(config).interrupted else 0
