"""The exchange of results over a real store, with threads or a script as ranks; processes: test_ranks."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from linnaeus.autobatch.ranks.protocol import RankStatus, search_on_ranks
from linnaeus.autobatch.settings import SearchSettings
from linnaeus.runtime.distributed import RankEnded, World, report_errors_to_all_ranks
from linnaeus.runtime.errors import AutoBatchError, LinnaeusError
from tests.helpers import planes
from tests.helpers.planes import add_events, nothing
from tests.helpers.searches import result

CPU = torch.device("cpu")


def exchange(plane, work, show=lambda text: None):
    """What all ranks return, when this one does its work."""
    status = RankStatus(show, plane)
    return status.gather(work(status))


def ranks(*works):
    """What each rank returns, or the code that it ends with, when each does its own work."""

    def one(plane):
        try:
            with report_errors_to_all_ranks(
                World(CPU, rank=plane.rank, world_size=len(works), control=plane)
            ):
                return exchange(plane, works[plane.rank])
        except RankEnded as ended:
            return ended.code

    return planes.ranks(*[one] * len(works))


def gives(value):
    return lambda status: value


def raises(error):
    def work(status):
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ValueError("broken"), 1, "ValueError: broken"),
        (AutoBatchError("broken"), 3, "broken"),
        (KeyboardInterrupt(), 1, "KeyboardInterrupt"),
    ],
)
def test_an_error_of_one_rank_ends_all_with_its_exit_code(error, code, told, capsys):
    assert ranks(gives(None), raises(error), gives(None)) == [code] * 3
    text = capsys.readouterr().err
    for line in (f"[rank 1] {told}", f"[rank 0] rank 1: {told}", f"[rank 2] rank 1: {told}"):
        assert line in text
    assert ("Traceback" in text) != isinstance(error, LinnaeusError), (
        "only of an error that is not ours"
    )


def test_what_a_rank_does_and_waits_for_can_be_shown():
    """Rank 0 shows it on the user's terminal."""
    main, other = planes.control_planes()
    add_events(main, lambda: other.update("trying 128"), *[nothing] * 50, lambda: other.gather(8))
    shown = []
    assert exchange(main, gives(4), show=shown.append) == [4, 8]
    assert shown[0] == "waiting"
    assert len(set(shown[1:])) == 1
    assert shown[1].endswith("trying 128")


# --- a size for all ranks ---


class Finder:
    """Finds what a test says, and notes what it was asked for: the sizes tried first, where there is one."""

    def __init__(self, *results):
        self.results = list(results)
        self.asked = []

    @contextmanager
    def __call__(self, status, settings):
        self.asked.append(settings.start)
        yield SimpleNamespace(find=partial(self.results.pop, 0))


def search(finders, **options):
    """What each rank gets when all search together."""

    def one(plane):
        return search_on_ranks(finders[plane.rank], SearchSettings(), plane, **options)

    return planes.ranks(*[one] * len(finders))


def test_the_size_of_all_is_one_that_has_run_on_every_rank():
    """Rank 2 runs out of memory at 16, and rank 1 then at 12. Only rank 0 searches at first."""
    rounds = (
        [(16, 9, "fits"), (16, 16, "fits"), (12, 12, "fits"), (8, 8, "fits")],
        [(16, 16, "fits"), (8, 12, "oom"), (8, 8, "fits")],
        [(12, 16, "oom"), (12, 12, "fits"), (8, 8, "fits")],
    )
    finders = [
        Finder(*(result(size, trial, rank=rank) for size, *trial in each))
        for rank, each in enumerate(rounds)
    ]
    found, *same = search(finders)
    assert same == [found, found]
    assert [finder.asked for finder in finders] == [[None, 16, 12, 8], [16, 12, 8], [16, 12, 8]]
    assert (found.batch_size, found.ran_on_every_rank) == (8, (8,))
    assert [trial.size for trial in found.trials] == [9, 16, 12, 8], "those of rank 0"
    assert (found.held_bytes, found.budget_bytes) == (2, 20), "of rank 0"
    assert found.seconds == 1 + 3 * 3, "of the slowest rank"


def test_a_size_that_is_planned_later_runs_once_on_every_rank():
    for there, size, ran in ((8, 16, (8,)), (6, 6, ())):
        finders = [Finder(result(8)), Finder(result(there, rank=1))]
        found, same = search(finders, found=result(16), size=8)
        assert found == same
        assert (found.batch_size, found.ran_on_every_rank) == (size, ran)
