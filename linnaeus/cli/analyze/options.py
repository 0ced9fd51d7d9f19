"""The command line of `linnaeus analyze`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

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
from linnaeus.config.keys import suggest
from linnaeus.config.schema import Config

MODES: tuple[Mode, ...] = get_args(Mode)
CONFIGURED = "as configured"
"""The configuration as it is: the first row of every table."""
VARIANTS: dict[str, tuple[str, Any]] = {
    "bf16": ("TRAIN.AMP", "bf16"),
    "channels_last": ("TRAIN.CHANNELS_LAST", True),
    "checkpointing": ("TRAIN.GRADIENT_CHECKPOINTING", True),
    "compile": ("TRAIN.COMPILE", True),
    "half_resolution": ("DATA.IMG_SIZE", None),
}
"""The key that each variant changes, and its value; None is half of the value."""

DESCRIPTION = """\
Finds the maximum batch size in each fraction of the device's memory, for training and validation, with its
peak and its speed. --variants adds rows with one thing changed. --predict runs nothing: it predicts the same
table for GPUs that need not be there. --lr trains for a hundred steps and suggests a learning rate.
"""
DETAILS = """\
Only the training and validation steps are timed: loading and the exchange between processes come on top.
Overrides are those of training (`linnaeus train --help`). Of an option and an override that set the same key,
the one further right wins.

examples:
  linnaeus analyze --cfg my_exp.yaml --fractions 0.6,0.8 --modes train,val
  linnaeus analyze --cfg my_exp.yaml --variants bf16,checkpointing --output sizes.csv --plot sizes.png
  linnaeus analyze --cfg my_exp.yaml --predict --gpu a100-40gb,rtx-4090,h100-80gb
  linnaeus analyze --cfg my_exp.yaml --predict --gpu a100-80gb --world-size 1,8,64 --sharding full
  linnaeus analyze --cfg my_exp.yaml --lr --plot rates.png
  linnaeus analyze model=vit_small --memory-limit-gb 16 DATA.IMG_SIZE=384 DATA.DATASET.NAME=synthetic

exit codes: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted (what was measured is written),
1 anything else
"""


@dataclass
class Options:
    """What to measure, and where the figures go: the options of these names. Fractions are ascending."""

    output: Path = Path("batch_sizes.json")
    plot: Path | None = None
    fractions: list[float] = field(default_factory=lambda: [0.6, 0.7, 0.8, 0.9])
    modes: list[Mode] = field(default_factory=lambda: list(MODES))
    variants: list[str] = field(default_factory=list)
    predict: bool = False
    gpu: list[Gpu] = field(default_factory=list)
    device_memory_gb: list[Gpu] = field(default_factory=list)
    world_size: list[int] = field(default_factory=lambda: [1])
    lr: bool = False


FOR_PREDICT = ("--gpu", "--device-memory-gb", "--world-size", "--sharding")
NOT_WITH_PREDICT = ("--steps", "--plot", "--strategy")
"""Options for what is run."""
NOT_WITH_LR = (
    "--fractions",
    "--variants",
    "--predict",
    "--modes",
    "--steps",
    "--strategy",
    "--min-bs",
    "--max-bs",
    "--memory-limit-gb",
)
"""Options for batch sizes."""


def read(argv: Sequence[str]) -> str | tuple[Options, Config]:
    """Read the tokens after `analyze`: a text to print, or the arguments of the session's `run`.

    >>> options, config = read(["--fractions", "0.8,0.5", "--variants=compile,bf16", "--max-bs", "3"])
    >>> options.fractions, options.variants, config.DATA.AUTOBATCH.MAX_BATCH_SIZE
    ([0.5, 0.8], ['bf16', 'compile'], 3)

    Raises:
        ConfigError: lists everything that is wrong, with the options and in the configuration.
    """
    given = {token.partition("=")[0] for token in argv}

    def check(options: Options, words: list[str]) -> list[str]:
        problems = []
        if options.lr:
            options.output = options.output if "--output" in given else Path("learning_rates.json")
            wrong = [name for name in NOT_WITH_LR if name in given]
            problems = [f"{name}: not with --lr, which only trains; leave it out" for name in wrong]
        if not options.predict:
            return problems + [f"{name}: needs --predict" for name in FOR_PREDICT if name in given]
        wrong = [name for name in NOT_WITH_PREDICT if name in given]
        return problems + [
            f"{name}: not with --predict, which runs nothing; leave it out" for name in wrong
        ]

    return read_request(PARSER, argv, Options(), check)


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


def _several(choices: Iterable[str], text: str) -> list[str]:
    choices = tuple(choices)
    names = {read_choice(choices, name.strip()) for name in text.split(",")}
    return [name for name in choices if name in names]


PARSER = CommandParser(
    "analyze",
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the configuration that would be measured, and exit",
)
PARSER.option(
    "--output", "FILE", read_table, f".json, .jsonl or .csv by its ending; default {Options.output}"
)
PARSER.option("--plot", "FILE", read_plot, "also draw a picture: .png or .svg by its ending")
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
PARSER.option(
    "--modes",
    "M,M",
    partial(_several, MODES),
    "train, val or both; default train,val",
    choices=MODES,
)
PARSER.option(
    "--variants",
    "V,V,...",
    partial(_several, VARIANTS),
    f"also with one thing changed: {', '.join(VARIANTS)}",
    choices=VARIANTS,
)
PARSER.option("--steps", "N", read_count, "steps that one trial runs", _both("STEPS_PER_TRIAL"))
PARSER.option(
    "--strategy",
    "|".join(STRATEGIES),
    partial(read_choice, [*STRATEGIES]),
    "how sizes are searched",
    [f"{AUTOBATCH}.STRATEGY"],
)
PARSER.option(
    "--world-size",
    "N",
    partial(_ascending, read_count),
    "with --predict: processes of the run, or several numbers, such as 1,8,64; default 1",
)
PARSER.option(
    "--sharding",
    "full|hybrid|none",
    partial(read_choice, ("full", "hybrid", "none")),
    "with --predict: share the model among the processes, or with hybrid among those of each node",
    ["DIST.SHARDING"],
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
PARSER.gone = {
    "--remedies": "is gone; give --variants bf16,checkpointing",
    "--throughput": "is gone; every size found is timed",
    **dict.fromkeys(
        ("--sizes", "--time-budget", "--noise-scale", "--dataset-length", "--epochs"),
        "is gone; --variants and --fractions show the speed of each size found",
    ),
    **dict.fromkeys(
        ("--hf", "--method", "--sequence", "--dtype", "--checkpointing"),
        "is gone; predict the memory of language models with examples/llm_memory.py",
    ),
}
