"""Training, with an exit code."""

from __future__ import annotations

from linnaeus.config.schema import Config
from linnaeus.dist import RankEnded
from linnaeus.run import run as train


def run(config: Config) -> int:
    """Train; returns the exit code: 0 done, 128 and the signal's number (130 for Ctrl-C) if stopped.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    try:
        stop_signal = train(config).stop_signal
    except RankEnded as ended:
        ended.leave()
    return 128 + stop_signal if stop_signal else 0
