"""Results of several runs side by side, and what differs in their configurations: `linnaeus compare`."""
