"""`linnaeus check-data`: reads every image of a configuration's data once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from linnaeus.cli.parser import CommandParser, Options, read_request
from linnaeus.config.schema import Config
from linnaeus.runtime.errors import ConfigError, DataError
from linnaeus.runtime.words import counted


def read(argv: Sequence[str]) -> str | tuple[Options, Config]:
    """Read the tokens after `check-data`. Return a text to print, or the arguments of `run`.

    Raises:
        ConfigError: lists all mistakes.
    """
    return read_request(PARSER, argv)


def run(_: Options, config: Config) -> int:
    """Check the data and report the findings. Return exit code 0.

    Raises:
        ConfigError: the data has no image files.
        DataError: lists the damaged files; or the labels cannot be used.
    """
    from linnaeus.data.checked import find_damaged, measure_ranges
    from linnaeus.data.datasets import build_data
    from linnaeus.data.image_files import ImageFiles

    started = time.monotonic()
    skipping = replace(config.DATA, ON_BAD_IMAGE="skip")  # all is read below
    data = build_data(skipping, seed=config.EXPERIMENT.SEED, reads_images=False)
    if not (isinstance(data.train, ImageFiles) and isinstance(data.val, ImageFiles)):
        raise ConfigError(
            "DATA.DATASET: its samples are not image files, so there is nothing to check; "
            "add data=imagefolder or data=manifest"
        )
    splits = {name: split for name, split in data.splits.items() if isinstance(split, ImageFiles)}
    files = [file for split in splits.values() for file in split.files]
    held = {name: split.files for name, split in splits.items()}
    decoding, notes = measure_ranges(held, data.train.channels, data.train.decoding)
    damaged, num_known = find_damaged(files, data.train.channels, decoding)
    seconds = time.monotonic() - started
    print(*data.report, *notes, sep="\n")
    print(
        f"{counted(len(files), 'image')} checked in {seconds:.1f} s, {num_known} of them known from before"
    )
    if damaged:
        lines = [f"{counted(len(damaged), 'image')} cannot be read:"]
        lines += [f"  {files[i]}: {reason}" for i, reason in damaged.items()]
        raise DataError(
            "\n".join([*lines, "Remove or replace them, or set DATA.ON_BAD_IMAGE skip"])
        )
    return 0


PARSER = CommandParser(
    "check-data",
    Options,
    print_config="print the configuration, resolved, and exit",
    description="""\
Reads all images of all splits, and names the damaged ones. Intact files are remembered by path, size and time
of modification, and not read again: neither here nor by a run with DATA.ON_BAD_IMAGE skip.
""",
    details="""\
examples:
  linnaeus check-data data=imagefolder DATA.DATASET.ROOT /data/birds
  linnaeus check-data data=manifest DATA.DATASET.ROOT=/data/leaves
  linnaeus check-data --cfg my_exp.yaml

exit codes: 0 all images can be read, 1 damaged images or wrong labels, 2 configuration, 130 Ctrl-C
""",
)
