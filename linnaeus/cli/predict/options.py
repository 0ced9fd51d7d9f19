"""The command line of `linnaeus predict`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from linnaeus.cli.options import check_files, read_count, read_table
from linnaeus.cli.run_options import RunCommandParser, check_run, refuse
from linnaeus.inference.paths import STDIN, problem_of

DESCRIPTION = """\
Names the most probable classes of images, for each taxonomic rank, with a trained run. RUN is the folder of a
run or one of its checkpoints. IMAGES are files, folders (with all below), patterns such as '*.jpg' and
'photos/**/*.png', and - for a list of paths on standard input, one per line.
"""
DETAILS = """\
Any number of images can be predicted: they are read, predicted and written one after another, in the order in
which they are named (the files of a folder by name). Without --output they are printed for people; progress
and notes go to standard error. Images that cannot be read are reported there and left out.

examples:
  linnaeus predict runs/birds photos/ --output birds.csv
  linnaeus predict runs/birds a.jpg b.jpg --top 3 --path
  find /data -name '*.jpg' | linnaeus predict runs/birds - --output birds.jsonl --device cuda

exit codes: 0 done, 1 not one image could be read, or anything else, 2 option, 3 not even one image fits into
memory, 130 Ctrl-C, 143 SIGTERM (what was predicted is kept in FILE.partial), 141 the reader of standard
output, such as head, has gone
"""


@dataclass
class Options:
    """What to predict, with what, and where to.

    Attributes:
        run: folder of a run, or a checkpoint.
        images: words for `inference.paths.walk`.
        checkpoint: `best`, `last`, or a file.
        output: .csv, .json or .jsonl; None prints.
        top: classes for each level.
        path: whether to add the most probable consistent path.
        device: torch device, or `auto`.
        batch_size: images in a batch; None finds it.
        workers: threads that load images; None is one for each CPU core, at most 8.
    """

    run: str = ""
    images: list[str] = field(default_factory=list)
    checkpoint: str = "best"
    output: Path | None = None
    top: int = 5
    path: bool = False
    device: str = "auto"
    batch_size: int | None = None
    workers: int | None = None


def read(argv: Sequence[str]) -> str | tuple[Options]:
    """Read the tokens after `predict`: the help, or the argument of the session's `run`.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    options = Options()
    found = PARSER.words(argv, options)
    if found is None:
        return PARSER.format_help()
    words, problems = found
    if not words:
        problems.append("RUN: name the folder of a run and the images: linnaeus predict runs/birds photos/")
    else:
        options.run, options.images = words[0], words[1:]
        problems += check_run(options.run)
        if not options.images:
            problems.append(f"IMAGES: name files, folders or patterns after {options.run}, or - for a list")
        problems += [
            f"IMAGES: {word}: {problem}"
            for word in options.images
            if (problem := problem_of(word)) is not None
        ]
        if options.images.count(STDIN) > 1:
            problems.append("IMAGES: - stands there twice, but standard input can be read once")
    refuse(problems)
    check_files({"--output": options.output})
    if options.output is not None:
        check_files({"--output": skipped_name(options.output)})
    return (options,)


def skipped_name(output: Path) -> Path:
    """The table of the images that could not be read, beside the predictions."""
    return output.with_name(f"{output.name}.skipped.csv")


def _read_workers(text: str) -> int:
    return 0 if text == "0" else read_count(text)


PARSER = RunCommandParser("predict", words="RUN IMAGES...", description=DESCRIPTION, details=DETAILS)
PARSER.option(
    "--output", "FILE", read_table,
    "write .csv, .json or .jsonl by its ending, instead of printing; the file appears when all is done",
)  # fmt: skip
PARSER.option("--top", "K", read_count, "classes for each taxonomic rank; default 5")
PARSER.switch(
    "--path", "add the most probable path through the taxonomy, on which each class is the parent of the next"
)
PARSER.add_run_options()
PARSER.option(
    "--batch-size", "N", read_count,
    "images in a batch; default: the largest that fits, at most 512 (64 on the CPU)",
)  # fmt: skip
PARSER.option(
    "--workers", "N", _read_workers,
    "threads that load images; 0 for none; default: one for each CPU core, at most 8",
)  # fmt: skip
