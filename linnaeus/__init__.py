"""Linnaeus: config-driven PyTorch training that finds the largest memory-safe batch size before it starts."""

__version__ = "0.1.0"
