"""The command line of `linnaeus analyze`. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from linnaeus.autobatch.predict.gpus import GIB, GPUS, Gpu, find_gpu
from linnaeus.autobatch.result import Mode
from linnaeus.cli.parser import (
    CommandParser,
    Options,
    choice,
    option,
    read_choice,
    read_count,
    read_number,
    read_plot,
    read_request,
    read_table,
)
from linnaeus.config.keys import suggest
from linnaeus.config.schema import Config
from linnaeus.runtime.errors import ConfigError

MODES: tuple[Mode, ...] = get_args(Mode)
CONFIGURED = "as configured"
"""The unchanged configuration: the first row of every table."""
VARIANTS: dict[str, tuple[str, Any]] = {
    "bf16": ("TRAIN.AMP", "bf16"),
    "channels_last": ("TRAIN.CHANNELS_LAST", True),
    "checkpointing": ("TRAIN.GRADIENT_CHECKPOINTING", True),
    "compile": ("TRAIN.COMPILE", True),
    "half_resolution": ("DATA.IMG_SIZE", None),
}
"""The key that each variant changes, and its value; None is half of the value."""

DESCRIPTION = """\
Finds the maximum batch size within each fraction of the device's memory, for training and validation, with
its peak and its speed. --variants adds rows with one setting changed. --predict predicts the same table for
other GPUs, without running anything. --lr trains for 100 steps and suggests a learning rate.
"""
DETAILS = """\
Only the training and validation steps are timed, without data loading and communication between ranks.
Overrides work as in `linnaeus train --help`. The keys of DATA.AUTOBATCH set the bounds and the budget of the
search, as in a run.

examples:
  linnaeus analyze --cfg my_exp.yaml --fractions 0.6,0.8 --modes train,val
  linnaeus analyze --cfg my_exp.yaml --variants bf16,checkpointing --output sizes.csv --plot sizes.png
  linnaeus analyze --cfg my_exp.yaml --predict --gpu a100-40gb,rtx-4090,h100-80gb
  linnaeus analyze --cfg my_exp.yaml --predict --gpu a100-80gb --world-size 1,8,64 --sharding full
  linnaeus analyze --cfg my_exp.yaml --predict --gpu rtx-4090 --require 64
  linnaeus analyze --cfg my_exp.yaml --axis img_size --batch-size 64
  linnaeus analyze --cfg my_exp.yaml --lr --plot rates.png
  linnaeus analyze model=vit_small DATA.DATASET.NAME=synthetic DATA.AUTOBATCH.MEMORY_LIMIT_GB=16

exit codes: 0 done, 2 configuration or option, 3 nothing fits, 130 interrupted (the results so far are
written), 1 any other error
"""


def _ascending(read_one: Callable[[str], float], text: str) -> list[float]:
    return sorted({read_one(part) for part in text.split(",")})


def read_gpus(text: str) -> list[Gpu]:
    """GPUs by their names or GiB, with commas between them; `ValueError` for a name that is not known."""
    return list(dict.fromkeys(map(_gpu, text.split(","))))


def _gpu(name: str) -> Gpu:
    if re.fullmatch(r"[\d.]+", name.strip()):
        size = read_number("number of GiB", name)
        return Gpu(f"{size:g} GiB", int(size * GIB))
    try:
        return find_gpu(name)
    except KeyError:
        hint = suggest(name.strip().lower(), GPUS)
        raise ValueError(
            f"{name!r} is not a known GPU{hint}; known are {', '.join(GPUS)}; for others give "
            "their GiB, such as --gpu 24"
        ) from None


def _several(choices: Iterable[str], text: str) -> list[str]:
    choices = tuple(choices)
    names = {read_choice(choices, name.strip()) for name in text.split(",")}
    return [name for name in choices if name in names]


_SIZES = {"--lr": "only trains"}


@dataclass
class AnalyzeOptions(Options):
    """Options of `linnaeus analyze`. Fractions are ascending."""

    output: Path | None = option(
        "results as .json, .jsonl or .csv; default batch_sizes.json", "FILE", read_table
    )
    plot: Path | None = option(
        "plot the results as .png or .svg",
        "FILE",
        read_plot,
        not_with={"--predict": "runs nothing"},
    )
    fractions: list[float] = option(
        "fractions of the device's memory, each in (0, 1]; default 0.6,0.7,0.8,0.9",
        "F,F,...",
        partial(_ascending, partial(read_number, "fraction of the memory", most=1)),
        lambda: [0.6, 0.7, 0.8, 0.9],
        not_with=_SIZES,
    )
    modes: list[Mode] = option(
        "train, val or both; default train,val",
        "M,M",
        partial(_several, MODES),
        lambda: [*MODES],
        choices=MODES,
        not_with=_SIZES,
    )
    variants: list[str] = option(
        f"add rows with one setting changed: {', '.join(VARIANTS)}",
        "V,V,...",
        partial(_several, VARIANTS),
        list,
        choices=VARIANTS,
        not_with=_SIZES,
    )
    predict: bool = option("run nothing, and predict for the GPUs named by --gpu", not_with=_SIZES)
    gpu: list[Gpu] = option(
        f"GPUs to predict for, by name or by the GiB that torch reports: {', '.join(GPUS)}",
        "NAME|GIB,...",
        read_gpus,
        list,
        choices=GPUS,
        needs="--predict",
    )
    world_size: list[int] = option(
        "number of ranks, or several such as 1,8,64; default 1",
        "N",
        partial(_ascending, read_count),
        lambda: [1],
        needs="--predict",
    )
    sharding: None = choice(
        "shard the model over all ranks, or with hybrid over the ranks of each node",
        ("full", "hybrid", "none"),
        key="DIST.SHARDING",
        needs="--predict",
    )
    require: int | None = option(
        "exit with 3 if this batch size does not fit in the largest fraction",
        "N",
        read_count,
        not_with=_SIZES,
    )
    axis: str | None = option(
        "find the largest side of the images for --batch-size, instead of the batch size",
        "img_size",
        partial(read_choice, ("img_size",)),
        choices=("img_size",),
        not_with={
            **_SIZES,
            "--predict": "runs nothing",
            "--require": "is for the batch size",
            "--variants": "change the batch size",
        },
    )
    batch_size: int = option("images per batch; default 64", "N", read_count, 64, needs="--axis")
    lr: bool = option(
        "train 100 steps of DATA.BATCH_SIZE with a rising learning rate, and suggest one"
    )


def read(argv: Sequence[str]) -> str | tuple[AnalyzeOptions, Config]:
    """Read the tokens after `analyze`. Return a text to print, or the arguments of the session's `run`.

    >>> options, config = read(["--fractions", "0.8,0.5", "--variants=compile,bf16", "TRAIN.EPOCHS=3"])
    >>> options.fractions, options.variants, config.TRAIN.EPOCHS
    ([0.5, 0.8], ['bf16', 'compile'], 3)

    Raises:
        ConfigError: lists all mistakes in the options and the configuration.
    """
    request = read_request(PARSER, argv)
    if not isinstance(request, str):
        options = request[0]
        if options.predict and not options.gpu:
            raise ConfigError(
                "--predict: name GPUs, such as --gpu rtx-4090, or their GiB: --gpu 24"
            )
    return request


PARSER = CommandParser(
    "analyze",
    AnalyzeOptions,
    description=DESCRIPTION,
    details=DETAILS,
    print_config="print the configuration that would be measured, and exit",
)
