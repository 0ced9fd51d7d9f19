"""Signals that ask a run to stop: noted while it can save, obeyed at once where it cannot."""

import os
import signal
from contextlib import suppress

import pytest

from linnaeus.runtime.signals import SIGNALS, Interrupted, StopRequest

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_obeyed_at_once_unless_it_is_deferred(number):
    with StopRequest().listening() as request:
        with request.deferred():
            signal.raise_signal(number)
        assert request.stop_signal == number
        with pytest.raises(Interrupted) as caught:
            signal.raise_signal(number)
    assert caught.value.exit_code == 128 + number


@pytest.mark.parametrize(
    ("first", "second", "is_obeyed"), [(INT, INT, True), (TERM, TERM, False), (TERM, INT, False)]
)
def test_a_second_ctrl_c_is_obeyed_at_once(first, second, is_obeyed):
    with StopRequest().listening() as request, request.deferred():
        signal.raise_signal(first)
        try:
            signal.raise_signal(second)
        except Interrupted:
            assert is_obeyed
        else:
            assert not is_obeyed
        assert request.stop_signal == first


@pytest.mark.parametrize("number", [INT, TERM])
def test_ctrl_c_is_answered_before_its_handler_runs(number, capfd):
    """The interpreter writes to the pipe at once, and runs the handler when a call into C has returned."""
    with StopRequest().listening() as request:
        pipe = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(pipe)
        os.write(pipe, bytes([number]))
    assert request.stop_signal == 0
    assert ("Ctrl-C" in capfd.readouterr().err) == (number == INT)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_signal_to_a_forked_process_is_not_one_to_its_parent(caplog):
    """Such as SIGTERM to a loader's worker."""
    caplog.set_level("INFO")
    with StopRequest().listening() as request, request.deferred():
        if (child := os.fork()) == 0:
            with suppress(Interrupted):
                signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
    assert (request.stop_signal, caplog.messages) == (0, [])
