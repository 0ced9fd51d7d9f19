"""Trained runs in use: what evaluation, prediction and export start from."""
