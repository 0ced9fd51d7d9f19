"""The command line of `linnaeus plan`. Pure: no torch, and no file is read but the `--cfg` file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.commands.duration import read_duration
from linnaeus.commands.options import (
    PLOT_ENDINGS,
    TABLE_ENDINGS,
    Grammar,
    read_command_line,
    read_count,
    read_path,
    read_positive,
    read_share,
)
from linnaeus.config.load import LoadedConfig

HELP = """\
Times a few of the batch sizes that fit, and predicts what a run takes with each: per epoch, in all, and, with
a noise scale, to the same loss. Marks the largest that fits, the fastest and the recommended size.

usage: linnaeus plan [--cfg FILE] [options] [group=preset ...] [KEY VALUE | KEY=VALUE ...]
       python -m linnaeus.main plan ...
       python tools/plan_batch_size.py ...

options:
  --cfg FILE            read a YAML file, as for training
  --fraction F          share of the device's memory, in (0, 1] (DATA.AUTOBATCH.TARGET_MEMORY_FRACTION)
  --sizes N,N,...       time these sizes, and the largest that fits; default: powers of two below it
  --dataset-length N    training samples; default: those of the configured dataset
  --epochs N            passes over them (TRAIN.EPOCHS)
  --noise-scale X       gradient noise scale, in samples; gives the time to the same loss
  --world-size N        processes that the run will have; default 1
  --time-budget T       mark the sizes with which the run ends in time: 90s, 30m, 2h, 1d
  --output FILE         .json, .jsonl or .csv by its ending; default batch_plan.json
  --plot FILE           also draw a picture: .png, .svg or .html by its ending
  --min-bs N            smallest size tried (DATA.AUTOBATCH.MIN_BATCH_SIZE)
  --max-bs N            largest size tried (DATA.AUTOBATCH.MAX_BATCH_SIZE)
  --memory-limit-gb X   treat the device as if it had no more GiB (DATA.AUTOBATCH.MEMORY_LIMIT_GB)
  --print-config        print the configuration that would be timed, and exit
  -h, --help            print this text and exit

Without a noise scale the recommended size is the smallest within 5 % of the best samples per second; with
one, the size with the least predicted time to the same loss. Learning rate and warnings are those of the
batch plan that training would make. Only the training step is timed: loading, validation and the exchange
between processes come on top.

examples:
  linnaeus plan --cfg my_exp.yaml --epochs 90 --time-budget 12h
  linnaeus plan --cfg my_exp.yaml --noise-scale 2000 --world-size 8 --plot plan.html
  linnaeus plan --cfg my_exp.yaml --sizes 64,128,256 --output plan.csv OPTIMIZER.LR_SCALING=linear

exit codes: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted (what was measured is written),
1 anything else
"""


@dataclass
class Options:
    """What to time, and what to predict from it.

    Attributes:
        sizes: to be timed beside the largest; None is powers of two below it.
        dataset_length: training samples; None is the configured dataset's.
        noise_scale: gradient noise scale, in samples.
        world_size: processes of the run to come.
        time_budget: seconds that the run may take.
        output: a file for programs.
        plot: a picture; None draws none.
    """

    sizes: list[int] | None = None
    dataset_length: int | None = None
    noise_scale: float | None = None
    world_size: int = 1
    time_budget: float | None = None
    output: Path = Path("batch_plan.json")
    plot: Path | None = None


def read_options(argv: Sequence[str]) -> tuple[Options, LoadedConfig]:
    """Read the tokens after `plan`.

    >>> options, loaded = read_options(["--sizes=8,4", "--time-budget", "2h", "--epochs", "3"])
    >>> options.sizes, options.time_budget, loaded.config.TRAIN.EPOCHS
    ([4, 8], 7200.0, 3)

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    options = Options()
    return options, read_command_line(argv, options, GRAMMAR)


def _sizes(text: str) -> list[int]:
    return sorted({read_count(part) for part in text.split(",")})


_AUTOBATCH = "DATA.AUTOBATCH"
GRAMMAR = Grammar(
    readers={
        "--fraction": read_share,
        "--sizes": _sizes,
        "--dataset-length": read_count,
        "--epochs": read_count,
        "--noise-scale": read_positive("number of samples"),
        "--world-size": read_count,
        "--time-budget": read_duration,
        "--output": read_path(TABLE_ENDINGS),
        "--plot": read_path(PLOT_ENDINGS),
        "--min-bs": read_count,
        "--max-bs": read_count,
        "--memory-limit-gb": read_positive("number of GiB"),
    },
    keys={
        "--fraction": (f"{_AUTOBATCH}.TARGET_MEMORY_FRACTION",),
        "--epochs": ("TRAIN.EPOCHS",),
        "--min-bs": (f"{_AUTOBATCH}.MIN_BATCH_SIZE",),
        "--max-bs": (f"{_AUTOBATCH}.MAX_BATCH_SIZE",),
        "--memory-limit-gb": (f"{_AUTOBATCH}.MEMORY_LIMIT_GB",),
    },
)
