"""Functions side by side in threads, whose first error ends the test."""

import threading
from concurrent import futures

from tests.helpers import children


def together(*functions):
    """Call functions in a thread each, and return what they return, in their order.

    The first error ends the wait; threads that still run then are left behind.

    Raises:
        BaseException: the first that a function raises.
        AssertionError: a function does not return within `children.limit_s`.
    """

    def call(function, result):
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    results = [futures.Future() for _ in functions]
    for pair in zip(functions, results, strict=True):
        threading.Thread(target=call, args=pair, daemon=True).start()
    done, late = futures.wait(results, children.limit_s, futures.FIRST_EXCEPTION)
    for result in done:
        result.result()
    assert not late, f"{len(late)} functions have not returned within {children.limit_s} s"
    return [result.result() for result in results]
