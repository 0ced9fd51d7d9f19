"""Sweeps: a folder with a list of runs, and workers that take them."""
