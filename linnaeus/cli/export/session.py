"""From a run to a file for other programs."""

from __future__ import annotations

import sys

from linnaeus.cli.export.options import Options
from linnaeus.inference.export.check import ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE
from linnaeus.inference.export.run import Exported, export_run
from linnaeus.inference.trained import load_run
from linnaeus.signals import StopRequest


def run(options: Options) -> int:
    """Export the run and say how the result was checked; returns the exit code: 0.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    with StopRequest().listening():
        trained = load_run(options.run, checkpoint=options.checkpoint, device=options.device)
        print(trained.description, file=sys.stderr)
        exported = export_run(
            trained, options.format, options.output, outputs=options.outputs, level=options.level,
            images=options.images,
        )  # fmt: skip
    print(f"{exported.path}  {_size(exported.num_bytes)}")
    print(f"read back and compared with the run on {exported.origin}: {_verdict(exported)}")
    return 0


def _verdict(exported: Exported) -> str:
    if exported.difference is None:
        return "equal"
    allowed = (
        f"{RELATIVE_TOLERANCE:g} of a probability and {ABSOLUTE_TOLERANCE:g} are allowed"
        if exported.kind == "probabilities"
        else f"{RELATIVE_TOLERANCE:g} of the largest logit, or of 1, is allowed"
    )
    return f"{exported.kind} differ by at most {exported.difference:.2g} ({allowed})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
