"""The command line of `linnaeus analyze`, whose other name is `linnaeus plan`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

from linnaeus.autobatch.predict.gpus import GIB, GPUS, Gpu, find_gpu
from linnaeus.autobatch.result import Mode
from linnaeus.autobatch.search import STRATEGIES
from linnaeus.cli.parser import (
    AUTOBATCH,
    CommandParser,
    read_choice,
    read_count,
    read_number,
    read_plot,
    read_request,
    read_table,
)
from linnaeus.cli.tables import read_duration
from linnaeus.config.keys import suggest
from linnaeus.config.schema import Config

MODES: tuple[Mode, ...] = get_args(Mode)

DESCRIPTION = """\
Measures which batch size fits in which fraction of the device's memory, for training and validation, and what
limits it. --throughput adds how fast training sizes are and what a run takes with each: per epoch, in all,
and, with a noise scale, to the same loss. With --predict nothing is run: the memory of GPUs that need not be
there is predicted. With --lr it trains for a hundred steps, and suggests a learning rate.
`linnaeus plan` is `linnaeus analyze --throughput --modes train` at the configured fraction.
"""
DETAILS = """\
Only the training and validation steps are timed: loading and the exchange between processes come on top. The
recommended size is the smallest within 5 % of the best samples per second; with a noise scale, the size with
the least predicted time to the same loss; with a time budget, one of those that end in time.

Overrides are those of training (`linnaeus train --help`). Of an option and an override that set the same key,
the one further right wins.

examples:
  linnaeus analyze --cfg my_exp.yaml --fractions 0.6,0.8 --modes train,val
  linnaeus analyze --cfg my_exp.yaml --epochs 90 --time-budget 12h --plot sizes.html
  linnaeus analyze --cfg my_exp.yaml --noise-scale 2000 --world-size 8 OPTIMIZER.LR_SCALING=linear
  linnaeus analyze --cfg my_exp.yaml --modes train --remedies --output sizes.csv TRAIN.AMP bf16
  linnaeus analyze --cfg my_exp.yaml --predict --gpu a100-40gb,rtx-4090,h100-80gb
  linnaeus analyze --cfg my_exp.yaml --predict --gpu a100-80gb --world-size 1,8,64 --sharding full
  linnaeus analyze --cfg my_exp.yaml --lr --plot rates.png
  linnaeus analyze model=vit_small --memory-limit-gb 16 DATA.IMG_SIZE=384 DATA.DATASET.NAME=synthetic

exit codes: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted (what was measured is written),
1 anything else
"""


@dataclass
class Options:
    """What to measure, and where the figures go: the options of these names.

    Fractions and sizes are ascending; without fractions the configured one counts, and without sizes those
    around the fastest. The time budget is in seconds.
    """

    output: Path = Path("batch_sizes.json")
    plot: Path | None = None
    fractions: list[float] = field(default_factory=lambda: [0.6, 0.7, 0.8, 0.9])
    modes: list[Mode] = field(default_factory=lambda: list(MODES))
    throughput: bool = False
    sizes: list[int] | None = None
    dataset_length: int | None = None
    noise_scale: float | None = None
    time_budget: float | None = None
    remedies: bool = False
    predict: bool = False
    gpu: list[Gpu] = field(default_factory=list)
    device_memory_gb: list[Gpu] = field(default_factory=list)
    world_size: list[int] = field(default_factory=lambda: [1])
    lr: bool = False


IMPLY_THROUGHPUT = (
    "--sizes",
    "--dataset-length",
    "--epochs",
    "--noise-scale",
    "--time-budget",
    "--world-size",
)
"""Options that ask for the time of a run, as `--throughput` does; the last one also for a prediction."""
NOT_WITH_PREDICT = ("--throughput", *IMPLY_THROUGHPUT[:-1], "--steps", "--plot", "--strategy")
"""Options for what is run."""
NOT_WITH_LR = (
    "--fractions",
    "--remedies",
    "--predict",
    "--gpu",
    "--device-memory-gb",
    *(name for name in NOT_WITH_PREDICT if name != "--plot"),
    "--modes",
    "--world-size",
    "--sharding",
    "--min-bs",
    "--max-bs",
    "--memory-limit-gb",
)
"""Options for batch sizes."""


def read(argv: Sequence[str], options: Options | None = None) -> str | tuple[Options, Config]:
    """Read the tokens after `analyze`: a text to print, or the arguments of the session's `run`.

    >>> options, config = read(["--fractions", "0.8,0.5", "--sizes=8,4", "--epochs", "3"])
    >>> options.fractions, options.sizes, options.throughput, config.TRAIN.EPOCHS
    ([0.5, 0.8], [4, 8], True, 3)

    `options` are the defaults.

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    given = {token.partition("=")[0] for token in argv}

    def check(options: Options, words: list[str]) -> list[str]:
        if options.lr:
            options.output = options.output if "--output" in given else Path("learning_rates.json")
            wrong = [name for name in NOT_WITH_LR if name in given]
            return [f"{name}: not with --lr, which only trains; leave it out" for name in wrong]
        problems = []
        if not options.predict:
            options.throughput |= not given.isdisjoint(IMPLY_THROUGHPUT)
            wrong = [
                name for name in ("--gpu", "--device-memory-gb", "--sharding") if name in given
            ]
            if len(options.world_size) > 1:
                problems.append("--world-size: takes several numbers only with --predict")
            return problems + [f"{name}: needs --predict" for name in wrong]
        if options.remedies and len(options.world_size) > 1:
            problems.append("--remedies: takes one number of --world-size")
        wrong = [name for name in NOT_WITH_PREDICT if name in given]
        return problems + [
            f"{name}: not with --predict, which runs nothing; leave it out" for name in wrong
        ]

    request = read_request(PARSER, argv, options or Options(), check)
    if not isinstance(request, str):
        found, config = request
        found.fractions = found.fractions or [config.DATA.AUTOBATCH.TARGET_MEMORY_FRACTION]
    return request


def read_plan(argv: Sequence[str]) -> str | tuple[Options, Config]:
    """Read the tokens after `plan`: speeds of training at the configured fraction of the memory.

    >>> options, _ = read_plan(["--fractions", "0.7"])
    >>> options.fractions, options.modes, options.throughput
    ([0.7], ['train'], True)
    """
    return read(argv, Options(fractions=[], modes=["train"], throughput="--predict" not in argv))


def _ascending(read_one: Callable[[str], float], text: str) -> list[float]:
    return sorted({read_one(part) for part in text.split(",")})


def read_gpus(text: str) -> list[Gpu]:
    """GPUs by their names, with commas between them; `ValueError` for a name that is not known."""
    gpus = []
    for name in map(str.strip, text.split(",")):
        try:
            gpus.append(find_gpu(name))
        except KeyError:
            hint = suggest(name.lower(), GPUS)
            raise ValueError(
                f"{name!r} is not a GPU of the list{hint}; known are {', '.join(GPUS)}; for others give "
                "--device-memory-gb"
            ) from None
    return gpus


def _memories(text: str) -> list[Gpu]:
    sizes = [read_number("number of GiB", part) for part in text.split(",")]
    return [Gpu(f"{size:g} GiB", int(size * GIB)) for size in sizes]


def _both(key: str) -> list[str]:
    return [f"{AUTOBATCH}.{key}", f"{AUTOBATCH}.{key}_VAL"]


def _modes(text: str) -> list[Mode]:
    names = {read_choice(MODES, name.strip()) for name in text.split(",")}
    return [mode for mode in MODES if mode in names]


PARSER = CommandParser(
    "analyze",
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the configuration that would be measured, and exit",
)
PARSER.option(
    "--output", "FILE", read_table, f".json, .jsonl or .csv by its ending; default {Options.output}"
)
PARSER.option("--plot", "FILE", read_plot, "also draw a picture: .png, .svg or .html by its ending")
PARSER.option("--min-bs", "N", read_count, "smallest size tried", _both("MIN_BATCH_SIZE"))
PARSER.option("--max-bs", "N", read_count, "largest size tried", _both("MAX_BATCH_SIZE"))
PARSER.option(
    "--memory-limit-gb",
    "X",
    partial(read_number, "number of GiB"),
    "each process may hold TARGET_MEMORY_FRACTION of this at most",
    [f"{AUTOBATCH}.MEMORY_LIMIT_GB"],
)
PARSER.option(
    "--fractions",
    "F,F,...",
    partial(_ascending, partial(read_number, "fraction of the memory", most=1)),
    "fractions of the device's memory, each in (0, 1]; default 0.6,0.7,0.8,0.9",
)
PARSER.option("--modes", "M,M", _modes, "train, val or both; default train,val", choices=MODES)
PARSER.option("--steps", "N", read_count, "steps that one trial runs", _both("STEPS_PER_TRIAL"))
PARSER.option(
    "--strategy",
    "|".join(STRATEGIES),
    partial(read_choice, [*STRATEGIES]),
    "how sizes are searched",
    [f"{AUTOBATCH}.STRATEGY"],
)
PARSER.switch(
    "--throughput",
    "time sizes, and predict the time of a run; the options up to --world-size imply it",
)
PARSER.option(
    "--epochs", "N", read_count, "passes of the run over its training samples", ["TRAIN.EPOCHS"]
)
PARSER.option(
    "--time-budget",
    "T",
    read_duration,
    "mark the sizes with which it ends in time: 90s, 30m, 2h, 1d",
)
PARSER.option(
    "--noise-scale",
    "X",
    partial(read_number, "number of samples"),
    "gradient noise scale, in samples; gives the time to the same loss",
)
PARSER.option(
    "--dataset-length",
    "N",
    read_count,
    "training samples; default: those of the configured dataset",
)
PARSER.option(
    "--sizes",
    "N,N,...",
    partial(_ascending, read_count),
    "time these training sizes, and the largest that fits; default: from that downwards, until smaller sizes "
    "are too slow",
)
PARSER.option(
    "--world-size",
    "N",
    partial(_ascending, read_count),
    "processes that the run will have; default 1; with --predict also several numbers, such as 1,8,64",
)
PARSER.option(
    "--sharding",
    "full|hybrid|none",
    partial(read_choice, ("full", "hybrid", "none")),
    "with --predict: share the model among the processes, or with hybrid among those of each node",
    ["DIST.SHARDING"],
)
PARSER.switch(
    "--remedies",
    "measure what bf16, gradient checkpointing and accumulation would save in training; with --predict: "
    "predict it, and what SGD and smaller images would save",
)
PARSER.switch(
    "--predict",
    "predict the memory of the GPUs named by --gpu or --device-memory-gb, else of this machine's; nothing "
    "is run",
)
PARSER.option(
    "--gpu", "NAME,...", read_gpus, f"GPUs that need not be here: {', '.join(GPUS)}", choices=GPUS
)
PARSER.option(
    "--device-memory-gb", "X,...", _memories, "GPUs by the GiB that torch sees of their memory"
)
PARSER.switch(
    "--lr", "train 100 steps of DATA.BATCH_SIZE with a rising learning rate, and suggest one"
)
PARSER.gone = dict.fromkeys(
    ("--hf", "--method", "--sequence", "--dtype", "--checkpointing"),
    "is gone; predict the memory of language models with examples/llm_memory.py",
)
