"""The context of a run: its ranks, the signals it gets, and everything that is closed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from linnaeus.runtime.distributed import DistSettings, World, join, report_errors_to_all_ranks
from linnaeus.runtime.rng import DeviceSettings, deterministic, kernels
from linnaeus.runtime.signals import StopRequest

T = TypeVar("T")


@dataclass(frozen=True)
class RunContext:
    """The context of a run.

    Attributes:
        world: the ranks.
        stop: whether this process was asked to stop.
    """

    world: World
    stop: StopRequest
    _stack: ExitStack

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context that ends with the run, the last one first."""
        return self._stack.enter_context(manager)


@contextmanager
def running(
    experiment: DeviceSettings, config: DistSettings, *, is_deterministic: bool
) -> Iterator[RunContext]:
    """Listen to signals, join the ranks, and report an error to all of them before anything is closed.

    Args:
        experiment: the EXPERIMENT node.
        config: the DIST node.
        is_deterministic: TRAIN.DETERMINISTIC.
    """
    with (
        deterministic(is_deterministic),
        StopRequest().listening() as stop,
        join(experiment.DEVICE, config) as world,
        kernels(experiment, world.device),
        ExitStack() as stack,
        report_errors_to_all_ranks(world),
    ):
        yield RunContext(world, stop, stack)
