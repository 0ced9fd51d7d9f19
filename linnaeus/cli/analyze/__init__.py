"""The trade-off between memory and batch size, measured before a long run: `linnaeus analyze`."""
