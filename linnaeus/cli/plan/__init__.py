"""Which batch size is worth its time, before a long run: `linnaeus plan`."""
