"""The files of runs as training writes them, made without training."""

import functools
import json

from linnaeus.cli.sweep import read
from linnaeus.config.dump import to_yaml
from linnaeus.config.load import load_config

PLAN = {"MICRO_BATCH": 8, "EFFECTIVE_BATCH": 16, "LEARNING_RATE": 0.5, "ACCUMULATION_STEPS": 2}


def result(batch_size, top1=0.5, **more):
    """The content of a run's `result.json`."""
    sizes = {"batch_size": batch_size, "effective_batch": batch_size * 2 * 3}
    metrics = {"loss": 1 - top1, "top1/kind": top1}
    speed = {"training_s": 100 / batch_size, "images_per_s": 7.0}
    return {"metrics": metrics, "headline": "top1/kind", **speed, **sizes, **more}


def write_validations(folder, values, metric="top1/kind"):
    """The `metrics.jsonl` of a run with a validation for each value."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "step": 10 * epoch,
            "epoch": epoch,
            "split": "val",
            "time": 1.0,
            "loss": 1.0,
            metric: value,
        }
        for epoch, value in enumerate(values, start=1)
    ]
    lines.insert(1, {"step": 12, "epoch": 1, "split": "train", "time": 1.0, "loss": 9.0, "lr": 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@functools.cache
def config_text(*argv):
    """The `config.yaml` of a run."""
    return to_yaml(load_config(argv).config, PLAN)


def write_run(
    folder,
    *argv,
    values=(0.25, 0.75, 0.5),
    finished=True,
    checkpoint=True,
    **more,
):
    """The folder of a run; its `result.json` holds `more` too."""
    write_validations(folder, [*values])
    (folder / "config.yaml").write_text(config_text(*argv))
    if checkpoint:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "last.pt").touch()
    if finished:
        content = result(8, values[-1] or 0.0, effective_batch=16, learning_rate=0.5, **more)
        (folder / "result.json").write_text(json.dumps(content))
    return folder


def names(folder):
    return {path.name for path in folder.iterdir()}


def planned_sweep(*argv):
    """Write the folder of a sweep."""
    request = read(argv)
    assert isinstance(request, tuple)
    request[1].write()
    return request[1]


def figures(sweep):
    """What the table of a sweep shows of each run."""
    return json.loads((sweep / "figures.json").read_text())["runs"]
