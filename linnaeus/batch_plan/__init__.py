"""From the largest batch that fits to everything that depends on it. Pure: no torch."""
