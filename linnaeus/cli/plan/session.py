"""An analysis, which `linnaeus plan` is."""

from linnaeus.cli.analyze.session import run

__all__ = ["run"]
