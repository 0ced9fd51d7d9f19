"""The script of a job, its submission, and what the job does, with stand-ins for SLURM's commands."""

import json
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from linnaeus.runtime.run_folder import read_state
from linnaeus.sweep import slurm
from tests.helpers.run_files import figures, planned_sweep
from tests.sweep.test_worker import TINY

SBATCH = """\
#!/bin/sh
echo "$*" >> said; printenv | grep -E '^(SBATCH|SLURM)_' >> said
[ -e refuses ] && { echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1; }
echo 42
"""
ON_SLURM = ("--launcher", "slurm", "--slurm", "time=30")
SRUN = """\
#!/bin/sh
shift 2
exec "$@"
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder of stand-ins: sbatch takes a job, squeue has none, srun runs the command here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    nothing = "#!/bin/sh\n"
    scripts = {"sbatch": SBATCH, "srun": SRUN, "squeue": nothing, "scontrol": nothing}
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_run_is_submitted_with_the_script_that_a_dry_run_shows(commands, run, monkeypatch):
    for name in ("SBATCH_ARRAY", "SLURM_ARRAY_TASK_ID", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    words = ("train", *TINY, *ON_SLURM, "exclusive", "signal=B:USR1@60")
    shown = run(*words, "--dry-run").ok()
    assert not Path("slurm").exists()
    for line in ("time=30", "exclusive", "signal=B:USR1@60", "requeue", "ntasks-per-node=1"):
        assert f"#SBATCH --{line}\n" in shown.out
    assert "runs/tiny" in shown.out, "the job resumes its own run"
    assert "scancel 42" in run(*words).ok().out
    [script] = Path("slurm").glob("*.sh")
    assert script.read_text() == shown.out
    said = Path("said").read_text()
    assert str(script) in said
    assert "SLURM_CONF" in said
    assert "ARRAY" not in said, "an outer job's"
    Path("refuses").touch()
    refused = run(*words)
    assert (refused.code, "invalid partition" in refused.err) == (1, True)


@pytest.mark.parametrize("name", ["my exp", 'it\'s "50%" #1', "back\\slash", "plain"])
def test_values_with_blanks_and_signs_reach_sbatch_whole(run, tmp_path, monkeypatch, name):
    """sbatch splits the lines of a script like a shell, and replaces `%` in names of files."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    planned_sweep(*TINY, "EXPERIMENT.SEED=0,1")
    shown = run("work", "runs/tiny", *ON_SLURM, f"comment={name}", "--dry-run").ok()
    given = dict(
        shlex.split(line)[1].removeprefix("--").split("=", 1)
        for line in shown.out.splitlines()
        if line.startswith("#SBATCH") and "=" in line
    )
    assert given["comment"] == name
    output = given["output"].replace("%j", "42").replace("%%", "%")
    assert output == f"{tmp_path / name}/runs/tiny/slurm/42.out"


def test_a_sweep_is_an_array_of_workers(commands, run, tmp_path, monkeypatch):
    """And others may be submitted later."""
    words = ("sweep", *TINY, "EXPERIMENT.SEED=0,1,2", *ON_SLURM)
    assert "#SBATCH --array=0-2\n" in run(*words, "--dry-run").out
    done = run(*words, "--jobs", "2")  # which has ended at once
    assert (done.code, "42" in done.out) == (1, True)
    [script] = Path("runs/tiny/slurm").glob("*.sh")
    assert "#SBATCH --array=0-1\n" in script.read_text()
    assert script.read_text().endswith(f"linnaeus.sweep.slurm work {tmp_path}/runs/tiny\n")
    assert [entry["status"] for entry in figures(tmp_path / "runs/tiny")] == ["not run"] * 3
    later = ("work", "runs/tiny", *ON_SLURM)
    assert run(*later, "--jobs", "2", "--dry-run").ok().out == script.read_text()
    run(*later).ok()
    assert run(*later, "--nproc", "2").code == 2
    assert run("work", "runs/tiny", "--jobs", "2").code == 2
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(*later).code == 2, "there is no sbatch"


@pytest.mark.e2e
def test_what_a_job_does(commands, run, monkeypatch):
    """A worker takes the runs; the same job, queued again, goes on with its own run and with no other."""
    assert run("sweep", *TINY, "EXPERIMENT.SEED=0,1", *ON_SLURM).code == 1
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert slurm.main(["work", "runs/tiny"]) == 0
    folders = [Path(f"runs/tiny/EXPERIMENT.SEED={seed}") for seed in (0, 1)]
    assert [read_state(folder).status for folder in folders] == ["finished"] * 2
    assert json.loads((folders[0] / "run.json").read_text())["job"] == "42"
    words = ["--run", "runs/one", "train", *TINY, "EXPERIMENT.NAME=one"]
    assert slurm.main(words) == 0
    assert slurm.main(words) == 0
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    assert slurm.main(words) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["one", "one.1", "tiny"]


def test_a_job_out_of_time_is_queued_again_as_long_as_it_gets_on(commands, monkeypatch):
    (commands / "srun").write_text("#!/bin/sh\nkill -USR1 $PPID\nexit 1\n")
    (commands / "scontrol").write_text('#!/bin/sh\necho "$*" >> asked\n')
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    for restarts, expected in (("0", True), ("1", False)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        assert slurm.main(["--alone", "train"]) != 0
        asked = Path("asked").read_text() if expected else ""
        assert (Path("asked").exists(), "requeue 42" in asked) == (expected, expected)
        Path("asked").unlink(missing_ok=True)


def test_ranks_follow_from_the_job(commands):
    """Each run has a port of its own; a single node needs none of ours."""
    env = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    words = slurm.prefix(env)
    assert {"srun", "--nodes=2", "--ntasks=2", "--nproc-per-node=4"} <= {*words}
    [endpoint] = [word for word in words if word.startswith("--rdzv-endpoint=")]
    with socket.create_server(("", int(endpoint.rpartition(":")[2]))):  # taken by another job
        assert endpoint not in slurm.prefix(env)
    single = slurm.prefix({**env, "SLURM_NNODES": "1"})
    assert {"--standalone", "--nproc-per-node=4"} <= {*single}
    assert not [word for word in single if "rdzv" in word]
    alone = ["srun", "--nodes=1", "--ntasks=1", sys.executable, "-u", "-m"]
    assert slurm.prefix(env, alone=True) == alone
