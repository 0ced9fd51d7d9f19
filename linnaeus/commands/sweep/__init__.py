"""Several runs over a grid of values, and what each of them comes to: `linnaeus sweep`."""
