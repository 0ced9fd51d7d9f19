"""`linnaeus check-data`: reads every image of a configuration's data once."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from linnaeus.cli.parser import CommandParser, read_request
from linnaeus.config.schema import Config
from linnaeus.errors import ConfigError, DataError
from linnaeus.words import counted


def read(argv: Sequence[str]) -> str | tuple[Namespace, Config]:
    """Read the tokens after `check-data`: a text to print, or the arguments of `run`.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    return read_request(PARSER, argv, Namespace())


def run(_: Namespace, config: Config) -> int:
    """Check the data and say what was found; returns the exit code: 0.

    Raises:
        DataError: lists the damaged files; or the labels cannot be used.
    """
    from linnaeus.data.checked import find_damaged
    from linnaeus.data.datasets import build_data
    from linnaeus.data.image_files import ImageFiles

    started = time.monotonic()
    node = replace(config.DATA, ON_BAD_IMAGE="raise")  # all is read below
    data = build_data(node, seed=config.EXPERIMENT.SEED)
    if not (isinstance(data.train, ImageFiles) and isinstance(data.val, ImageFiles)):
        raise ConfigError(
            "DATA.DATASET: has no image files; check-data reads imagefolder and manifest"
        )
    files = data.train.files + data.val.files
    damaged, num_known = find_damaged(files, data.train.channels, data.train.decoding)
    seconds = time.monotonic() - started
    print(*data.report, sep="\n")
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
    print_config="print the configuration, resolved, and exit",
    description="""\
Reads all images of training and validation, and names the damaged ones. Intact files are remembered by path,
size and time of modification, and not read again: neither here nor by a run with DATA.ON_BAD_IMAGE skip.
""",
    details="""\
examples:
  linnaeus check-data data=imagefolder DATA.DATASET.ROOT /data/birds
  linnaeus check-data data=manifest DATA.DATASET.ROOT=/data/leaves
  linnaeus check-data --cfg my_exp.yaml

exit codes: 0 all images can be read, 1 damaged images or wrong labels, 2 configuration, 130 Ctrl-C
""",
)
