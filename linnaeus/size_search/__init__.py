"""What the search of a run needs, and the batch plan that follows: the only use of the library here."""
