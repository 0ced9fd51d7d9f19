"""Several ranks that search for one size together."""
