"""Trained runs for other programs: `linnaeus export`."""
