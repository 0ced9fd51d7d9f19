"""A search with Optuna on a real SLURM: two trials at once, one is preempted, one is pruned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from linnaeus.sweep.folder import Sweep
from linnaeus.sweep.search import Study
from tests.helpers.run_files import figures
from tests.helpers.runs import wait_until
from tests.slurm import cluster
from tests.slurm.cluster import ENV, EXPERIMENT, ON_SLURM, QUEUED_AGAIN, Cluster, Shell, queue

pytest.importorskip("optuna")

pytestmark = [*cluster.MARKS, pytest.mark.timeout(900)]

SEARCH = (
    "sweep", "--cfg", "my_exp.yaml", "--search", "optuna", "OPTIMIZER.LR=interval(1e-6,1e-1)",
    "TRAIN.EPOCHS=4", *ON_SLURM,
)  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), **ENV) as running:
        yield running


def test_a_search_on_slurm(slurm: Cluster, tmp_path: Path) -> None:
    """A trial is pruned against five that have ended, so the sixth is added later."""
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    sweep = tmp_path / "runs/small"
    shell = Shell(slurm, tmp_path, *SEARCH, "--trials", "5")
    wait_until(lambda: len([*sweep.glob("*/checkpoints/last.pt")]) == 2, log=shell.log)
    assert len(queue(slurm)) == 2, "as --jobs says"
    urgent = slurm.call("sbatch", "--parsable", "--partition=high", "--ntasks=1", "--wrap=true")
    slurm.wait_for(urgent, "JobState", "COMPLETED")
    (tmp_path / "quick").touch()
    assert shell.end() == 0, shell.log.read_text()
    assert [entry["status"] for entry in figures(sweep)] == ["finished"] * 5
    said = "".join(path.read_text() for path in sweep.glob("slurm/*.out"))
    assert said.count(QUEUED_AGAIN) == 1, said
    again = Shell(slurm, tmp_path, *SEARCH, "--trials", "6")
    again.end()
    trials = Study(Sweep.read(sweep)).trials()
    assert [trial.state.is_finished() for trial in trials] == [True] * 6
