"""The command line of `linnaeus export`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from linnaeus.cli.run_options import RunCommandParser, check_run, read_choice, refuse
from linnaeus.inference.export import FORMATS, OUTPUTS
from linnaeus.inference.paths import STDIN, problem_of

DESCRIPTION = """\
Writes a trained run's model as a file that other programs read, with its classes, taxonomy, normalisation and
image size in it. The file is read back at once and must give the run's outputs on real images.
"""
DETAILS = """\
formats:
  safetensors     the weights; the description is in the header
  onnx            for onnxruntime and others; needs pip install 'linnaeus[export]'
  torch-export    for torch.export.load, without the model's code
  timm            a folder for timm.create_model("local-dir:FOLDER", pretrained=True), with the head of a rank

ONNX and torch.export files take images [B, C, H, W], normalised, with any B, and give probabilities [B,
classes] for each rank, by its name. The check uses --images, else images of the run's dataset, else noise,
and says which. Where the outputs differ, this is an error and nothing is written.

examples:
  linnaeus export runs/birds --format onnx --output birds.onnx
  linnaeus export runs/birds --format timm --output birds_timm --level species
  linnaeus export runs/birds --format torch-export --images photos/

exit codes: 0 done, 1 it cannot be exported so, or gives other outputs, 2 option, 130 Ctrl-C, 143 SIGTERM
"""


@dataclass
class Options:
    """What to export, and where to.

    Attributes:
        run: folder of a run, or a checkpoint.
        format: one of `FORMATS`.
        checkpoint: `best`, `last`, or a file.
        output: file, or folder for timm; None is `export/` in the run's folder.
        outputs: one of `OUTPUTS`.
        level: rank whose head timm gets; None is the finest.
        images: words for `inference.paths.walk`; the result is checked on these images.
        device: torch device of the check, and of a torch.export file.
    """

    run: str = ""
    format: str = ""
    checkpoint: str = "best"
    output: Path | None = None
    outputs: str = "probabilities"
    level: str | None = None
    images: list[str] = field(default_factory=list)
    device: str = "cpu"


def read(argv: Sequence[str]) -> str | tuple[Options]:
    """Read the tokens after `export`: the help, or the argument of the session's `run`.

    >>> (options,) = read([".", "--format", "onnx", "--device", "cuda"])
    >>> options.run, options.format, options.device
    ('.', 'onnx', 'cuda')

    Raises:
        ConfigError: lists everything that is wrong.
    """
    options = Options()
    rest, images = _take_images(argv)
    found = PARSER.words(rest, options)
    if found is None:
        return PARSER.format_help()
    words, problems = found
    options.images = images
    if len(words) != 1:
        also = f"not {len(words)} words: {' '.join(words)}" if words else "it is missing"
        problems.append(f"RUN: name the folder of one run, such as runs/birds; {also}")
    else:
        options.run = words[0]
        problems += check_run(options.run)
    if not options.format and not any(problem.startswith("--format") for problem in problems):
        problems.append(f"--format: is missing; give one of {', '.join(FORMATS)}")
    problems += [
        f"--images: {word}: {problem}" for word in options.images if (problem := problem_of(word)) is not None
    ]
    if STDIN in images:
        problems.append("--images: takes no list from standard input")
    refuse(problems)
    return (options,)


def _take_images(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The other tokens, and the words after `--images` up to the next option."""
    rest, images = list[str](), list[str]()
    is_image = False
    for token in argv:
        name, has_value, value = token.partition("=")
        if name == "--images":
            is_image = not has_value
            images += [value] if has_value else []
        elif token.startswith("--") or not is_image:
            is_image = False
            rest.append(token)
        else:
            images.append(token)
    return rest, images


PARSER = RunCommandParser("export", words="RUN --format FORMAT", description=DESCRIPTION, details=DETAILS)
PARSER.option("--format", "|".join(FORMATS), partial(read_choice, FORMATS), "kind of file")
PARSER.option(
    "--output", "FILE", Path, "file, or folder for timm; one that is there is replaced; default: "
    "export/model.<ending> or export/timm in the run's folder",
)  # fmt: skip
PARSER.option(
    "--outputs", "|".join(OUTPUTS), partial(read_choice, OUTPUTS),
    "what ONNX and torch.export files give; default probabilities",
)  # fmt: skip
PARSER.option("--level", "NAME", str, "rank whose head timm gets; default: the finest")
PARSER.option("--images", "FILE", str, "files, folders and patterns for the check, up to the next option")
PARSER.add_run_options()
