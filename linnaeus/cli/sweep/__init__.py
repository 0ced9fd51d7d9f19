"""Several runs over a grid of values, with their results compared: `linnaeus sweep`."""
