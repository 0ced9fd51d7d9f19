"""`linnaeus export`: trained runs as files for other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linnaeus.cli.arguments import naming_options
from linnaeus.cli.parser import CommandParser, RunOptions, choice, option, read_count
from linnaeus.inference.export import FORMATS, OUTPUTS
from linnaeus.runtime.errors import ConfigError
from linnaeus.runtime.signals import StopRequest, leaving_at_once

DESCRIPTION = """\
Writes a trained run's model as a file that other programs read, with its classes, taxonomy and preprocessing
in it. The file is read back at once and must give the run's outputs.
"""
DETAILS = """\
formats:
  safetensors     the weights; the description is in the header
  onnx            for onnxruntime and others; needs pip install 'linnaeus[export]'
  torch-export    for torch.export.load, without the model's code

ONNX and torch.export files take images [B, C, H, W], normalised, with any B, and give probabilities [B,
classes] for each level, by its name. If the outputs of file and run differ on random pixels, this is an error
and nothing is written.

examples:
  linnaeus export runs/birds --format onnx --output birds.onnx
  linnaeus export runs/birds --format onnx --preprocessing --half --opset 20
  linnaeus export runs/birds --format torch-export

exit codes: 0 done, 1 it cannot be exported so, or gives other outputs, 2 option, 130 Ctrl-C, 143 SIGTERM
"""


@dataclass
class ExportOptions(RunOptions):
    """What to export, and where to."""

    format: str = choice("kind of file", FORMATS, "")
    output: Path | None = option(
        "file; one that is there is replaced; default: export/model.<ending> in the run's folder",
        "FILE",
        Path,
    )
    outputs: str = choice(
        "what ONNX and torch.export files give; default probabilities", OUTPUTS, "probabilities"
    )
    opset: int | None = option(
        "version of ONNX's operators; default: the exporter's own", "N", read_count
    )
    half: bool = option("ONNX and torch.export: weights and arithmetic in float16")
    preprocessing: bool = option(
        "ONNX and torch.export: take uint8 pixels of the model's size, and normalise them in the graph"
    )
    device: str = option("auto, cpu, cuda, cuda:1, ...", "DEVICE", default="cpu")


def read(argv: Sequence[str]) -> tuple[ExportOptions]:
    """Read the tokens after `export`: the argument of `run`.

    >>> (options,) = read([__file__, "--format", "onnx", "--device", "cuda"])
    >>> options.run.name, options.format, options.device
    ('export.py', 'onnx', 'cuda')

    Raises:
        ConfigError: lists everything that is wrong.
    """
    options, words, problems = PARSER.words(argv)
    problems += [f"RUN: name one run, and not {word} too" for word in words]
    if not options.format and not any(problem.startswith("--format") for problem in problems):
        problems.append(f"--format: is missing; give one of {', '.join(FORMATS)}")
    if problems:
        raise ConfigError(problems)
    return (options,)


def run(options: ExportOptions) -> int:
    """Export the run and say how the result was checked; returns the exit code: 0.

    Raises:
        LinnaeusError: something that the user can mend; the message says how.
    """
    with leaving_at_once():
        from linnaeus.inference.export.run import export_run
        from linnaeus.inference.trained import load_run

    with naming_options(), StopRequest().listening():
        trained = load_run(
            options.run,
            checkpoint=options.checkpoint or "best",
            device=options.device,
            trust_code=options.trust_code,
        )
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
    gone={
        "--images": "is gone; leave it out: the check needs no images",
        "--level": "is gone; docs/export.md shows how to make a folder for timm from a safetensors file",
    },
)
