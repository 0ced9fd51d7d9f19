"""The version of Linnaeus."""

__version__ = "0.1.0"
