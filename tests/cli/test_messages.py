import json
import re
from pathlib import Path

from linnaeus.cli import compare, export, predict, runs, sweep, train, work
from linnaeus.cli.evaluate import options as evaluate
from linnaeus.runtime.run_folder import Holder, State
from tests.helpers.consoles import plain_console
from tests.helpers.messages import error_of
from tests.helpers.run_files import write_run, write_validations

LINES = {
    "the run of evaluate": (evaluate, "DATA.BATCH_SIZE_VAL=3"),
    "a checkpoint of a checkpoint": (evaluate, "runs/one/checkpoints/last.pt --checkpoint=best"),
    "keys of evaluate": (
        evaluate,
        "runs/one TRAIN.EPOCHS=3 DATA.BATCH_SIZE=3 data=imagefolder --cfg=a.yaml "
        "--unknown=drop --plot=a.png",
    ),
    "a list for a job": (predict, "runs/one - --launcher=slurm"),
    "predict without images": (predict, "runs/one"),
    "words of export": (export, "run/other --format=onyx --outputs=p -"),
    "export without a format": (export, "runs/one runs/other"),
    "names of compare": (
        compare,
        "runs/onee x* folder.png runs/one/config.yaml --metrik --plot=a.gif --output=a.xlsx",
    ),
    "values of options of sweep": (
        sweep,
        "--plot=a.png --trials=0 --search=grid --predict-gpu=rtx-409",
    ),
    "a grid without values": (sweep, "DATA.BATCH_SIZE=32"),
    "values of a grid": (
        sweep,
        "DATA.BATCH_SIZE=32,64, EXPERIMENT.NAME=a,b OPTIMIZER.LR=interval(0,1) --trials=3 "
        "--no-prune",
    ),
    "sizes that AutoBatch replaces": (sweep, "DATA.BATCH_SIZE=8,16 DATA.AUTOBATCH.ENABLED=True"),
    "mistakes in all combinations and in one": (
        sweep,
        "DATA.BATCH_SIZE=0,8 OPTIMIZER.LR=-1 TRAIN.EPOCH=3 --metric=x TRAIN.AMP=bf16,fp8",
    ),
    "a search without trials": (sweep, "--search=optuna OPTIMIZER.LR=1,2"),
    "a search without axes": (sweep, "--search=optuna --trials=3 TRAIN.EPOCHS=2"),
    "intervals": (
        sweep,
        "--search=optuna --trials=3 OPTIMIZER.LR=interval(2,1) "
        "LOSS.LABEL_SMOOTHING=interval(1e-4) "
        "OPTIMIZER.WEIGHT_DECAY=tag(log,interval(0,1)) DATA.BATCH_SIZE=interval(8.2,8.8) "
        "MODEL.NAME=interval(1,2)",
    ),
    "the folder of a run for a sweep": (sweep, "EXPERIMENT.NAME=one EXPERIMENT.SEED=1,2"),
    "another configuration in it": (
        sweep,
        "EXPERIMENT.NAME=grid EXPERIMENT.SEED=1,2 TRAIN.EPOCHS=9",
    ),
    "a worker without a folder": (work, ""),
    "a launcher": (train, "--launcher slrum"),
    "options of sbatch": (
        train,
        "--launcher slurm --slurm array=1 ntasks=8 chdir=/ signal=B:TERM@60",
    ),
    "a signal to the ranks": (train, "--launcher slurm --slurm signal=USR1@60"),
    "a signal without seconds": (train, "--launcher slurm --slurm signal=B:USR1@0"),
    "options of sbatch without a launcher": (train, "--slurm nodes=2"),
    "a status without a folder": (sweep, "--status"),
    "the status of a folder that is not there": (sweep, "--status runs/nope"),
}


def test_messages(golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    Path("folder.png").mkdir()
    write_run(Path("runs/one"), "OPTIMIZER.LR=0.1")
    write_run(Path("runs/other"), "OPTIMIZER.LR=0.2", "DATA.DATASET.NAME=synthetic", finished=False)
    sweep.read(["EXPERIMENT.NAME=grid", "EXPERIMENT.SEED=1,2"])[1].write()  # type: ignore[union-attr]
    said = {title: error_of(module.read, line.split()) for title, (module, line) in LINES.items()}
    said |= of_runs()
    golden("cli", said, folder=tmp_path)


def of_runs():
    write_run(Path("runs/failed"), finished=False, checkpoint=False)
    ended = {"exit_code": 1, "reason": "no such model"}
    Path("runs/failed/run.json").write_text(json.dumps({"ended": ended}))
    write_validations(Path("runs/third"), [0.5], metric="top1/species")
    names = ["one", "other", "failed", "third"]
    found = runs.compared([runs.read_run(Path("runs", name)) for name in names], names)
    state = State("running", Holder("node7", 12, "", "", "34_5"))
    found.rows.append(runs.Row(Path("none"), state, values=found.rows[0].values))
    console, output = plain_console()
    found.show(console)
    unknown = runs.compared(found.rows, [*names, "x"], "top1/knid").unknown_metric
    return {
        "runs side by side": re.sub(" +\n", "\n", output.getvalue()),
        "a metric that no run has": str(unknown),
        "what runs cannot be sorted by": error_of(found.sort, "lr"),
    }
