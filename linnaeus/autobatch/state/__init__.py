"""A trial leaves no trace: what it changes is put back bit for bit."""
