"""How a torchrun job on this machine ends after a fault, and how the next start goes on.

    python -m benchmarks.research.fault_times [--kind SIGKILL] [--place "in training"]
    python -m benchmarks.research.fault_times --start
    python -m benchmarks.research.fault_times --random 200 --ranks 3

Each fault happens in a real job on the CPU. Without options each kind happens on rank 0 and on rank 1, at
each of six places. A line has the seconds from the fault to the end of the last process, the exit code, what
the ranks said, and what the same command did next. `deaf` holds the GIL for 45 s, `hang` waits for ever, with
`DIST.TIMEOUT_MINUTES=0.2`.

`--start`: while the ranks import torch, torchrun is killed, or it is stopped and its ranks get SIGTERM.

`--random`: signals at random moments, the first second included, to torchrun or one of its ranks, of which
every second job starts new interpreters. Then the command runs to its end. A line says whether processes were
left behind, and whether the weights are, bit for bit, those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

import psutil
import torch

from tests.helpers import children
from tests.helpers.odd_ranks import JOB, KINDS, PLACES
from tests.helpers.runs import weights

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
"""Whatever lives so long after its fault is left behind."""


class Job:
    """A torchrun with its ranks, which end with this program."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        ranks: int = 2,
        module: str = "",
        **env: str,
    ) -> None:
        self.log, self.seen = folder / "log.txt", set[psutil.Process]()
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            "-m",
            module or "tests.helpers.odd_ranks",
            *JOB,
            "TRAIN.EPOCHS=3",
            *options,
        ]
        environment = {"PYTHONPATH": str(ROOT), "CI": "true", "OMP_NUM_THREADS": "1", **env}
        with self.log.open("w") as log:
            self.torchrun = children.start(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                children_fork=not module,
            )

    def ranks(self) -> list[psutil.Process]:
        """The ranks that have started and live; notes every process of the job."""
        with suppress(psutil.Error):
            torchrun = psutil.Process(self.torchrun.pid)
            self.seen.update(torchrun.children(recursive=True))
            return torchrun.children()
        return []

    def wait(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Wait until a condition holds; whether it does."""
        deadline = time.monotonic() + limit_s
        while not (holds := condition()) and time.monotonic() < deadline:
            self.ranks()
            time.sleep(0.02)
        return holds

    def living(self) -> list[psutil.Process]:
        """Processes of the job that have not ended."""
        return [process for process in self.seen if _lives(process)]

    def has_ended(self) -> bool:
        """Whether torchrun and all that it started have ended."""
        return self.torchrun.poll() is not None and not self.living()

    def end(self) -> int | None:
        """Wait for the end; what is left after `LIMIT_S` is killed.

        Returns:
            The exit code; None if a process was left.
        """
        has_ended = self.wait(self.has_ended)
        for process in self.living():
            with suppress(psutil.Error):
                process.kill()
        self.torchrun.kill()
        return self.torchrun.wait(None) if has_ended else None


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def show(name: str, *options: str, **env: str) -> None:
    """Run a job with a fault, then the same command again, and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), *options, **env)
        code, ended = job.end(), time.time()
        happened, text = Path(folder, "fault_happened"), job.log.read_text()
        assert happened.exists(), f"{name}: the fault did not happen\n{text}"
        began = happened.stat().st_mtime
        told = re.findall(
            r"(?<=\[rank \d\] )rank \d: .*|rank \d \(.*: no heartbeat.*|stopped by \w+", text
        )
        again = Job(Path(folder)).end()
        what = shorten(min(told), 90, placeholder=" …") if told else "nothing"
        then = "the run is complete" if again == 0 else f"exit code {again}"
        print(
            f"{name:<48} {ended - began:5.1f} s  exit code {code!s:>4}  {what}; next start: {then}",
            flush=True,
        )


def show_start(signal_name: str) -> None:
    """Send a signal to a torchrun whose ranks import torch, and print how long the ranks live."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), module="linnaeus.main")

        def imports() -> bool:
            with suppress(psutil.Error):
                maps = [rank.memory_maps() for rank in job.ranks()]
                return len(maps) == 2 and all(
                    any("libtorch" in part.path for part in parts) for parts in maps
                )
            return False

        job.wait(imports)
        ranks = job.ranks()
        job.torchrun.send_signal(signal.Signals[signal_name])
        if signal_name == "SIGSTOP":  # until the ranks wait for the store that torchrun serves
            job.wait(lambda: all(rank.cpu_percent(0.5) < 5 for rank in ranks))
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
        began = time.monotonic()
        has_ended = job.wait(lambda: not any(map(_lives, ranks)))
        outcome = (
            f"{time.monotonic() - began:5.1f} s" if has_ended else f"alive after {LIMIT_S:.0f} s"
        )
        job.torchrun.kill()
        job.end()
        print(f"torchrun gets {signal_name} while its ranks import torch: {outcome}", flush=True)


def show_random(count: int, num_ranks: int) -> None:
    """Disturb jobs at random moments, print a line for each, and the totals."""
    chance, totals = random.Random(num_ranks), {"left behind": 0, "lost": 0, "other bits": 0}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        job = Job(Path(folder), ranks=num_ranks)
        assert job.end() == 0, job.log.read_text()
        duration_s, expected = time.monotonic() - began, weights(Path(folder, "runs/small"))
    for _ in range(count):
        name = chance.choice(("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1", "SIGSTOP"))
        target, moment_s = chance.randrange(-1, num_ranks), chance.uniform(0, 1.2 * duration_s)
        with tempfile.TemporaryDirectory() as folder:
            # A rank that is stopped before its first heartbeat is waited for as one that starts late.
            job = Job(Path(folder), "DIST.START_MINUTES=0.5", ranks=num_ranks)
            job.wait(job.has_ended, limit_s=moment_s)
            ranks = job.ranks()
            if target == -1 and name != "SIGSTOP":
                job.torchrun.send_signal(signal.Signals[name])
            elif 0 <= target < len(ranks):
                with suppress(psutil.Error):
                    ranks[target].send_signal(signal.Signals[name])
            code = job.end()
            again = Job(Path(folder), ranks=num_ranks)
            is_lost = again.end() != 0
            has_same = not is_lost and all(
                torch.equal(tensor, expected[key])
                for key, tensor in weights(Path(folder, "runs/small")).items()
            )
            if is_lost:
                print(again.log.read_text())
        for what, holds in zip(
            totals, (code is None, is_lost, not is_lost and not has_same), strict=True
        ):
            totals[what] += holds
        to = "torchrun" if target == -1 else f"rank {target}"
        print(
            f"{name:<8} {to:<8} after {moment_s:5.1f} s: exit code {code!s:>4}, same bits {has_same}",
            flush=True,
        )
    print(
        f"{count} signals, {num_ranks} ranks: "
        + ", ".join(f"{totals[what]} {what}" for what in totals)
    )


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=(*KINDS, "hang"))
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--random", type=int, metavar="SIGNALS")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.random:
        show_random(options.random, options.ranks)
    elif options.start:
        for name in ("SIGKILL", "SIGSTOP"):
            show_start(name)
    else:
        for kind in (options.kind,) if options.kind else (*KINDS, "hang"):
            # Elsewhere a rank that hangs is one that works for long.
            places = (
                ("while it joins", "in training", "in validation") if kind == "hang" else PLACES
            )
            more = ("DIST.TIMEOUT_MINUTES=0.2",) if kind == "hang" else ()
            for place in (options.place,) if options.place else places:
                for rank in (0, 1):
                    show(
                        f"{kind}, rank {rank}, {place}",
                        *more,
                        FAULT=f"{kind}:{rank}:{PLACES[place]}",
                    )


if __name__ == "__main__":
    main()
