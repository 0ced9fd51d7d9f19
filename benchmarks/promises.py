"""What whole runs reserve, against what their searches promised, on the stand-in for a CUDA device.

    python -m benchmarks.promises [--card] [MODEL ...]

Each line is a run: a search, two epochs with a validation each, a checkpoint, and one more epoch and
validation in a process that resumes from it. It has the sizes found, the peaks that the search promised, the
budget (all in MiB), and by how much the peak of each phase differs from its promise. A phase above the budget
has the mark `!`, one that flushed the allocator's cache `r`. The lines with +5 % and +10 % are the negative
control: the same run with sizes that are so much too large.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from linnaeus.errors import OutOfMemoryError
from linnaeus.memory.allocator import MIB
from tests.autobatch.promises import CASES, CONTROLS, MODELS, TOLERANCE, Card, Phase, Run, StandIn


def shown(phase: Phase) -> str:
    """The phase in a column, such as `val -1.3%!`."""
    marks = "!" * (phase.peak_bytes > phase.promise.budget_bytes) + "r" * bool(phase.num_retries)
    return f"{phase.mode} {phase.excess:+.1%}{marks}".ljust(13)


def columns(run: Run, excess: float) -> str:
    """The phases of a run, or how it ended."""
    try:
        phases = run.phases(excess=excess)
    except (torch.OutOfMemoryError, OutOfMemoryError):
        return "out of memory"
    return " ".join(map(shown, phases)) + ("" if all(phase.is_kept for phase in phases) else " broken")


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--card", action="store_true", help="on the first CUDA device instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("$ python -m benchmarks.promises" + " --card" * options.card)
    print(f"A phase is broken above {TOLERANCE:.0%}, above the budget, or if the cache had to be flushed.")
    for case in (case for case in CASES if case.model in options.models):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(case, Card() if options.card else StandIn(), Path(folder))
            line = columns(run, 0.0)
            found = run.found.values()
            sizes = "/".join(str(result.batch_size) for result in found).rjust(8)
            promised = "/".join(f"{(result.peak_bytes or 0) / MIB:.0f}" for result in found).rjust(8)
            budget = f"{run.found['train'].budget_bytes / MIB:6.1f}"
            print(f"{case!s:<58} {sizes} {promised} {budget}  {line}", flush=True)
            for excess in (0.05, 0.10) if case in CONTROLS else ():
                print(f"{f'  sizes {excess:+.0%}':<83}  {columns(run, excess)}", flush=True)


if __name__ == "__main__":
    main()
