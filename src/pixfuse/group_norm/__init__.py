"""Group normalisation with optional SiLU, in the layout of the input."""

from .op import group_norm

__all__ = ["group_norm"]
