"""How the process of a run ended: `outcome.json` in its folder, and the reasons in its output."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from linnaeus.files import LOGS, OUTCOME, RESULT, checkpoint_file, write_text_atomically
from linnaeus.signals import SIGNALS

OUTPUT = f"{LOGS}/output.txt"
REASON_LETTERS = 400
TAIL_BYTES = 1 << 16
"""Only this much of the end of a run's output is read for its last line."""
_TORCHRUN = re.compile(r"[EWI]\d{4} [\d:.]+ .*torch/distributed/elastic/|srun: |slurmstepd: ")
"""Begins what torchrun or SLURM say of a failure, after the run itself has given its reason."""


@dataclass(frozen=True)
class Outcome:
    """How the process of a run ended.

    Attributes:
        exit_code: the process's; negative for a signal.
        seconds: from start to end, summed over interruptions.
        reason: why the run failed, in its own words; None when it did not.
        result: content of `result.json`; None for a run that did not end well.
    """

    exit_code: int
    seconds: float
    reason: str | None = None
    result: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether the run ended well."""
        return self.exit_code == 0 and self.result is not None

    @property
    def was_stopped(self) -> bool:
        """Whether the run was asked to end, and did so with a checkpoint: Ctrl-C, or another signal."""
        return is_stop(self.exit_code)

    @property
    def was_interrupted(self) -> bool:
        """Whether somebody stopped the run or ended its process; a crash, such as SIGSEGV, is a failure."""
        return self.was_stopped or -self.exit_code in (*SIGNALS, signal.SIGKILL, signal.SIGHUP)


def is_stop(exit_code: int) -> bool:
    """Whether an exit code is that of a run that ended because a signal asked it to."""
    return exit_code - 128 in SIGNALS


_NAMES = tuple(field.name for field in fields(Outcome))


def outcome_of(folder: Path, exit_code: int, seconds: float, begin: int = 0) -> Outcome:
    """The outcome of a process that has just ended.

    Args:
        folder: the run's.
        exit_code: the process's; negative for a signal.
        seconds: of all processes of the run.
        begin: where in the run's output that of this process begins, in bytes.
    """
    result = read_result(folder) if exit_code == 0 else None
    reason = reason_of(folder, exit_code, begin)
    if exit_code == 0 and result is None:
        reason = f"ended without {RESULT}"
    return Outcome(exit_code, round(seconds, 3), reason, result)


def read_outcome(folder: Path) -> Outcome | None:
    """How the last process in a folder ended; None when neither `outcome.json` nor `result.json` says so.

    Only `result.json` exists where the supervisor died first, or somebody resumed the run by hand.
    """
    outcome = _parse(read_json(folder / OUTCOME) or {})
    if outcome is not None and (outcome.finished or not is_newer(folder / RESULT, folder / OUTCOME)):
        return outcome
    result = read_result(folder)
    if result is None:
        return outcome
    seconds = result.get("training_s")
    return Outcome(0, seconds if isinstance(seconds, int | float) else 0.0, None, result)


def _parse(written: dict[str, Any]) -> Outcome | None:
    """The outcome that was written as JSON, also by another version; None where that is none."""
    match written:
        case {"exit_code": int(), "seconds": int() | float()}:
            outcome = Outcome(**{name: written[name] for name in _NAMES if name in written})
            is_sound = isinstance(outcome.reason, str | None) and isinstance(outcome.result, dict | None)
            return outcome if is_sound else None
    return None


def is_newer(path: Path, other: Path) -> bool:
    """Whether a file was written after another one of the same folder; False where it is missing."""
    times = stamp(path), stamp(other)
    return times[0] is not None and times[1] is not None and times[0] > times[1]


def stamp(path: Path) -> int | None:
    """When a file was written, by its own server's clock, in nanoseconds; None where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def read_result(folder: Path) -> dict[str, Any] | None:
    """Content of `result.json`; None for a run that has not ended well."""
    return read_json(folder / RESULT)


def save_outcome(folder: Path, outcome: Outcome) -> None:
    """Write how the process ended, atomically."""
    write_text_atomically(folder / OUTCOME, json.dumps(asdict(outcome), indent=2) + "\n")


def reason_of(folder: Path, exit_code: int, begin: int = 0) -> str | None:
    """Why a run failed: the last line that it wrote, or the signal that ended it; None when it did not."""
    if exit_code == 0:
        return None
    if exit_code < 0:
        name = next((known.name for known in signal.Signals if known == -exit_code), f"signal {-exit_code}")
        return f"ended by {name}" + (", often for lack of host memory" if name == "SIGKILL" else "")
    lines = _last_lines(folder, begin)
    if is_stop(exit_code):
        has_saved = checkpoint_file(folder, "last") is not None
        otherwise = "stopped after a checkpoint" if has_saved else "stopped before its first checkpoint"
        return next((line for line in reversed(lines) if "stopped by SIG" in line), otherwise)
    own = next((number for number, line in enumerate(lines) if _TORCHRUN.match(line)), len(lines))
    last = _last(lines[:own] or lines).removeprefix("- ")
    short = last if len(last) <= REASON_LETTERS else f"{last[:REASON_LETTERS]}..."
    return short or f"ended with exit code {exit_code}"


def last_line(folder: Path) -> str:
    """The last line that the run in a folder has written so far; empty before the first."""
    return _last([line for line in _last_lines(folder) if not _TORCHRUN.match(line)])


def _last_lines(folder: Path, begin: int = 0) -> list[str]:
    """The end of a run's output, not before a position in bytes."""
    try:
        with (folder / OUTPUT).open("rb") as output:
            output.seek(max(output.seek(0, 2) - TAIL_BYTES, begin))
            return output.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _last(lines: list[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no such file, or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # UnicodeDecodeError is a ValueError
        return None
    return content if isinstance(content, dict) else None
