"""`linnaeus plan`: another name of `linnaeus analyze`, with speeds of training at the configured fraction."""

from linnaeus.cli.analyze.options import PARSER, Options
from linnaeus.cli.analyze.options import read_plan as read
from linnaeus.config.schema import Config

__all__ = ["PARSER", "read", "run"]


def run(options: Options, config: Config) -> int:
    """As `linnaeus analyze`."""
    from linnaeus.cli.analyze.session import run as analyze

    return analyze(options, config)
