"""`python -m linnaeus.train`: another name of `python -m linnaeus.main`."""

from linnaeus.main import cli

if __name__ == "__main__":
    raise SystemExit(cli())
