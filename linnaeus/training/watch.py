"""Measurements of a run: waiting for data, speed, peak memory, a profile of some steps."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from linnaeus.autobatch.memory.device import GIB
from linnaeus.data.batch import Batch
from linnaeus.training.callbacks import CallbackState

logger = logging.getLogger("linnaeus.trainer")

WAITING_FRACTION = 0.3
"""An epoch that waits for data for more than this part of its time is slow because of the loader."""
NOTABLE_WAIT_S = 10.0
"""A shorter wait is worth no advice."""


class TimedBatches(Iterator[Batch]):
    """The batches of an iterator; `on_wait` is called with the seconds that each one took."""

    def __init__(
        self,
        batches: Iterator[Batch],
        on_wait: Callable[[float], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batches, self._on_wait, self._clock = batches, on_wait, clock

    def __next__(self) -> Batch:
        started = self._clock()
        batch = next(self._batches)
        self._on_wait(self._clock() - started)
        return batch


class Speed:
    """Seconds and samples since the last reading."""

    def __init__(self) -> None:
        self._last = (0.0, 0.0, 0)

    def read(self, seconds: float, waited_s: float, samples: int) -> dict[str, float]:
        """Return the metrics since the last call.

        Args:
            seconds, waited_s, samples: of the training so far: all seconds, those spent waiting for data, and
                samples.
        """
        now = (seconds, waited_s, samples)
        took, waited, count = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return {
            "data_s": round(waited, 4),
            "compute_s": round(max(took - waited, 0.0), 4),
            "samples_per_s": round(count / took, 2) if took else 0.0,
        }


def loader_advice(speed: dict[str, float], num_workers: int) -> str | None:
    """Return a sentence where an epoch has waited for data for much of its time."""
    waited, took = speed["data_s"], speed["data_s"] + speed["compute_s"]
    if waited < NOTABLE_WAIT_S or waited <= WAITING_FRACTION * took:
        return None
    return (
        f"the loader is the bottleneck: training waited for data for {waited:.0f} of {took:.0f} s; raise "
        f"DATA.NUM_WORKERS (now {num_workers}), or make samples cheaper to read"
    )


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory held so far: on CUDA by the allocator, else by this process."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_reserved(device) / GIB, 4)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 4)


class Profiler:
    """Callback that writes a trace of torch's profiler.

    Args:
        first, last: optimizer steps of the trace, from 1.
        path: of the trace, which chrome://tracing and Perfetto open.
    """

    def __init__(self, first: int, last: int, path: Path) -> None:
        self._first, self._last, self._path = first, last, path
        self._profile: torch.profiler.profile | None = None

    def on_step_start(self, state: CallbackState) -> None:
        """Begin before the first step."""
        if state.step + 1 == self._first and self._profile is None:
            kinds = torch.profiler.ProfilerActivity
            on_device = [kinds.CUDA] if torch.cuda.is_available() else []
            self._profile = torch.profiler.profile(
                activities=[kinds.CPU, *on_device],
                acc_events=True,  # torch 2.11 warns without it
            )
            self._profile.start()

    def on_step_end(self, state: CallbackState) -> None:
        """Write the trace after the last step."""
        if self._profile is None or state.step != self._last:
            return
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        logger.info("profile of steps %d to %d: %s", self._first, self._last, self._path)
