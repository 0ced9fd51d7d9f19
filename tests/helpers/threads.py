"""Functions side by side in threads, whose first error ends the test."""

import queue
import threading

from tests.helpers import forks


def together(*functions):
    """Call functions in a thread each, and return what they return, in their order.

    The first error ends the wait; threads that still run then are left behind.

    Raises:
        BaseException: the first that a function raises.
        AssertionError: a function does not return within `forks.limit_s`.
    """
    ended = queue.SimpleQueue()

    def call(number, function):
        try:
            ended.put((number, function(), None))
        except BaseException as error:
            ended.put((number, None, error))

    for number, function in enumerate(functions):
        threading.Thread(target=call, args=(number, function), daemon=True).start()
    results = {}
    for _ in functions:
        try:
            number, result, error = ended.get(timeout=forks.limit_s)
        except queue.Empty:
            late = sorted({*range(len(functions))} - results.keys())
            raise AssertionError(
                f"functions {late} have not returned within {forks.limit_s} s"
            ) from None
        if error is not None:
            raise error
        results[number] = result
    return [results[number] for number in range(len(functions))]
