"""Networks: a timm backbone with one head per rank, or a user's own module."""

from linnaeus.models.build import build_model

__all__ = ["build_model"]
