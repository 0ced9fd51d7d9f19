"""What a device has and uses, a cap on it, and what an out-of-memory error looks like."""
