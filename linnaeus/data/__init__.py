"""Datasets, taxonomy, transforms, loaders, and made-up batches of any size."""
