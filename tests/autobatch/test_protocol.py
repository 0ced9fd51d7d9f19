"""The exchange of results over a real store, the ranks being threads; processes are in test_ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from linnaeus import control
from linnaeus.autobatch import protocol
from linnaeus.autobatch.protocol import RankStatus, exchange
from linnaeus.autobatch.sizes import keys
from linnaeus.control import ControlPlane
from linnaeus.dist import RankEnded, World, errors_told_first
from linnaeus.errors import AutoBatchError, ConfigError, LinnaeusError

Work = Callable[[RankStatus], Any]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BEAT_S", 0.05)


def ranks(*works: Work, timeout_minutes: float = 1.0) -> list[Any]:
    """What each rank returns, or the code that it ends with, when each does its own work."""
    store = HashStore()

    def one(rank: int) -> Any:
        try:
            with ControlPlane(store, rank, len(works)) as plane:
                world = World(CPU, rank=rank, world_size=len(works), control=plane)
                with errors_told_first(world):
                    return exchange(plane, works[rank], timeout_minutes=timeout_minutes, names=keys("train"))
        except RankEnded as ended:
            return ended.code

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


def test_one_process_needs_no_control_plane() -> None:
    assert exchange(None, gives(7)) == [7]


def test_one_process_gets_its_own_error() -> None:
    with pytest.raises(KeyError), errors_told_first(World(CPU)):
        exchange(None, raises(KeyError("a")))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_reaches_every_rank_with_its_message(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    works = [gives(None)] * 3
    works[rank] = raises(ValueError("this is broken"))
    assert ranks(*works) == [1, 1, 1]
    told = capsys.readouterr().err
    assert f"[rank {rank}] ValueError: this is broken\n" in told
    for other in {0, 1, 2} - {rank}:
        assert f"[rank {other}] rank {rank}: ValueError: this is broken\n" in told
    assert told.count("Traceback") == 1


@pytest.mark.parametrize("error", [AutoBatchError("nothing fits"), LinnaeusError("x"), ConfigError("a key")])
def test_an_error_of_ours_keeps_its_exit_code_and_has_no_traceback(
    error: LinnaeusError, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks(raises(error), gives(None)) == [error.exit_code] * 2
    told = capsys.readouterr().err
    assert f"[rank 0] {error}\n" in told
    assert "Traceback" not in told


def test_an_interruption_of_one_rank_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert ranks(raises(KeyboardInterrupt()), gives(None)) == [1, 1]
    assert "[rank 1] rank 0: KeyboardInterrupt" in capsys.readouterr().err


def test_with_two_errors_every_rank_ends() -> None:
    assert ranks(raises(ValueError("a")), raises(ValueError("b")), gives(None)) == [1, 1, 1]


def test_a_rank_that_lives_but_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(protocol, "GRACE_S", 0.2)
    assert ranks(waits(1.5, doing="trying 128"), gives(None), timeout_minutes=0.2 / 60) == [3, 3]
    told = capsys.readouterr().err
    assert "DATA.AUTOBATCH.TIMEOUT_MINUTES" in told
    assert "trying 128" in told


def test_what_a_rank_does_and_waits_for_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 shows it on the user's terminal."""
    monkeypatch.setattr(control, "POLL_S", (0.001, 0.01))
    shown: dict[int, list[str]] = {0: [], 1: []}

    def until_seen(status: RankStatus) -> None:
        status.update("train: trying batch size 128")
        while "waiting for rank 1: train: trying batch size 128" not in shown[0]:
            time.sleep(0.01)

    store = HashStore()

    def one(rank: int) -> None:
        with ControlPlane(store, rank, 2) as plane:
            exchange(plane, [gives(None), until_seen][rank], timeout_minutes=0.5, show=shown[rank].append)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))
    assert shown[0][:2] == ["starting", "waiting"]
    assert shown[1] == ["starting", "train: trying batch size 128", "waiting"]


def test_a_waiting_rank_reports_a_change_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same text would be reported every 30 seconds only."""
    monkeypatch.setattr(control, "CHANGE_S", 0.1)
    monkeypatch.setattr(control, "POLL_S", (0.001, 0.01))

    def two_sizes(status: RankStatus) -> None:
        for size in (64, 128):
            status.update(f"train: trying batch size {size}")
            time.sleep(0.6)

    with caplog.at_level(logging.INFO, "linnaeus.control"):
        ranks(two_sizes, gives(None))
    reports = [text for record in caplog.records if " s for rank 0" in (text := record.getMessage())]
    assert [report.rpartition(" ")[2] for report in reports] == ["64", "128"]


def test_waiting_ranks_report_what_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "REPORT_S", 0.5)

    def reports() -> list[str]:
        return [text for record in caplog.records if " s for rank 0" in (text := record.getMessage())]

    def until_three_reports(status: RankStatus) -> None:
        status.update("train: trying batch size 128")
        while len(reports()) < 3:
            time.sleep(0.01)

    began = time.monotonic()
    with caplog.at_level(logging.INFO, "linnaeus.control"):
        ranks(until_three_reports, gives(None))
    assert 3 <= len(reports()) <= (time.monotonic() - began) / 0.5
    assert all(report.endswith("train: trying batch size 128") for report in reports())
