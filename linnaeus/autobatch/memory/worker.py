"""Calls in a thread that is given up after a failure."""

from __future__ import annotations

import contextlib
import contextvars
import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from linnaeus.autobatch.memory.interface import T

_DEFAULT_STACK_BYTES = 8 * 1024**2


class WorkerThread:
    """Calls functions in a thread of their own, which is given up after a call that raised.

    When oneDNN's code generator (Xbyak) runs out of memory, it keeps the error in a thread-local variable
    and never clears it, so that the thread cannot create kernels any more.
    """

    _kept: ThreadPoolExecutor | None = None

    def isolate(self, function: Callable[[], T], *, keeps_thread: bool = False) -> T:
        """Call the function with this thread's torch modes and context variables, and wait for its end.

        An exception of this thread, such as Ctrl-C, is raised when the function has ended: nothing may be
        restored while a step still runs.

        Args:
            function: see `FailedAllocations.isolate`.
            keeps_thread: the thread also serves the next such call, unless this one raises.

        Raises:
            MemoryError: there is no room for the stacks of a new thread's helpers.
            RuntimeError: a new thread cannot be started.
        """
        executor = self._kept if keeps_thread else None
        is_new, modes = executor is None, contextlib.ExitStack()
        if executor is None:
            _require_room_for_threads()
            executor = ThreadPoolExecutor(1, thread_name_prefix="step")
        interruption: BaseException | None = None
        outcome: Future[T] | None = None
        try:
            executor.submit(_enter, modes, _thread_modes(), is_new).result()
            outcome = executor.submit(contextvars.copy_context().run, function)
            executor.submit(modes.close)  # as a work of its own, or tracebacks would have a frame for it
            while not outcome.done():
                try:
                    outcome.exception()
                except BaseException as error:
                    interruption = error
            if interruption is not None:
                raise interruption
            result = outcome.result()
        except BaseException:
            if keeps_thread:
                self._kept = None
            executor.shutdown()
            raise
        finally:
            outcome = None  # or the error's traceback, this frame and the error would keep each other alive
        if keeps_thread:
            self._kept = executor
        else:
            executor.shutdown()
        return result


def _thread_modes() -> list[contextlib.AbstractContextManager[Any]]:
    """Contexts that give another thread the modes that torch keeps per thread, as they are in this one."""
    modes: list[contextlib.AbstractContextManager[Any]] = [
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.set_grad_enabled(torch.is_grad_enabled()),
    ]
    if torch.is_autocast_enabled("cpu"):
        modes.append(torch.autocast("cpu", torch.get_autocast_dtype("cpu")))
    return modes


def _enter(
    stack: contextlib.ExitStack, modes: Iterable[contextlib.AbstractContextManager[Any]], is_new: bool
) -> None:
    """Enter the modes in this thread; a new one first makes torch start its helpers.

    OpenMP ends the process when it cannot start one of them under a cap.
    """
    if is_new:
        torch.ones(1 << 20).add_(1)
    for mode in modes:
        stack.enter_context(mode)


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
