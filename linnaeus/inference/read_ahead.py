"""Calls a function on many items in threads, in order, and only a few items ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from linnaeus.data.loader import num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_WORKERS = 8
"""Most threads that `default_workers` starts."""


def default_workers() -> int:
    """As many threads as this process has CPU cores, at most `MAX_WORKERS`."""
    return min(MAX_WORKERS, num_cores())


def read_ahead(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    num_workers: int,
    num_ahead: Callable[[], int],
) -> Iterator[Result]:
    """The results of a function on items, in the order of the items.

    >>> list(read_ahead(abs, [-3, 2, -1], num_workers=2, num_ahead=lambda: 2))
    [3, 2, 1]

    Args:
        function: is called in threads. Its error is raised in place of its result.
        items: are taken in the caller's thread, when there is room for them.
        num_workers: number of threads; 0 calls the function in the caller's thread.
        num_ahead: most items that are taken before the result of the first of them is; it may change.
    """
    if num_workers == 0:
        yield from map(function, items)
        return
    items = iter(items)
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="read ahead")
    try:
        pending: deque[Future[Result]] = deque()
        while True:
            room = max(0, num_ahead() - len(pending))
            pending.extend(pool.submit(function, item) for item in islice(items, room))
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
