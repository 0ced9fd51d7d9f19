"""The search of a run, and the batch plan that follows: the only use of the library here."""
