"""Calls in a thread that is given up after a failure."""

from __future__ import annotations

import contextlib
import contextvars
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from linnaeus.autobatch.memory.interface import T

_DEFAULT_STACK_BYTES = 8 * 1024**2


class WorkerThread:
    """Calls functions in one thread of its own; after a call that raised, in a new one.

    When oneDNN's code generator (Xbyak) runs out of memory, it keeps the error in a thread-local variable
    and never clears it, so that the thread cannot create kernels any more.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Call the function with this thread's torch modes and context variables, and wait for its end.

        An exception of this thread, such as Ctrl-C, is raised when the function has ended: nothing may be
        restored while a step still runs.

        Raises:
            MemoryError: there is no room for the stacks of a new thread's helpers.
            RuntimeError: a new thread cannot be started.
        """
        modes, is_new = _thread_modes(), self._executor is None

        def work() -> T:
            if is_new:
                _start_intra_op_threads()
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return function()

        try:
            if self._executor is None:
                _require_room_for_threads()
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="step")
            return _wait_for(self._executor.submit(contextvars.copy_context().run, work))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the thread, after the call that it is in."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


def _wait_for(outcome: Future[T]) -> T:
    """The result of a call; an exception of this thread is raised only after the call has ended."""
    interruption: BaseException | None = None
    while not outcome.done():
        try:
            outcome.exception()
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption
    try:
        return outcome.result()
    finally:
        del outcome  # or the error's traceback, this frame and the error would keep each other alive


def _thread_modes() -> list[contextlib.AbstractContextManager[Any]]:
    """Contexts that give another thread the modes that torch keeps per thread, as they are in this one."""
    modes: list[contextlib.AbstractContextManager[Any]] = [
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.set_grad_enabled(torch.is_grad_enabled()),
    ]
    if torch.is_autocast_enabled("cpu"):
        modes.append(torch.autocast("cpu", torch.get_autocast_dtype("cpu")))
    return modes


def _start_intra_op_threads() -> None:
    """Make torch start its threads now: OpenMP ends the process when it cannot start one under a cap."""
    torch.ones(1 << 20).add_(1)


def _require_room_for_threads() -> None:
    """Raise MemoryError where the stacks of torch's threads do not fit: OpenMP would end the process."""
    import resource  # not on Windows

    num_helpers = torch.get_num_threads() - 1
    if not num_helpers:
        return
    stack_bytes = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = _DEFAULT_STACK_BYTES
    try:
        mmap.mmap(-1, num_helpers * stack_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise MemoryError(f"no room for the stacks of {num_helpers} threads") from error
