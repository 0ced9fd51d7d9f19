"""torchrun without a traceback after a stop signal: `python -m linnaeus.sweep.torchrun ...`.

torchrun itself ends with 1 and its own traceback after a signal, although the run has saved its
checkpoint and resumes later.
"""

from __future__ import annotations

import sys

SHUTDOWN_S = 180
"""After a signal, ranks get this many seconds for their checkpoint; torchrun's own 30 may be too few."""


def main() -> int:
    """Start the ranks of a run, as the words of the command line say.

    Returns:
        The exit code: 0 all have ended well, 128 and the number of the signal that torchrun was stopped by.

    Raises:
        ChildFailedError: a rank has failed; torchrun has printed which, and the exit code is 1.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import main as torchrun

    option = "--shutdown-timeout"  # not in older versions
    has_option = option in get_args_parser().format_usage()
    try:
        torchrun([*([f"{option}={SHUTDOWN_S}"] if has_option else []), *sys.argv[1:]])
    except SignalException as error:
        return 128 + error.sigval  # its ranks have said more
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
