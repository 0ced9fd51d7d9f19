"""The control plane over a real store, with threads or a script as ranks; processes are in test_processes."""

import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from torch.distributed import HashStore, PrefixStore

from linnaeus.autobatch.ranks import exchange, heartbeat
from linnaeus.autobatch.ranks.exchange import Failure, JobFailedError, OverdueError
from linnaeus.autobatch.ranks.heartbeat import ControlPlane
from linnaeus.runtime.distributed import Hang, JobControl, agree_on_attempt
from linnaeus.runtime.errors import LinnaeusError
from tests.helpers import children
from tests.helpers.planes import ScriptedClock, add_events, control_planes, nothing, ranks
from tests.helpers.threads import together

BROKEN = Failure(1, "broken", 7)


def ending(end):
    """A control plane that calls a function in place of the end of this process."""

    class Ending(ControlPlane):
        def end_process(self, failure):
            end(failure)

    return Ending


def fail(plane):
    return plane.fail(Failure(plane.rank, "broken", 7))


def test_exchanges_give_every_rank_its_values_and_leave_few_keys():
    """Also of values of megabytes, which are sent in parts."""
    store, gathered = HashStore(), list(range(3))
    large = b"0123456789abcdef" * (200 * 1024)

    def work(plane):
        mine = plane.rank
        return [
            (plane.gather((number, mine)), plane.broadcast((number, mine)), plane.collect(mine))
            for number in (large, *range(20))
        ]

    values = [
        ([(number, rank) for rank in gathered], (number, 0)) for number in (large, *range(20))
    ]
    main, *others = ranks(work, work, work, store=store)
    assert main == [(*each, gathered) for each in values]
    assert others == [[(*each, None) for each in values]] * 2
    assert len([key for key in store.list_keys() if "value/" in str(key)]) <= 3 * 4


def test_a_slow_rank_is_waited_for_with_few_looks_and_reported(caplog):
    """At most `limit_s`, where that is given."""
    caplog.set_level(logging.INFO, "linnaeus.autobatch.ranks")
    main, other = control_planes(name_of=lambda rank: rank + 2)
    waited = []
    pauses = [nothing] * 200
    pauses[45] = lambda: other.update("trying 128")
    pauses[199] = lambda: other.gather("late")
    clock = add_events(main, *pauses)
    assert main.gather("soon", on_wait=lambda *what: waited.append(what)) == ["soon", "late"]
    assert clock.seconds > 0.8 * len(pauses), "about one look a second costs no CPU"
    assert (waited[0], waited[-1]) == ((3, "starting"), (3, "trying 128"))
    seconds = [record.args[0] for record in caplog.records]
    apart = [after - before for before, after in itertools.pairwise(seconds)]
    assert exchange.REPORT_S < min(apart) <= max(apart) < exchange.REPORT_S + 3
    assert {record.args[1:] for record in caplog.records} == {(3, "trying 128")}
    begun = clock.seconds
    with pytest.raises(OverdueError) as caught:
        main.gather(None, limit_s=100)
    assert (caught.value.rank, caught.value.doing) == (3, "trying 128")
    assert 100 < clock.seconds - begun < 102


def test_ranks_that_meet_go_on_together_as_often_as_they_do():
    passed = []

    def work(plane):
        for number in range(3):
            plane.barrier("here", 3)
            passed.append((number, plane.rank))
            if plane.rank:
                plane.barrier("there", 2)

    ranks(work, work, work)
    assert [number for number, _ in passed] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_rank_that_others_wait_to_meet_too_long_ends_the_job():
    main, other = control_planes(limit_s=100.0)
    other.update("trying 128")
    with pytest.raises(JobFailedError, match="trying 128") as caught:
        main.barrier("here", 2)
    assert caught.value.failure.rank == 0
    with pytest.raises(JobFailedError):
        other.barrier("here", 3)


def test_a_later_error_of_a_rank_gives_way_to_the_first():
    main, other = control_planes()
    fail(other)
    with pytest.raises(JobFailedError, match="rank 1: broken") as caught:
        main.publish(RuntimeError("Connection closed by peer"))
    assert (caught.value.failure, caught.value.exit_code) == (BROKEN, 7)
    main.publish(KeyboardInterrupt())
    other.publish(LinnaeusError("broken"))
    with pytest.raises(JobFailedError, match="rank 1: broken"):
        other.publish(LinnaeusError("broken"), always_raise=True)


def test_the_first_failure_counts_and_stays_until_others_read_it():
    main, other = control_planes()
    clock = add_events(other, nothing, nothing, main.look)
    assert other.fail(BROKEN) == BROKEN
    assert clock.seconds < exchange.FAREWELL_S / 2
    assert main.fail(Failure(0, "mine")) == BROKEN == main.failure
    deserted, _ = control_planes()
    fail(deserted)
    assert deserted.clock.seconds >= exchange.FAREWELL_S


def test_a_rank_that_hangs_after_a_failure_is_ended():
    """Such as in a collective of NCCL, which ends when all ranks come."""
    ended = []
    for communicates, expected in ((False, []), (True, [BROKEN])):
        hanging, failing = control_planes(kind=ending(ended.append))
        hanging.communicates = failing.communicates = communicates
        fail(failing)
        for _ in range(heartbeat.ABANDON_LOOKS):
            hanging.look()
        assert not ended
        hanging.look()
        for _ in range(2 * heartbeat.ABANDON_LOOKS):
            failing.look()
        assert ended == expected, "only in a collective, and the one that has failed ends by itself"


@pytest.mark.parametrize("is_zombie", [True, False])
def test_a_rank_whose_process_has_died_is_named(is_zombie):
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    main, third, other = control_planes(3)
    with patch("os.getpid", return_value=process.pid):
        other.update("trying 128")
        other.collect("sent")
    third.collect("sent too")
    assert sorted(main.neighbours()) == [process.pid]
    main.look()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if not is_zombie:
        process.wait()
    main.check()
    assert main.gather("mine") == ["mine", "sent too", "sent"], "what it has sent counts"
    death = third.death()
    assert death is not None, "rank 0 may be deaf, or on another machine"
    assert death.rank == 2
    add_events(main, nothing, main.look)
    with pytest.raises(JobFailedError, match="trying 128") as caught:
        main.gather("next")
    assert caught.value.failure == death
    process.communicate()


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_live_rank_is_named_and_later_ends_the_job(silent, caplog):
    """It may hold the GIL."""
    pair = control_planes(limit_s=2 * heartbeat.SILENCE_LOOKS * heartbeat.BEAT_S)
    watching = pair[1 - silent]
    pair[silent].update(lambda: f"{silent} works")
    watching.update("waiting")
    for number in range(2 * heartbeat.SILENCE_LOOKS):
        assert bool(caplog.records) == (number > heartbeat.SILENCE_LOOKS)
        watching.look()
    assert caplog.records[0].args[:2] == (silent, f"{silent} works")
    assert watching.failure is None
    watching.look()
    assert watching.failure.rank == silent
    for text in (f"rank {silent}: {silent} works", f"rank {1 - silent}: waiting"):
        assert text in watching.failure.message


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_stopped_process_ends_the_job_and_is_aborted(is_stopped, monkeypatch):
    main, other = control_planes(kind=partial(JobControl, minutes=10))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        with patch("os.getpid", return_value=process.pid):
            other.update("trying 128")
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        monkeypatch.setattr(os, "getppid", os.getpid)  # as if this process were a rank too
        for _ in range(heartbeat.SILENCE_LOOKS):
            main.look()
        assert main.failure is None
        main.look()
        assert isinstance(main.failure, Hang) == is_stopped
        process.communicate()
    assert process.returncode == (-signal.SIGABRT if is_stopped else 0)


def test_a_rank_that_beats_or_has_left_is_not_silent(caplog):
    main, other, leaving, _ = control_planes(4)
    with leaving:
        main.look()
    for number in range(3 * heartbeat.SILENCE_LOOKS):
        main.look()
        if number % (heartbeat.SILENCE_LOOKS - 1) == 0:
            other.look()
    assert main.failure is None
    assert not caplog.records


def test_a_thread_looks_until_the_plane_is_left(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)
    before, has_ended = set(threading.enumerate()), threading.Event()
    store = HashStore()
    watching = ending(lambda failure: has_ended.set())(store, 0, 2)
    watching.communicates = True
    with watching, ControlPlane(store, 1, 2) as failing:
        fail(failing)
        assert has_ended.wait(children.limit_s)
    assert set(threading.enumerate()) <= before


def joined(store, num_ranks, late=None):
    """The name that each rank agrees on; the late one comes once another has paused, waiting for it."""
    has_paused = threading.Event()

    def pause(seconds):
        has_paused.set()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pause)

    def one(rank):
        if rank == late:
            assert has_paused.wait(children.limit_s)
        return agree_on_attempt(store, rank, num_ranks, 30, clock)

    return together(*(lambda rank=rank: one(rank) for rank in range(num_ranks)))


def test_all_ranks_agree_on_a_name_that_no_earlier_attempt_had():
    """Whoever is late, and whatever the number of ranks after a restart."""
    store = HashStore()
    cases = ((3, 0), (3, 1), (3, 2), (2, 0), (4, None))
    attempts = [joined(store, num_ranks, late) for num_ranks, late in cases]
    assert all(len(set(names)) == 1 for names in attempts)
    assert len({names[0] for names in attempts}) == len(attempts)


@pytest.mark.parametrize("dead", [0, 1])
def test_leftovers_of_an_attempt_that_failed_to_join_do_no_harm(dead):
    """One rank of the first attempt laid down its card, or told a name, and died."""
    store = HashStore()
    with pytest.raises(LinnaeusError):
        agree_on_attempt(store, 1 - dead, 2, 30, ScriptedClock())
    first, second = joined(store, 2, dead)
    assert first == second


def test_ranks_that_do_not_come_are_named(capsys):
    store = HashStore()
    with pytest.raises(LinnaeusError, match=r"rank 1, 2 .*DIST.START_MINUTES"):
        agree_on_attempt(PrefixStore("a", store), 0, 3, 70, ScriptedClock())
    assert len(capsys.readouterr().err.splitlines()) == 2, "every 30 seconds"
    with pytest.raises(LinnaeusError, match=r"rank 0 .*DIST.START_MINUTES"):
        agree_on_attempt(PrefixStore("b", store), 2, 3, 70, ScriptedClock())
