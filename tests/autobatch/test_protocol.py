"""The exchange between ranks over a real store, the ranks being threads; processes are in test_ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from linnaeus.autobatch import protocol
from linnaeus.autobatch.protocol import RankStatus, exchange
from linnaeus.dist import World
from linnaeus.errors import AutoBatchError, ConfigError, LinnaeusError

Work = Callable[[RankStatus], Any]
CPU = torch.device("cpu")


def ranks(*works: Work, timeout_minutes: float = 1.0, store: Any = None) -> list[Any]:
    """What each rank returns or raises when each does its own work."""
    store = store or HashStore()

    def one(rank: int) -> Any:
        world = World(CPU, rank=rank, world_size=len(works), local_world_size=len(works), store=store)
        try:
            return exchange(world, "test", works[rank], timeout_minutes=timeout_minutes)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, range(len(works))))


def gives(value: Any) -> Work:
    return lambda status: value


def raises(error: BaseException) -> Work:
    def work(status: RankStatus) -> Any:
        raise error

    return work


def waits(seconds: float, value: Any = None, doing: str = "working") -> Work:
    def work(status: RankStatus) -> Any:
        status.update(doing)
        time.sleep(seconds)
        return value

    return work


def test_every_rank_gets_the_results_of_all_in_their_order() -> None:
    results = [{"size": 8}, [1, 2], None, "text"]
    assert ranks(*map(gives, results)) == [results] * 4


def test_one_process_needs_no_store() -> None:
    assert exchange(World(CPU), "test", gives(7)) == [7]


def test_one_process_gets_its_own_error() -> None:
    with pytest.raises(KeyError):
        exchange(World(CPU), "test", raises(KeyError("a")))


def test_a_slow_rank_is_waited_for() -> None:
    assert ranks(waits(1.0, "late"), gives("soon")) == [["late", "soon"]] * 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_reaches_every_rank_with_its_message(rank: int) -> None:
    works = [gives(None)] * 3
    works[rank] = raises(ValueError("this is broken"))
    outcomes = ranks(*works)
    assert isinstance(outcomes[rank], ValueError)
    for other in {0, 1, 2} - {rank}:
        assert isinstance(outcomes[other], LinnaeusError)
        assert str(outcomes[other]) == f"rank {rank}: ValueError: this is broken"
        assert outcomes[other].exit_code == 1


@pytest.mark.parametrize("error", [AutoBatchError("nothing fits"), ConfigError("a key"), LinnaeusError("x")])
def test_an_error_of_ours_keeps_its_exit_code(error: LinnaeusError) -> None:
    mine, other = ranks(raises(error), gives(None))
    assert mine is error
    assert other.exit_code == error.exit_code
    assert str(other) == f"rank 0: {error}"


def test_an_interruption_of_one_rank_ends_the_others() -> None:
    mine, other = ranks(raises(KeyboardInterrupt()), gives(None))
    assert isinstance(mine, KeyboardInterrupt)
    assert isinstance(other, LinnaeusError)
    assert "KeyboardInterrupt" in str(other)


def test_with_two_errors_every_rank_ends() -> None:
    outcomes = ranks(raises(ValueError("a")), raises(ValueError("b")), gives(None))
    assert all(isinstance(outcome, Exception) for outcome in outcomes)


def test_a_rank_that_never_starts_counts_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SILENCE_S", 0.5)
    world = World(CPU, rank=0, world_size=2, store=HashStore())
    with pytest.raises(AutoBatchError, match=r"rank 1 has given no sign of life.*last heard of: nothing"):
        exchange(world, "test", gives(None))


def test_silence_is_told_with_what_the_rank_was_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's heartbeat stops after its first."""
    monkeypatch.setattr(protocol, "SILENCE_S", 1.0)
    monkeypatch.setattr(protocol, "BEAT_S", 3.0)
    monkeypatch.setattr(protocol, "_end_hung_sibling", lambda beat: None)  # it would be this very process
    _, waiting = ranks(waits(2.5), gives(None))
    assert isinstance(waiting, AutoBatchError)
    assert "rank 0 has given no sign of life" in str(waiting)


def test_a_rank_that_lives_but_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "GRACE_S", 0.2)
    monkeypatch.setattr(protocol, "BEAT_S", 0.1)
    _, waiting = ranks(waits(1.5, doing="trying 128"), gives(None), timeout_minutes=0.2 / 60)
    assert isinstance(waiting, AutoBatchError)
    assert "DATA.AUTOBATCH.TIMEOUT_MINUTES" in str(waiting)
    assert "trying 128" in str(waiting)


def test_waiting_ranks_report_what_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protocol, "REPORT_S", 0.5)
    monkeypatch.setattr(protocol, "BEAT_S", 0.1)

    def reports() -> list[str]:
        return [text for record in caplog.records if " s for rank 0" in (text := record.getMessage())]

    def until_three_reports(status: RankStatus) -> None:
        status.update("train: trying batch size 128")
        while len(reports()) < 3:
            time.sleep(0.01)

    began = time.monotonic()
    with caplog.at_level(logging.INFO, "linnaeus.autobatch"):
        ranks(until_three_reports, gives(None))
    assert 3 <= len(reports()) <= (time.monotonic() - began) / 0.5
    assert all(report.endswith("train: trying batch size 128") for report in reports())


def test_exchanges_of_different_names_keep_apart() -> None:
    store = HashStore()

    def twice(rank: int) -> list[Any]:
        world = World(CPU, rank=rank, world_size=2, store=store)
        return [exchange(world, name, gives((name, rank))) for name in ("a", "b")]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(twice, (0, 1))) == [[[["a", 0], ["a", 1]], [["b", 0], ["b", 1]]]] * 2


def test_no_thread_outlives_the_exchange() -> None:
    before = threading.active_count()
    ranks(gives(1), raises(ValueError("a")))
    assert threading.active_count() == before
