"""`linnaeus export`: write trained runs as files for other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.cli.arguments import naming_options
from linnaeus.cli.parser import CheckpointOptions, CommandParser, choice, option, read_count
from linnaeus.inference.export import FORMATS, OUTPUTS
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.signals import StopRequest, leaving_at_once

DESCRIPTION = """\
Writes the model of a trained run to a file for other programs, with its classes, taxonomy and preprocessing.
Linnaeus reads the file back and compares its outputs with the run.
"""
DETAILS = """\
formats:
  safetensors     the weights; the description is in the header
  onnx            for onnxruntime and others; needs pip install 'linnaeus[export]'
  torch-export    for torch.export.load, without the model's code

ONNX and torch.export files take normalized images [B, C, H, W] with any B. They return probabilities
[B, classes] for each level, by name. If file and run give different outputs for random pixels, the command
fails and writes nothing.

examples:
  linnaeus export runs/birds --format onnx --output birds.onnx
  linnaeus export runs/birds --format onnx --preprocessing --half --opset 20
  linnaeus export runs/birds --format torch-export

exit codes: 0 done, 1 the export failed or gives other outputs, 2 option, 130 Ctrl-C, 143 SIGTERM
"""


@dataclass
class ExportOptions(CheckpointOptions):
    """Options of `linnaeus export`."""

    format: str = choice("file format", FORMATS, "")
    output: Path | None = option(
        "output file, replaced if it exists; default: export/model.<ending> in the run directory",
        "FILE",
        Path,
    )
    outputs: str = choice(
        "outputs of ONNX and torch.export files; default probabilities", OUTPUTS, "probabilities"
    )
    opset: int | None = option(
        "ONNX operator set version; default: the exporter's", "N", read_count
    )
    half: bool = option("ONNX and torch.export: weights and arithmetic in float16")
    preprocessing: bool = option(
        "ONNX and torch.export: take uint8 pixels of the model's size and normalize them in the graph"
    )
    device: str = option("auto, cpu, cuda, cuda:1, ...", "DEVICE", default="cpu")


def read(argv: Sequence[str]) -> tuple[ExportOptions]:
    """Read the tokens after `export` and return the argument of `run`.

    >>> (options,) = read([__file__, "--format", "onnx", "--device", "cuda"])
    >>> options.run.name, options.format, options.device
    ('export.py', 'onnx', 'cuda')

    Raises:
        ConfigError: lists all mistakes.
    """
    options, words, problems = PARSER.words(argv)
    problems += [f"RUN: name only one run; leave out {word}" for word in words]
    if not options.format and not any(problem.startswith("--format") for problem in problems):
        problems.append(f"--format: is missing; set one of {', '.join(FORMATS)}")
    if problems:
        raise ConfigError(problems)
    return (options,)


def run(options: ExportOptions) -> int:
    """Export the run, print the result of the check and return exit code 0.

    Raises:
        LinnaeusError: an error that the user can fix; the message says how.
    """
    with leaving_at_once():
        from linnaeus.inference.export.run import export_run

    with naming_options(), StopRequest().listening():
        trained = options.load(options.run, options.device)
        print(trained.description, file=sys.stderr)
        exported = export_run(
            trained,
            options.format,
            options.output,
            outputs=options.outputs,
            opset=options.opset,
            half=options.half,
            preprocessing=options.preprocessing,
        )
    print(f"{exported.path}  {exported.num_bytes / 1e6:.2f} MB")
    verdict = "equal"
    if exported.difference is not None:
        verdict = f"{exported.kind} differ by at most {exported.difference:.2g}"
    print(f"read back and compared with the run: {verdict}")
    return 0


PARSER = CommandParser(
    "export",
    ExportOptions,
    words="RUN --format FORMAT [options]",
    description=DESCRIPTION,
    details=DETAILS,
)
