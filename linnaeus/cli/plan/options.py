"""The command line of `linnaeus plan`, which is that of `linnaeus analyze` with other defaults."""

from linnaeus.cli.analyze.options import PARSER, Options
from linnaeus.cli.analyze.options import read_plan as read

__all__ = ["PARSER", "Options", "read"]
