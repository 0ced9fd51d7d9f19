"""Networks: a timm backbone with one head per taxonomic rank, or a user's own module."""
