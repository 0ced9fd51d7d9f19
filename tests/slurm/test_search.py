"""A search with Optuna on a real SLURM: two trials at once, one is preempted, one is pruned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.runs import wait_until
from tests.slurm import cluster
from tests.slurm.cluster import ENV, EXPERIMENT, ON_SLURM, QUEUED_AGAIN, Cluster, Shell, entries, queue

pytest.importorskip("optuna")

pytestmark = [*cluster.MARKS, pytest.mark.timeout(900)]

SEED = 38
"""With this one the first five rates are of use, and the sixth is 4e-6, by far the lowest."""
SEARCH = (
    "sweep", "--cfg", "my_exp.yaml", "--search", "optuna", "OPTIMIZER.LR=interval(1e-6,1e-1)",
    "TRAIN.EPOCHS=8", f"EXPERIMENT.SEED={SEED}", *ON_SLURM,
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
    assert [entry["status"] for entry in entries(sweep)] == ["finished"] * 5
    outputs = [path.read_text() for path in sweep.glob("*/logs/output.txt")]
    assert sum(QUEUED_AGAIN in text for text in outputs) == 1
    assert sum("resumed" in text for text in outputs) == 1

    (tmp_path / "quick").unlink()
    again = Shell(slurm, tmp_path, *SEARCH, "--trials", "6")
    assert again.end() == 0, again.log.read_text()
    *others, last = entries(sweep)
    assert [entry["status"] for entry in others] == ["finished"] * 5
    assert last["status"] == "pruned", last
    assert float(last["values"]["OPTIMIZER.LR"]) < min(
        float(entry["values"]["OPTIMIZER.LR"]) for entry in others
    )
    assert again.log.read_text().count("ended well") == 5
    assert not (tmp_path / last["folder"] / "result.json").exists()
    wait_until(lambda: not queue(slurm))
