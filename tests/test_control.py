"""The control plane over a real store, the ranks being threads; processes are in test_processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from linnaeus import control
from linnaeus.control import ControlPlane, Failure, ForeignFailureError, OverdueError, agree_on_attempt
from linnaeus.errors import LinnaeusError

Work = Callable[[ControlPlane], Any]


def ranks(*works: Work, store: Any = None) -> list[Any]:
    """What each rank's work returns or raises."""
    store = store or HashStore()

    def one(rank: int) -> Any:
        try:
            with ControlPlane(store, rank, len(works)) as plane:
                return works[rank](plane)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, range(len(works))))


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BEAT_S", 0.02)
    monkeypatch.setattr(control, "POLL_S", (0.001, 0.02))


def fails(plane: ControlPlane) -> None:
    plane.fail(Failure(plane.rank, "this is broken", 7))


# --- exchanges ---


def test_gather_gives_every_rank_the_values_of_all_in_their_order() -> None:
    assert (
        ranks(*[lambda plane: plane.gather({"rank": plane.rank})] * 3)
        == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    )


def test_collect_gives_rank_0_the_values_of_all() -> None:
    assert ranks(*[lambda plane: plane.collect(plane.rank)] * 3) == [[0, 1, 2], None, None]


def test_broadcast_gives_every_rank_the_value_of_rank_0() -> None:
    assert ranks(*[lambda plane: plane.broadcast(("from", plane.rank))] * 3) == [("from", 0)] * 3


lists_keys = pytest.mark.skipif(
    not hasattr(HashStore, "list_keys"), reason="torch before 2.9 does not list the keys of a store"
)


@lists_keys
def test_many_exchanges_keep_apart_and_leave_few_keys() -> None:
    store = HashStore()

    def work(plane: ControlPlane) -> list[Any]:
        found = []
        for number in range(50):
            found += [plane.gather((number, plane.rank)), plane.broadcast((plane.rank, number))]
            plane.collect(number)
        return found

    expected = [item for number in range(50) for item in ([(number, rank) for rank in range(3)], (0, number))]
    assert ranks(work, work, work, store=store) == [expected] * 3
    values = [key for key in store.list_keys() if "value/" in str(key)]
    assert len(values) <= 3 * 4, values


def test_a_slow_rank_is_waited_for() -> None:
    def late(plane: ControlPlane) -> list[Any]:
        time.sleep(0.5)
        return plane.gather("late")

    assert ranks(late, lambda plane: plane.gather("soon")) == [["late", "soon"]] * 2


def test_a_rank_that_takes_too_long_is_named_with_what_it_does() -> None:
    done = threading.Event()

    def busy(plane: ControlPlane) -> None:
        plane.update("trying 128")
        done.wait(60)

    def waiting(plane: ControlPlane) -> None:
        try:
            while plane._doing_of(0) != "trying 128":
                time.sleep(0.01)
            plane.gather(None, limit_s=0.1)
        finally:
            done.set()

    _, error = ranks(busy, waiting)
    assert isinstance(error, OverdueError)
    assert (error.rank, error.doing) == (0, "trying 128")


# --- failures ---


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_failure_reaches_every_rank_that_waits(rank: int) -> None:
    works: list[Work] = [lambda plane: plane.gather(None)] * 3
    works[rank] = fails
    outcomes = ranks(*works)
    for other in {0, 1, 2} - {rank}:
        assert isinstance(outcomes[other], LinnaeusError)
        assert str(outcomes[other]) == f"rank {rank}: this is broken"
        assert outcomes[other].exit_code == 7


def test_messages_call_a_rank_by_its_name() -> None:
    """A group's ranks 0 and 1 may be the job's 2 and 3."""
    store = HashStore()
    with (
        ControlPlane(store, 0, 2, name_of=lambda rank: rank + 2) as main,
        ControlPlane(store, 1, 2, name_of=lambda rank: rank + 2) as other,
    ):
        with pytest.raises(OverdueError, match="rank 3 is overdue"):
            main.gather(0, limit_s=0.05)
        other.fail(Failure(1, "this is broken", 7))
        with pytest.raises(ForeignFailureError, match="rank 3: this is broken") as caught:
            main.check()
    assert (caught.value.failure, caught.value.exit_code) == (Failure(1, "this is broken", 7), 7)


def test_a_value_that_a_rank_sent_before_it_failed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes, and the failure after it, between two looks of the rank that waits."""
    monkeypatch.setattr(control, "FAREWELL_S", 0.0)
    store = HashStore()
    with ControlPlane(store, 0, 2) as main, ControlPlane(store, 1, 2) as other:
        exist, has_failed = main._keys.exist, False

        def exist_before(keys: list[str]) -> bool:
            nonlocal has_failed
            found = exist(keys)
            if keys == ["value/0/1"] and not has_failed:
                has_failed = True
                other.collect("sent")
                fails(other)
            return found

        monkeypatch.setattr(main._keys, "exist", exist_before)
        assert main.collect("mine") == ["mine", "sent"]
        with pytest.raises(LinnaeusError, match="rank 1: this is broken"):
            main.collect("next")


def test_the_first_failure_counts() -> None:
    def both(plane: ControlPlane) -> Failure:
        time.sleep(0.3 * plane.rank)
        return plane.fail(Failure(plane.rank, "mine"))

    assert ranks(both, both) == [Failure(0, "mine")] * 2


def test_a_failed_rank_stays_until_the_others_have_read_it() -> None:
    was_read, had_read = threading.Event(), []

    def failing(plane: ControlPlane) -> None:
        fails(plane)
        had_read.append(was_read.is_set())

    def reading(plane: ControlPlane) -> None:
        plane._pulse.stop()
        while plane.failure is None:
            time.sleep(0.01)
        time.sleep(0.2)
        was_read.set()
        plane.gather(None)

    ranks(failing, reading)
    assert had_read == [True]


def test_a_rank_that_hangs_after_a_failure_is_ended() -> None:
    """Such as in a collective of NCCL, which ends when all ranks come."""
    ended: list[Failure] = []
    store = HashStore()
    with (
        ControlPlane(store, 0, 2, end_process=ended.append) as hanging,
        ControlPlane(store, 1, 2) as failing,
    ):
        fails(failing)
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
        assert hanging.failure == Failure(1, "this is broken", 7)
    assert ended[0] == Failure(1, "this is broken", 7)


# --- silence ---


@pytest.mark.parametrize("silent", [0, 1])
def test_silence_is_told_with_what_the_rank_was_doing(silent: int) -> None:
    """The heartbeat of one rank stops."""
    began = time.monotonic()

    def falls_silent(plane: ControlPlane) -> None:
        plane.update("trying 128")
        plane._pulse.stop()

    works: list[Work] = [lambda plane: plane.gather(None)] * 2
    works[silent] = falls_silent
    error = ranks(*works)[1 - silent]
    assert isinstance(error, LinnaeusError)
    assert f"rank {silent}: no sign of life" in str(error)
    assert "trying 128" in str(error)
    assert time.monotonic() - began >= control.SILENCE_LOOKS * control.BEAT_S


def test_ranks_that_were_suspended_together_find_nobody_silent() -> None:
    """None of them beats or looks for longer than silence lasts; they go on one after the other."""
    store, awake = HashStore(), threading.Event()
    with ControlPlane(store, 0, 2) as first, ControlPlane(store, 1, 2) as second:
        for plane in (first, second):
            run = plane._pulse.beat
            plane._pulse.beat = lambda keys, run=run: (awake.wait(), run(keys))  # type: ignore[method-assign]
        time.sleep(2 * control.SILENCE_LOOKS * control.BEAT_S)
        awake.set()
        time.sleep(5 * control.BEAT_S)
        assert first.failure is None


def test_a_rank_that_has_not_begun_its_heartbeat_is_not_silent() -> None:
    store = HashStore()
    with ControlPlane(store, 0, 2) as early:
        time.sleep(2 * control.SILENCE_LOOKS * control.BEAT_S)
        assert early.failure is None
        with ControlPlane(store, 1, 2) as late, ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda plane: plane.gather(1), (early, late))) == [[1, 1]] * 2


def test_no_thread_outlives_the_plane() -> None:
    before = set(threading.enumerate())
    ranks(lambda plane: plane.gather(1), lambda plane: plane.gather(2))
    assert set(threading.enumerate()) <= before


# --- attempts ---


def joined(
    store: Any, world_size: int, delays: dict[int, float] | None = None, limit_s: float = 30
) -> list[Any]:
    def one(rank: int) -> Any:
        time.sleep((delays or {}).get(rank, 0))
        try:
            return agree_on_attempt(store, rank, world_size, limit_s)
        except LinnaeusError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_ranks_agree_on_a_name_that_no_earlier_attempt_had(late: int) -> None:
    store = HashStore()
    names = [joined(store, 3, {late: 0.3}) for _ in range(3)]
    assert all(len(set(attempt)) == 1 for attempt in names)
    assert len({attempt[0] for attempt in names}) == 3


@pytest.mark.parametrize("dead", [0, 1])
def test_what_an_attempt_that_failed_while_joining_has_left_does_not_matter(dead: int) -> None:
    """One rank of the first attempt laid down its card, or told a name, and died."""
    store = HashStore()
    with pytest.raises(LinnaeusError, match="has not started within"):
        agree_on_attempt(store, 1 - dead, 2, 0.2)
    first, second = joined(store, 2, {dead: 0.3})
    assert first == second


def test_another_number_of_ranks_can_join_after_a_restart() -> None:
    store = HashStore()
    for world_size in (3, 2, 4):
        assert len(set(joined(store, world_size))) == 1


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(LinnaeusError, match=r"rank 1, 2 has not started.*DIST.START_MINUTES"):
        agree_on_attempt(PrefixStore("a", store), 0, 3, 0.2)
    with pytest.raises(LinnaeusError, match=r"rank 0 has not started"):
        agree_on_attempt(PrefixStore("b", store), 2, 3, 0.2)


@lists_keys
def test_a_value_larger_than_the_store_takes_at_once_arrives_whole() -> None:
    store = HashStore()
    value = b"0123456789abcdef" * (200 * 1024)

    def work(plane: ControlPlane) -> bool:
        received = plane.broadcast(value if plane.rank == 0 else None)
        plane.gather(None)
        return bool(received == value)

    assert ranks(work, work, store=store) == [True, True]
    assert all(len(store.get(key)) <= control._PART_BYTES + 8 for key in store.list_keys())
    assert not [key for key in store.list_keys() if "value/0/" in key], "it is forgotten"


# --- requests to rank 0 ---


def serves(do: Callable[[Any], object]) -> Work:
    """A rank 0 that hangs, as in a collective, until the other rank says that it is done."""

    def work(plane: ControlPlane) -> Any:
        plane.on_request = do
        return plane.gather("in a collective")

    return work


def asks(plane: ControlPlane) -> bool:
    is_done = plane.ask_main(8, limit_s=10)
    plane.gather("done")
    return is_done


def test_rank_0_does_what_another_rank_asks_for_once_while_it_waits_itself() -> None:
    done: list[Any] = []
    _, *answers = ranks(serves(done.append), asks, asks)
    assert answers == [True, True]
    assert done == [8]


def test_a_request_that_fails_is_answered_so() -> None:
    def fail(request: Any) -> None:
        raise OSError("the disk is full")

    assert ranks(serves(fail), asks)[1] is False


def test_a_request_is_not_waited_for_when_the_job_has_failed() -> None:
    def ask(plane: ControlPlane) -> bool:
        return plane.ask_main(8, limit_s=10)

    started = time.monotonic()
    _, answer = ranks(fails, ask)
    assert answer is False
    assert time.monotonic() - started < 9
