"""Networks: a timm backbone with one head per level of the taxonomy, or a user's own module."""
