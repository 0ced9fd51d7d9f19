import csv
import json
import os
import random
import signal
import sys
import threading
from contextlib import suppress

import psutil
import pytest
import yaml

from linnaeus.runtime.run_folder import CLAIMS, OUTPUT, Claim, Holder, LostFolderError, read_state
from linnaeus.sweep.folder import Sweep
from linnaeus.sweep.worker import Child
from tests.cli.tiny import GATE
from tests.helpers import children
from tests.helpers.run_files import figures, names, planned_sweep
from tests.helpers.runs import wait_until
from tests.helpers.small_runs import validations_of

TINY = (
    "DATA.DATASET._target_=tests.cli.tiny.Points",
    "MODEL._target_=tests.cli.tiny.Perceptron",
    "MODEL.width=4",
    "DATA.BATCH_SIZE=16",
    "DATA.NUM_WORKERS=0",
    "TRAIN.EPOCHS=1",
    "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=tiny",
)
GATED = (*TINY, "DATA.DATASET._target_=tests.cli.tiny.Gated", "DATA.BATCH_SIZE=8", "TRAIN.EPOCHS=3")


def start(folder, *argv):
    with (folder / "shell.txt").open("a") as log:
        command = ["-m", "linnaeus.main", *argv]
        return children.start(command, cwd=folder, stdout=log, stderr=log)


def log_of(folder):
    return (folder / "shell.txt").read_text()


@pytest.mark.e2e
def test_a_sweep_with_a_run_that_fails(run_in_child, tmp_path):
    """The second names what is no class, as only a run can see."""
    key, model = "MODEL._target_", "tests.cli.tiny.Perceptron"
    argv = ("sweep", *TINY, f"{key}={model},{model}s")
    outcome = run_in_child(*argv)
    assert outcome.code == 1, outcome
    folder = tmp_path / "runs/tiny"
    good, bad = figures(folder)
    assert (good["status"], good["exit_code"], good[key]) == ("finished", 0, model)
    assert (bad["status"], bad["exit_code"], bad["curve"]) == ("failed", 2, [])
    assert "callable" in bad["reason"]
    assert f"{key}={model}s: failed" in outcome.out, "the last run is told too"
    assert bad["reason"] in outcome.out
    assert "Traceback" not in outcome.out + outcome.err
    first, second = csv.DictReader((folder / "sweep.csv").read_text().splitlines())
    assert [row["status"] for row in (first, second)] == ["finished", "failed"]
    steps = [row["total_steps"] for row in (first, second)]
    assert steps == [str(good["total_steps"]), ""], "a whole number beside none stays whole"
    assert (folder / "sweep.png").exists()
    finished, failed = (folder / f"{key}={name}" for name in (model, f"{model}s"))
    found = json.loads((finished / "result.json").read_text())["run"]
    assert json.loads((finished / "run.json").read_text())["id"] == found
    assert yaml.safe_load((finished / "config.yaml").read_text())["PLAN"]["RUN"] == found

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()  # a worker leaves what has failed, the command tries it again
    assert start(elsewhere, "work", "../runs/tiny").wait(100) == 0
    assert names(elsewhere) == {"shell.txt"}
    assert log_of(elsewhere).endswith("1 finished, 1 failed\n")
    before = (failed / OUTPUT).stat().st_size
    assert run_in_child(*argv).code == 1
    assert (failed / OUTPUT).stat().st_size > before
    assert validations_of(finished) == [good["total_steps"]], "what has finished is left alone"


def test_a_sweep_is_known_by_its_file(run):
    """Renamed, it goes on; a worker ends if it is gone or replaced; without its file, no run is its own."""
    sweep = planned_sweep(*TINY, "EXPERIMENT.SEED=0,1")
    sweep.write()  # the same again
    claim = Claim(sweep.folder / "EXPERIMENT.SEED=0")
    claim.begin()
    claim.release()
    sweep.check_is_there()
    refused = run("train", *TINY)
    assert (refused.code, "EXPERIMENT.NAME: runs/tiny" in refused.err) == (2, True)
    renamed = sweep.folder.rename(sweep.folder.with_name("renamed"))
    with pytest.raises(LostFolderError):
        sweep.check_is_there()
    planned_sweep(*TINY, "EXPERIMENT.SEED=0,1")
    with pytest.raises(LostFolderError):
        sweep.check_is_there()
    again = planned_sweep(*TINY, "EXPERIMENT.SEED=0,1", "EXPERIMENT.NAME=renamed")
    assert again.id == Sweep.read(renamed).id
    (renamed / "sweep.json").unlink()
    refused = run("sweep", *TINY, "EXPERIMENT.SEED=0,1", "EXPERIMENT.NAME=renamed")
    assert (refused.code, "sweep.json" in refused.err) == (2, True)


def with_run(name):
    return {"runs": [{"name": name, "values": {}, "config": ""}]}


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({}, False),
        (with_run("a"), False),
        *((with_run(name), True) for name in ("..", "../other", "/other", "a/b")),
        *((change, True) for change in ({"argv": 3}, {"trials": "many"}, {"runs": [3]})),
    ],
)
def test_a_foreign_sweep_is_a_mistake(run, change, is_refused):
    """Also one with runs outside its folder."""
    file = planned_sweep(*TINY, "EXPERIMENT.SEED=0,1").folder / "sweep.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    status = run("sweep", "runs/tiny", "--status")
    assert (status.code, "sweep.json" in status.err) == ((2, True) if is_refused else (0, False))


def test_the_second_signal_kills_a_run(tmp_path):
    code = (
        "import pathlib, signal\n"
        "signal.signal(signal.SIGINT, lambda *_: pathlib.Path('first').touch())\n"
        "pathlib.Path('up').touch()\n"
        "while True: signal.pause()"
    )
    child = Child(is_step=False)

    def send():
        for name in ("up", "first"):
            wait_until((tmp_path / name).exists)
            os.kill(os.getpid(), signal.SIGINT)

    with child.listening():
        thread = threading.Thread(target=send)
        thread.start()
        assert (
            child.run([sys.executable, "-c", code], os.environ, None, tmp_path) == -signal.SIGKILL
        )
        thread.join()
    assert child.received == [signal.SIGINT] * 2


@pytest.mark.e2e
def test_a_run_starts_its_search_where_another_one_ended(run_in_child, tmp_path):
    argv = (
        *TINY,
        "DATA.AUTOBATCH.ENABLED=True",
        "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
        "DATA.AUTOBATCH.MAX_BATCH_SIZE=48",
        "OPTIMIZER.LR=0.1,0.2",
    )
    run_in_child("sweep", *argv).ok()
    tried = []
    for rate in ("0.1", "0.2"):
        found = json.loads((tmp_path / f"runs/tiny/OPTIMIZER.LR={rate}/autobatch.json").read_text())
        tried.append([trial["batch_size"] for trial in found["train"]["trials"]])
    assert [sizes[0] for sizes in tried] == [16, 48]


@pytest.mark.e2e
def test_a_dead_worker_s_run_goes_on_in_a_worker_started_later(tmp_path, run_in_child):
    """Ctrl-C too: the run is given back with a checkpoint."""
    argv = ("sweep", *GATED, "EXPERIMENT.SEED=range(0,8)", "--jobs", "2")
    os.mkfifo(tmp_path / GATE)
    sweep, folder = start(tmp_path, *argv), tmp_path / "runs/tiny"
    begun = [folder / f"EXPERIMENT.SEED={seed}" for seed in range(2)]
    wait_until(lambda: all((one / "checkpoints/last.pt").exists() for one in begun), sweep)
    worker = psutil.Process(read_state(begun[0]).holder.pid)
    for process in (worker, *worker.children()):
        process.kill()
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(100) == 130, log_of(tmp_path)
    assert [read_state(one).status for one in begun] == ["interrupted"] * 2
    (tmp_path / GATE).unlink()
    for words in (("work", "runs/tiny"), argv):
        assert start(tmp_path, *words).wait(100) == 0, log_of(tmp_path)
    run_in_child(*argv, "EXPERIMENT.NAME=calm").ok()
    tiny, calm = (figures(tmp_path / "runs" / name) for name in ("tiny", "calm"))
    assert [run["curve"] for run in tiny] == [run["curve"] for run in calm]
    for one in begun:
        assert (one / OUTPUT).read_text().count("starting fresh") == 1


@pytest.mark.e2e
def test_an_unknown_metric_ends_a_sweep_at_the_first_validation(run_in_child, tmp_path):
    os.mkfifo(tmp_path / GATE)  # the first run waits in its second epoch for a signal
    outcome = run_in_child("sweep", *GATED, "EXPERIMENT.SEED=1,2", "--metric", "top1/kin")
    assert (outcome.code, "'top1/kin'" in outcome.err) == (2, True)
    assert not (tmp_path / "runs/tiny/EXPERIMENT.SEED=2").exists()


@pytest.mark.e2e
def test_a_run_whose_folder_is_renamed_fails(tmp_path):
    """A second start of the same name at that moment has the folder for itself."""
    os.mkfifo(tmp_path / GATE)
    first, folder = start(tmp_path, "train", *GATED), tmp_path / "runs/tiny"
    wait_until((folder / "checkpoints/last.pt").exists, first)
    folder.rename(folder.with_name("away"))
    second = start(tmp_path, "train", *GATED)
    wait_until((folder / "checkpoints/last.pt").exists, second)
    with (tmp_path / GATE).open("w") as gate:
        gate.write("go")
        gate.flush()
        assert first.wait(100) == 1
        assert second.wait(100) == 0, log_of(tmp_path)
    assert "renamed or deleted" in log_of(tmp_path)
    assert read_state(folder).status == "finished"
    assert len(validations_of(folder)) == 3
    assert names(tmp_path / "runs") == {"away", "tiny"}


def test_a_worker_takes_only_what_nobody_has(tmp_path, run):
    """A run of another machine is left to it; nothing is trained here."""
    planned_sweep(*TINY, "EXPERIMENT.SEED=0,1")
    mine = Claim(tmp_path / "runs/tiny/EXPERIMENT.SEED=0")
    other = tmp_path / "runs/tiny/EXPERIMENT.SEED=1" / CLAIMS
    other.mkdir(parents=True)
    holder = {**vars(Holder.this_process()), "host": "node7", "boot": ""}
    (other / "1").write_text(json.dumps(holder))
    done = run("work", "runs/tiny")
    assert (done.code, "2 running" in done.out) == (0, True)
    mine.release()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_killed_at_random_moments_ends_as_a_calm_one(tmp_path):
    """Of the processes of the sweep, a worker or a run is killed; workers are started in their place."""
    argv = ("sweep", *TINY, "TRAIN.EPOCHS=200", "EXPERIMENT.SEED=range(0,4)", "--jobs", "2")
    folder, chance = tmp_path / "runs/tiny", random.Random(0)
    starts = [start(tmp_path, *argv)]

    def written_bytes():
        """An epoch writes 200 bytes of output; the whole sweep writes at least 160,000."""
        outputs = [tmp_path / "shell.txt", *folder.glob("EXPERIMENT*/logs/*.txt")]
        return sum(output.stat().st_size for output in outputs)

    def victims():
        return [
            process
            for process in psutil.process_iter()
            if _is_of(process, str(tmp_path)) and process.pid != starts[0].pid
        ]

    def is_there():
        if not victims() and starts[-1].poll() is not None:
            starts.append(start(tmp_path, "work", "runs/tiny"))
        return written_bytes() >= moment and victims()

    num_kills = 0
    while num_kills < 8:
        moment = written_bytes() + chance.randint(0, 2000)
        wait_until(is_there)
        with suppress(psutil.Error, IndexError):  # it has just ended
            chance.choice(victims()).kill()
            num_kills += 1
    states = [read_state(one).status for one in folder.glob("EXPERIMENT*")]
    assert states.count("finished") < 4, "the sweep was too fast for the kills"
    for each in starts:
        each.wait(children.limit_s)
    assert start(tmp_path, *argv).wait(children.limit_s) == 0, log_of(tmp_path)
    assert start(tmp_path, *argv, "EXPERIMENT.NAME=calm").wait(children.limit_s) == 0
    curves = [
        [run["curve"] for run in figures(each)] for each in (folder, folder.with_name("calm"))
    ]
    assert curves[0] == curves[1]
    for one in folder.glob("EXPERIMENT*"):
        assert len(validations_of(one)) == 200
        assert json.loads((one / "run.json").read_text())["ended"]["exit_code"] == 0


def _is_of(process, folder):
    with suppress(psutil.Error):
        return process.cwd() == folder and process.status() != psutil.STATUS_ZOMBIE
    return False
