"""Linnaeus: config-driven PyTorch training that finds the largest memory-safe batch size before it starts."""
