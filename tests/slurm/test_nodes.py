import json

import pytest

from tests.helpers import children
from tests.helpers.run_files import figures
from tests.helpers.runs import TORCHRUN, wait_until
from tests.helpers.small_runs import validations_of
from tests.slurm import cluster
from tests.slurm.cluster import ENV, EXPERIMENT, QUEUED_AGAIN, Cluster, Shell, queue

pytestmark = [*cluster.MARKS, pytest.mark.timeout(900)]

RESOURCES = ("--launcher", "slurm", "--slurm", "nodes=2", "cpus-per-task=2", "time=30")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), num_nodes=2, **ENV) as running:
        yield running


def test_a_sweep_of_runs_over_two_nodes_each(slurm, tmp_path):
    """They take turns; the first is preempted on one of its nodes, and ends like one undisturbed."""
    (tmp_path / "my_exp.yaml").write_text(EXPERIMENT)
    sweep = tmp_path / "runs/small"
    words = ("--cfg", "my_exp.yaml", "TRAIN.EPOCHS=4")
    shell = Shell(
        slurm, tmp_path, "sweep", *words, "EXPERIMENT.SEED=0,1", *RESOURCES, "--jobs", "1"
    )
    first, second = (sweep / f"EXPERIMENT.SEED={seed}" for seed in range(2))
    wait_until((first / "checkpoints/last.pt").exists, log=shell.log)
    urgent = slurm.call("sbatch", "--parsable", "--partition=high", "--ntasks=1", "--wrap=true")
    slurm.wait_for(urgent, "JobState", "COMPLETED")
    (tmp_path / "quick").touch()
    assert shell.end() == 0, shell.log.read_text()
    assert not queue(slurm)
    assert [entry["status"] for entry in figures(sweep)] == ["finished"] * 2
    assert validations_of(first) == validations_of(second) == [6, 12, 18, 24]
    said = "".join(path.read_text() for path in sweep.glob("slurm/*.out"))
    assert said.count(QUEUED_AGAIN) == said.count("preempted") == 1, said
    text = (first / "logs/output.txt").read_text()
    assert text.count("resumed") == 1
    assert "x 2 ranks" in text
    assert "Traceback" not in text

    alone = (
        *TORCHRUN,
        "--nproc_per_node=2",
        "-m",
        "linnaeus.main",
        *words,
        "EXPERIMENT.NAME=alone",
    )
    outcome = children.python(*alone, "EXPERIMENT.SEED=0", cwd=tmp_path, env=ENV)
    assert outcome.code == 0, outcome.err
    result = json.loads((tmp_path / "runs/alone/result.json").read_text())
    assert result["metrics"] == json.loads((first / "result.json").read_text())["metrics"]
