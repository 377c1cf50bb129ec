"""Resizing of images: repetition by integers, and interpolation in PyTorch's modes."""

from .op import interpolate, upsample_nearest

__all__ = ["interpolate", "upsample_nearest"]
