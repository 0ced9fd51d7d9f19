"""Trained runs in use: evaluation, prediction, export."""
