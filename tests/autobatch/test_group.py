"""Ranks that search together: real processes, started once for the bodies of tests in `group_ranks`."""

import pytest

from tests.autobatch.group_ranks import BODIES
from tests.helpers import children
from tests.helpers.children import ROOT
from tests.helpers.processes import compute
from tests.helpers.runs import wait_until

pytestmark = [pytest.mark.e2e]

PROGRAM = "tests.autobatch.group_ranks"


def wrong_on(num_ranks, folder):
    """What went wrong in each body, by rank."""
    (folder / "num_ranks").write_text(str(num_ranks))
    return compute(PROGRAM, num_ranks, folder)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return wrong_on(2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("body", [body.__name__ for body in BODIES[2]])
def test_two_ranks(of_two, body):
    assert [rank[body] for rank in of_two] == ["", ""]


def test_four_ranks(tmp_path):
    for rank in wrong_on(4, tmp_path):
        assert rank == {body.__name__: "" for body in BODIES[4]}


def ranks_that_run(call, folder):
    """Two ranks that no launcher ends; each calls a function of the program until its object is gone."""
    program = f"import {PROGRAM} as p, pathlib; p.{call}"
    with (folder / "log.txt").open("w") as log:
        return [
            children.start(
                ["-c", program.format(rank)],
                cwd=folder,
                env={"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )
            for rank in range(2)
        ]


def test_a_rank_in_a_collective_that_never_ends_is_ended(tmp_path):
    call = "search_until_one_fails_within_a_collective({}, pathlib.Path('.'))"
    ranks = ranks_that_run(call, tmp_path)
    wait_until(lambda: (tmp_path / "error.txt").exists())
    assert ranks[1].poll() is None, "it does not end the other one by its own end"
    assert [rank.wait(children.limit_s) for rank in ranks] == [1, 0]
    assert (tmp_path / "error.txt").read_text(), "what rank 1 raises"
    assert "AutoBatch: rank 1: " in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(("dead", "joint"), [(0, False), (1, True)])
def test_a_killed_rank_ends_the_other_with_the_cause(tmp_path, dead, joint):
    call = f"search_until_one_dies({{}}, {dead}, pathlib.Path('.'), {joint})"
    ranks = ranks_that_run(call, tmp_path)
    code = ranks[dead].wait(children.limit_s)
    assert code == -9, (tmp_path / "log.txt").read_text()
    ranks[1 - dead].wait(children.limit_s)
    text = (tmp_path / "error.txt").read_text()
    assert text.startswith("AutoBatchError: ")
    assert ("rank 1: " if dead == 1 else "store") in text, "rank 0 serves the store"
