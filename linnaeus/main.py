"""`python -m linnaeus.main`, which torchrun starts: another name of the command `linnaeus`."""

import sys

try:
    from linnaeus.cli.main import cli as cli
    from linnaeus.cli.main import console as console
except KeyboardInterrupt:
    print("interrupted by Ctrl-C", file=sys.stderr, flush=True)
    raise SystemExit(130) from None

if __name__ == "__main__":
    raise SystemExit(cli())
