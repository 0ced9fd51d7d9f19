"""`python -m linnaeus.main`, which torchrun starts: another name of the command `linnaeus`."""

from linnaeus.cli.main import cli as cli
from linnaeus.cli.main import console as console

if __name__ == "__main__":
    raise SystemExit(cli())
